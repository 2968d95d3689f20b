"""Rates, sizes, times and shares as people write them, and back. All of Evener reads them here.

A unit means one thing everywhere, in what is read and in what is printed:

    gbit, Gb/s, G (of a rate)   10^9 bits per second; b is a bit
    GB/s                        10^9 bytes per second; B is a byte where a rate is meant
    GB                          10^9 bytes
    GiB, G (of a size)          2^30 bytes: a letter alone is binary, as in nccl-tests and dd

A number alone is refused where it could mean two things. What `show_*` writes is read again to the
same value. Large enough to be worth a name and too small for a library: pint is 100 times as much
code, and humanfriendly reads 24GB and 24GiB as the same or not by an option of the caller.
"""

from __future__ import annotations

import re
from fractions import Fraction

from evener.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|b|)(/s|ps|)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|(b|bytes)?)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|m|min)", re.IGNORECASE)
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9}


def parse_rate(text: str, what: str = "rate") -> int:
    """Bits per second from `25gbit`, `500mbit`, `1.5G`, `3GB/s`. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what} {text!r} is not a rate", "write it as 25gbit, 500mbit or 1.5gbit")
    number, prefix, unit, time = match.groups()
    bits = Fraction(number) * _PREFIX[prefix.lower()]
    if not prefix and not unit:
        raise UsageError(f"{what} {text!r} has no unit", f"write {number}gbit or {number}mbit")
    if unit == "B":
        if not time:
            raise UsageError(
                f"{what} {text!r} is a size, and a rate is wanted",
                f"write {number}{prefix.lower()}bit for bits, {number}{prefix}B/s for bytes",
            )
        bits *= 8
    if bits < 1 or bits.denominator != 1:
        raise UsageError(f"{what} {text!r} is not a rate", "write it as 25gbit, 500mbit or 1.5gbit")
    return int(bits)


def show_rate(bits: int) -> str:
    """`25gbit` for 25,000,000,000."""
    for prefix in "tgmk":
        if bits >= _PREFIX[prefix]:
            return f"{_decimal(bits, _PREFIX[prefix])}{prefix}bit"
    return f"{bits}bit"


def parse_size(text: str) -> int:
    """Bytes from `4096`, `64M`, `1.5GiB` (binary), `24GB` (decimal). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    number, prefix, unit, _ = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    base = 1000 if (unit or "").lower() == "b" else 1024
    value = Fraction(number) * base**power
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def has_unit(text: str) -> bool:
    """Whether a size says its unit; 0 needs none."""
    number = text.strip()
    return not number.replace(".", "", 1).isdigit() or not number.strip("0.")


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
