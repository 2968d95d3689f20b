"""What the figures were made on: the machine, the versions, the environment. Never a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener import __version__
from evener.base import settings

_KEPT = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "FI_",
    "UCX_",
    "CUBLAS_",
    "CUDNN_",
    "PYTORCH_",
    "NVIDIA_TF32_OVERRIDE",
)
_GPUS = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|COOKIE", re.IGNORECASE)
_URL_WITH_USER = re.compile(r"://[^/\s]*@")


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change a figure: Evener's own, NCCL's, Gloo's, torch's, CUDA's.

    A name or value that looks like a secret is left out, whatever its prefix.
    """
    declared = settings.registry()
    return {
        name: value
        for name, value in sorted(env.items())
        if (name in declared or name.startswith(_KEPT))
        and not _SECRET.search(name)
        and not _URL_WITH_USER.search(value)
    }


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, kernel, driver. No host name, no address."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "system": platform.system(),
    }
    # One call: without a persistent driver each wakes all GPUs, which takes seconds.
    gpus = [line.rpartition(", ") for line in _lines("nvidia-smi", *_GPUS)]
    if gpus:
        found["gpus"] = [name for name, _, _ in gpus]
        found["driver"] = gpus[0][2]
    return found


def versions() -> dict[str, str]:
    """Python and packages, and Evener's commit where it runs from a clone."""
    found = {"python": platform.python_version(), "evener": __version__}
    for package in ("torch", "torchvision", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # noqa: S112 - it is not installed
            continue
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:  # noqa: S110 - another name follows
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _commit() -> str:
    here = str(Path(__file__).parent)
    # Installed into a user's repository it would be their commit, not ours.
    if not _lines("git", "-C", here, "ls-files", "--", Path(__file__).name):
        return ""
    commit = _lines("git", "-C", here, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _lines("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return commit[0] + (" with changes" if changed else "")


def _lines(*argv: str) -> list[str]:
    try:
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()]
