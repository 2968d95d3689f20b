"""Numbers in words: sizes, counts, ranges."""

from __future__ import annotations

from collections.abc import Iterable


def size(value: int) -> str:
    """`256 MiB`, `1.5 KiB`, `17 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value} B"


def count(number: int, word: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7, 9-10`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def gigabytes(value: float) -> str:
    """Bytes per second as `48.2 GB/s`."""
    return f"{value / 1e9:.4g} GB/s"


def names(hosts: Iterable[str], most: int = 8) -> str:
    """`a, b and c`; beyond `most` the rest is counted."""
    known = list(hosts)
    if len(known) > most:
        return f"{', '.join(known[:most])} and {len(known) - most} more"
    return known[0] if len(known) == 1 else f"{', '.join(known[:-1])} and {known[-1]}"


def without_domain(hosts: Iterable[str]) -> dict[str, str]:
    """Host > its name for a figure: without the domain that all hosts share."""
    known = list(hosts)
    domains = {name.partition(".")[2] for name in known}
    if len(domains) > 1 or any(name.replace(".", "").isdigit() for name in known):
        return {name: name for name in known}
    return {name: name.partition(".")[0] for name in known}
