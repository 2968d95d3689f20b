"""How much memory and how many CPUs this process may use: cgroup limits and the affinity mask,
never the machine's total alone."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evener.base.units import has_unit, parse_size
from evener.errors import UsageError

logger = logging.getLogger("evener")

KEEP = 0.95
"""Share of the free host memory that `auto` takes: the rest is for the interpreter and files."""


@dataclass(frozen=True)
class Budget:
    """Bytes of accelerator memory (each GPU), of host memory (this process), and of a file on the
    SSD (this process) in `folder`. `spare`: of the accelerator's, beside `gpu`, what is left to the
    script."""

    gpu: int
    host: int
    ssd: int = 0
    folder: str = ""
    spare: int = 0


def size(text: str | int | float, name: str) -> int:
    """Bytes from `24GB` (10^9), `24GiB` (2^30) or a number. Raises UsageError."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = int(text)
    else:
        if not has_unit(str(text)):
            raise UsageError(
                f"budget {name}={text!r} has no unit", f"write {text}GB, or {text}GiB for 2^30"
            )
        try:
            value = parse_size(str(text))
        except ValueError:
            raise UsageError(
                f"budget {name}={text!r} is not a size", 'give bytes, or text as "24GB"'
            ) from None
    if value < 0:
        raise UsageError(f"budget {name}={text!r} is below 0", "give 0 or more")
    return value


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Bytes that the tightest memory cgroup above this process leaves; None without a limit.

    Version 2 and version 1 of the interface; page cache that the kernel can drop counts as free.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    tightest: int | None = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit = root / "memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        place = base / path.lstrip("/")
        for folder in [place, *place.parents]:
            left = _left(folder, limit, usage)
            if left is not None:
                tightest = left if tightest is None else min(tightest, left)
            if folder == base:
                break
    return tightest


def _left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        if allowed == "max" or int(allowed) >= 1 << 60:
            return None
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    figures = dict(zip(stat[::2], stat[1::2], strict=False))
    cache = int(figures.get("inactive_file", figures.get("total_inactive_file", 0)))
    return max(0, int(allowed) - used + cache)


def host_free(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes of host memory that this process can still get."""
    free = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if not (root / "cgroup.controllers").exists() and not (root / "memory").exists():
        _say_unlimited(str(root))
    limit = cgroup_free(root, proc)
    return free if limit is None else min(free, limit)


@functools.cache
def _say_unlimited(root: str) -> None:
    logger.warning(
        "no memory cgroup is mounted at %s: a limit of this container or job cannot be seen, and "
        "all free memory of the host counts; give the budget where that is too much",
        root,
    )


def resident_now(proc: Path = Path("/proc")) -> int:
    """Bytes of host memory that this process has now."""
    pages = int((proc / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve(
    budget: str | Mapping[str, str | int] | Budget = "auto",
    *,
    gpu_free: int | None = None,
    ranks_here: int = 1,
) -> Budget:
    """A budget in bytes. `auto` (the whole, or either entry): what is free now; host memory is
    shared by the `ranks_here` processes of this node. `spare` is taken off the GPU's."""
    if isinstance(budget, Budget):
        return budget
    given = {} if budget == "auto" else budget
    if not isinstance(given, Mapping):
        raise UsageError(
            f"budget {budget!r} is not known", 'give "auto" or {"gpu": "24GB", "host": "110GB"}'
        )
    if unknown := set(given) - {"gpu", "host", "ssd", "spare"}:
        raise UsageError(
            f"budget has no entry {', '.join(sorted(unknown))}", "it has gpu, host, ssd and spare"
        )
    gpu, host = given.get("gpu", "auto"), given.get("host", "auto")
    free = gpu_free or 0
    folder, room = place(given["ssd"], ranks_here) if given.get("ssd") else ("", 0)
    whole = free if gpu == "auto" else size(gpu, "gpu")
    spare = size(given.get("spare", 0), "spare")
    if spare > whole:
        raise UsageError(
            f"budget spare={given['spare']!r} is more than the GPU's {whole / 1e9:.2f} GB",
            "leave less to the script, or raise budget gpu",
        )
    return Budget(
        whole - spare,
        int(host_free() * KEEP) // ranks_here if host == "auto" else size(host, "host"),
        room,
        folder,
        spare,
    )


def place(text: str | int, ranks_here: int = 1) -> tuple[str, int]:
    """Folder and bytes from `/mnt/nvme:500GB`; from `/mnt/nvme` a share of what is free there.
    Raises UsageError."""
    example = 'give a folder with a size, as "/mnt/nvme:500GB"'
    if not isinstance(text, str):
        raise UsageError(f"budget ssd={text!r} names no folder", example)
    folder, colon, amount = text.rpartition(":")
    if not colon or not has_unit(amount):
        folder, amount = text, ""
    if not folder or not Path(folder).is_dir():
        raise UsageError(f"budget ssd={text!r}: {folder or 'nothing'} is no folder", example)
    if amount:
        return folder, size(amount, "ssd")
    return folder, int(shutil.disk_usage(folder).free * KEEP) // ranks_here
