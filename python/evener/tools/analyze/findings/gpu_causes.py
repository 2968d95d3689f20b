"""What CUDA and HIP refuse, as NCCL, its tests and programs print it.

    host:1:2 [0] init.cc:77 NCCL WARN Cuda failure 35 'CUDA driver version is insufficient ...'
    host: Test HIP failure common.cu:1129 'hipErrorInvalidDevice'

The last cause knows no more than CUDA's own words: they are then the reason that is shown.
"""

from __future__ import annotations

import re

from evener.tools.analyze.findings.base import KILLED, LIBRARY, RAISED
from evener.tools.analyze.findings.cause import Cause

ANY = "run.cuda-error"

GPU_CAUSES = (
    Cause(
        "run.gpu-memory",
        "no GPU memory left for NCCL",
        re.compile(r"(?:Cuda|CUDA|HIP) failure.*out of memory|Failed to CUDA (?:malloc|calloc)"),
        "a GPU has no memory left for NCCL",
        "NCCL takes some hundred MB per communicator and GPU.",
        "Leave room: a smaller batch, fewer communicators, or smaller buffers.",
        "export NCCL_BUFFSIZE=1048576",
        "No such error.",
        confidence="measured",
    ),
    Cause(
        "cause.gpu-ecc",
        "a CUDA error that means broken hardware",
        re.compile(
            r"(?:Cuda|CUDA|HIP) (?:failure|error).*(?:uncorrectable|\bECC\b)"
            r"|Cuda failure (?:214|220)\b"
        ),
        "a GPU's memory or NVLink is broken (an uncorrectable error)",
        "The driver says that the hardware failed; the program is not the cause.",
        "Reset that GPU or reboot the node; replace it if the error comes again.",
        "nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg -T | grep -i xid",
        "No uncorrectable error.",
        confidence="measured",
        root=KILLED + 5,
    ),
    Cause(
        "cause.gpu-program",
        "a program's own illegal access on a GPU (Xid 13, 31, 43)",
        re.compile(
            r"(?:Cuda|CUDA|HIP) (?:failure|error).*(?:illegal (?:memory|instruction|address)"
            r"|misaligned|unspecified launch|device-side assert)|Cuda failure (?:700|71[0-9])\b"
        ),
        "a kernel failed on a GPU: an illegal access, before NCCL was called",
        "Errors of kernels arrive late: whoever calls CUDA next is told, here NCCL. The kernel is "
        "the program's or a library's.",
        "Look for an Xid in the kernel's log first; if there is none, run once with blocking "
        "launches, which names the Python line.",
        "dmesg -T | grep -i xid; CUDA_LAUNCH_BLOCKING=1 COMMAND; compute-sanitizer COMMAND",
        "The line that launches the kernel.",
        root=RAISED,
        unless=re.compile(r"peer mapping resources"),
    ),
    Cause(
        "network.p2p-limit",
        "more GPUs than one can map as peers",
        re.compile(r"peer mapping resources exhausted"),
        "a GPU cannot map the memory of more than 8 peers on one host",
        "Peer access over PCIe is limited in number. A run with more GPUs on one host needs "
        "NVSwitch, or another way for some pairs.",
        "Use at most 8 GPUs per process group of a host, or let NCCL go through host memory "
        "between CPUs.",
        "export NCCL_P2P_LEVEL=PXB; nvidia-smi topo -p2p r",
        "The set-up ends.",
        confidence="measured",
        root=LIBRARY + 1,
    ),
    Cause(
        "host.driver-old",
        "a driver that does not fit the CUDA that the program brings",
        re.compile(
            r"driver version is insufficient|forward compatibility was attempted"
            r"|unsupported toolchain|named symbol not found|driver / cuda driver combination"
            r"|NVIDIA driver on your system is too old|Cuda failure (?:35|222|500|803|804)\b"
        ),
        "the NVIDIA driver does not fit the CUDA version of the program: mostly it is too old",
        "NCCL or torch is built for a newer CUDA than the driver knows, or a container brings "
        "libraries of another driver (a compat folder on LD_LIBRARY_PATH).",
        "Update the driver, or install a build for the CUDA version that nvidia-smi shows. In a "
        "container look for another libcuda.so first.",
        "nvidia-smi | head -4; python -c 'import torch; print(torch.version.cuda)'; "
        "ldconfig -p | grep libcuda.so; echo $LD_LIBRARY_PATH",
        "CUDA's version in nvidia-smi is at least that of the program.",
        root=LIBRARY + 2,
    ),
    Cause(
        "host.gpu-unsupported",
        "a build without code for the GPU",
        re.compile(r"no kernel image is available|Cuda failure 209\b|invalid device function"),
        "the program's build has no code for this GPU",
        "Each build holds code for some generations of GPUs; this one is newer or older.",
        "Install a build of torch or NCCL for this GPU's compute capability.",
        "nvidia-smi --query-gpu=name,compute_cap --format=csv; "
        "python -c 'import torch; print(torch.cuda.get_arch_list())'",
        "The GPU's capability is in the list.",
        root=LIBRARY + 2,
    ),
    Cause(
        "host.no-gpu",
        "a rank without a GPU of its own: fewer are visible than asked for",
        re.compile(
            r"invalid device ordinal|ErrorInvalidDevice\b|[Nn]o CUDA-capable device|ErrorNoDevice\b"
            r"|No (?:HIP|CUDA) GPUs are available|Cuda failure (?:100|101)\b"
        ),
        "a rank has no GPU: fewer are visible there than ranks or -g ask for",
        "CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES), the scheduler or the container shows the "
        "process fewer GPUs than the device number that it takes.",
        "Start as many ranks per host as GPUs are visible, choose the device by the local rank, "
        "and pass the GPUs to the container (NVIDIA: --gpus all; AMD: --device=/dev/kfd "
        "--device=/dev/dri --group-add video).",
        "nvidia-smi -L || rocm-smi; echo $CUDA_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES",
        "As many GPUs as ranks of the host.",
        root=LIBRARY + 1,
    ),
    Cause(
        "host.cuda-start",
        "CUDA that does not start: its kernel module or device files",
        re.compile(
            r"CUDA unknown error|Cuda failure 999\b|[Ee]rror 999\b"
            r"|(?:CUDA|Cuda) \w+:? '?unknown error"
        ),
        "CUDA does not start on that host (error 999, unknown)",
        "The module nvidia-uvm is not loaded, its device file is not in the container, the driver "
        "was updated without a reboot, or a GPU is in an error state.",
        "Load the module; if that does not help, see the GPU's state and reboot the host.",
        "nvidia-smi; lsmod | grep nvidia_uvm; modprobe nvidia-uvm; ls -l /dev/nvidia*; "
        "dmesg -T | grep -iE 'nvrm|xid'",
        "python -c 'import torch; torch.cuda.init()' works.",
        root=LIBRARY + 2,
    ),
    Cause(
        "network.p2p-ipc",
        "ranks of one host that cannot map one another's GPU memory",
        re.compile(
            r"(?:cuda|hip|cuIpc|Ipc)\w*Mem\w*Handle|peer access is not supported|hipIpc\w+ fail"
        ),
        "ranks of one host cannot share GPU memory (CUDA or HIP IPC is refused)",
        "Each rank opens the memory of the others by a handle. The system refuses that where ranks "
        "are in containers of their own, do not see the same GPUs, or a virtual machine or the "
        "IOMMU is between.",
        "Check first: if it works without peer access, let the ranks share the host's IPC and see "
        "all its GPUs (choose by local rank, not by a visibility of one GPU each). Do not keep the "
        "setting, it is slow.",
        "NCCL_P2P_DISABLE=1 COMMAND    # the check; then: docker run --ipc=host --gpus all, "
        "Kubernetes hostIPC: true",
        "P2P lines in NCCL's log, and no such error.",
        root=LIBRARY,
    ),
    Cause(
        ANY,
        "a CUDA or HIP call of NCCL that failed; CUDA's own words are all that is known",
        re.compile(r"(?:Cuda|CUDA|HIP) failure"),
        "a CUDA call of NCCL failed",
        "NCCL only passes the error on. What led to it is not in these lines.",
        "Look at the GPU and the driver's log; then run once with blocking launches, to see "
        "whether an earlier call failed.",
        "nvidia-smi -q | grep -iE 'state|pending|uncorr'; dmesg -T | grep -iE 'nvrm|xid'; "
        "NCCL_DEBUG=INFO CUDA_LAUNCH_BLOCKING=1 COMMAND",
        "The first call that fails.",
        confidence="measured",
    ),
)
