"""Rates, times, sizes and shares as people write them, and back.

Rates are decimal and in bits: `25gbit`, `25 Gb/s`, `25G` are 25,000,000,000 bits a second. What is
written back by `show_*` is read again to the same value.
"""

from __future__ import annotations

import re
from fractions import Fraction

from evener.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit|b)?(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|m|min)", re.IGNORECASE)
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9}


def parse_rate(text: str, what: str = "rate") -> int:
    """Bits a second from `25gbit`, `500mbit`, `1.5G`. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    bits = Fraction(match[1]) * _PREFIX[match[2].lower()] if match else Fraction(0)
    if bits < 1 or bits.denominator != 1:
        raise UsageError(f"{what} {text!r} is not a rate", "write it as 25gbit, 500mbit or 1.5gbit")
    return int(bits)


def show_rate(bits: int) -> str:
    """`25gbit` for 25,000,000,000."""
    for prefix in "tgmk":
        if bits >= _PREFIX[prefix]:
            return f"{_decimal(bits, _PREFIX[prefix])}{prefix}bit"
    return f"{bits}bit"


def parse_time(text: str, what: str = "time") -> int:
    """Nanoseconds from `2ms`, `1.5s`, `500us`, `2m`. Raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    value = Fraction(match[1]) * _NANOSECONDS[match[2].lower()] if match else Fraction(1, 2)
    if value.denominator != 1:
        raise UsageError(f"{what} {text!r} is not a time", "write it as 2ms, 500us or 12s")
    return int(value)


def show_time(nanoseconds: int) -> str:
    """`2ms` for 2,000,000."""
    for unit in ("s", "ms", "us"):
        if nanoseconds >= _NANOSECONDS[unit]:
            return f"{_decimal(nanoseconds, _NANOSECONDS[unit])}{unit}"
    return f"{nanoseconds}ns"


def parse_share(text: str, what: str = "share") -> float:
    """A share between 0 and 1 from `1%` or `0.01`. Raises UsageError."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{what} {text!r} is not a share", "write it as 1% or 0.01")
    return share


def _decimal(value: int, unit: int) -> str:
    """`value / unit` in full: units are powers of ten, so it always ends."""
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    return f"{whole}.{str(rest).zfill(len(str(unit)) - 1).rstrip('0')}"
