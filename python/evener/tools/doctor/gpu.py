"""Driver, GPUs, torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from evener.tools.doctor.line import Line, read


def driver(root: Path) -> Iterator[Line]:
    """The kernel's NVIDIA driver."""
    text = read(root / "proc/driver/nvidia/version")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    if found:
        yield Line("gpu", "NVIDIA driver", "good", found[1])
    else:
        yield Line(
            "gpu",
            "NVIDIA driver",
            "info",
            "none: this machine trains on the CPU (Gloo)",
            "install the driver if there is a GPU (lspci | grep -i nvidia)",
        )


def gpus(root: Path) -> Iterator[Line]:
    """GPUs as nvidia-smi lists them, and memory that others hold."""
    if str(root) != "/":
        return
    if not shutil.which("nvidia-smi"):
        if (root / "proc/driver/nvidia").exists():
            fix = "install nvidia-utils of the driver's version, or put it on the PATH"
            yield _broken("GPUs", "a driver, and no nvidia-smi", fix)
        return
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        yield _broken("GPUs", "nvidia-smi does not answer", "dmesg | grep -i xid")
        return
    if shown.returncode:
        reason = (shown.stdout or shown.stderr).strip().splitlines()[:1]
        yield _broken("GPUs", " ".join(reason), "dmesg | grep -i nvrm")
        return
    rows = [row.split(", ") for row in shown.stdout.strip().splitlines()]
    names = sorted({row[0] for row in rows})
    if rows:
        yield Line("gpu", "GPUs", "good", f"{len(rows)} x {', '.join(names)}")
    else:
        yield _broken("GPUs", "a driver, and no GPU", "dmesg | grep -i nvrm")
    busy = [str(i) for i, row in enumerate(rows) if _number(row[2]) > 0.1 * _number(row[1])]
    if busy:
        yield Line(
            "gpu",
            "GPU memory",
            "bad",
            f"in use on GPU {', '.join(busy)}",
            "nvidia-smi shows by whom: end them",
            "memory and time of these GPUs; a job that fits by little runs out of memory",
        )


def torch(root: Path) -> Iterator[Line]:
    """torch and the CUDA that it was built for."""
    try:
        import torch
    except ModuleNotFoundError:
        fix = "install the build for your GPU, or pip install 'evener[torch]'"
        yield Line("gpu", "torch", "info", "not installed here: for training alone", fix)
        return
    built = torch.version.cuda
    if built and torch.cuda.is_available():
        yield Line("gpu", "torch", "good", f"{torch.__version__}, CUDA {built}")
    elif read(root / "proc/driver/nvidia/version"):
        yield _broken(
            "torch",
            f"{torch.__version__} cannot use the GPUs (CUDA {built or 'not built in'})",
            "install a torch built for this driver's CUDA (nvidia-smi shows the version)",
        )
    else:
        yield Line("gpu", "torch", "good", f"{torch.__version__}, CPU")


def _broken(name: str, found: str, fix: str) -> Line:
    return Line("gpu", name, "bad", found, fix, severity="broken")


def _number(text: str) -> float:
    found = re.match(r"\s*([\d.]+)", text)
    return float(found[1]) if found else 0.0


CHECKS = (driver, gpus, torch)
