"""That a run failed or hung: NCCL's own trail of errors, and what programs and launchers say.

    host:1:2 [0] NCCL INFO transport/net.cc:1008 -> 6 [Proxy Thread]
    node-a: Test NCCL failure common.cu:958 'remote process exited or there was a network error'
    [rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, ...
    mpirun noticed that process rank 3 with PID 0 on node node-b exited on signal 9 (Killed).
The number is an ncclResult: 1 CUDA, 2 system, 3 internal, 4 argument, 5 usage, 6 remote, 7 in
progress. A trail alone is not a failure: NCCL also writes one where it tries a network and falls
back.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_STEP = re.compile(rb"^([\w./-]{1,120}\.(?:cc|cu|h|c|cpp)):(\d{1,6}) -> (\d{1,3})(?: |$)")
RESULTS = {
    1: "a CUDA call failed",
    2: "a call of the system failed",
    3: "an internal error",
    4: "a wrong argument",
    5: "a wrong use of NCCL",
    6: "a remote process ended, or the network failed",
}
_HUNG = re.compile(
    rb"Watchdog caught collective operation timeout|collective operation timeout: WorkNCCL"
    rb"|HeartbeatMonitor.{0,80}stuck|Timed out waiting \d+ ?ms for (?:recv|send) operation"
    rb"|DeepEP timeout"
)
_LIMIT = re.compile(rb"(?:CANCELLED|JOB).{0,60}DUE TO TIME LIMIT")
_STALLED = re.compile(rb"tensors were submitted to be reduced, gathered or broadcasted by subset")
_FAILED = re.compile(
    rb"Test (?:NCCL|CUDA|HIP|RCCL) failure|\bTest failure \w+\.cu|DistBackendError"
    rb"|nccl(?:System|Internal|Remote|InvalidUsage|InvalidArgument|UnhandledCuda)Error\b"
    rb"|\bncclInvalid(?:Usage|Argument)\b|(?:NCCL|nccl) (?:error|Error|ERROR|failure)(?: in)?:"
    rb"|NCCL communicator (?:was|encountered) |Some NCCL operations have failed"
    rb"|(?:mpirun|mpiexec|prterun|orterun)[\w ]* (?:noticed that process|has exited due to)"
    rb"|process returned a non-zero exit code|MPI_ABORT was invoked|BAD TERMINATION OF ONE OF"
    rb"|srun: error: .*(?:Exited with exit code [1-9]|Segmentation|Killed|Aborted|Terminated)"
    rb"|exited on signal \d|ChildFailedError|(?:Cuda|HIP) failure [\w./]+:\d+ '"
    rb"|NET/OFI .{0,60}(?:Couldn't|Unable|fail)"
    rb"|gloo/\S{1,80}\.cc:\d+\]|Gloo connect\w* failed|ibv_modify_qp failed|modify QP to \w+:"
)
_KINDS = (("hung", _HUNG), ("limit", _LIMIT), ("stalled", _STALLED), ("failed", _FAILED))
_WORDS = (
    b"NCCL", b"nccl", b"signal", b"non-zero", b"MPI_ABORT", b"srun: ", b"TERMINATION", b"Test ",
    b"TIME LIMIT", b"by subset", b"noticed", b"ChildFailed", b"exited due", b"stuck",
    b"Timed out waiting", b"DeepEP timeout", b" failure ", b"loo", b"odify",
    b"NET/OFI",
)  # fmt: skip


class Step(NamedTuple):
    """One line of NCCL's trail: where an error passed, and the ncclResult."""

    file: str
    line: int
    code: int


class Ended(NamedTuple):
    """What a program or launcher said: that it `failed`, `hung`, reached the job's `limit`, or is
    `stalled`, which may pass."""

    kind: str
    text: str


def step(message: bytes) -> Step | None:
    """The step in an INFO line, None where it is none."""
    found = _STEP.match(message)
    if not found:
        return None
    return Step(found[1].decode("ascii", "replace"), int(found[2]), int(found[3]))


def ended(line: bytes) -> Ended | None:
    """What a line that is not NCCL's says of a failure, None where it says nothing of one."""
    if not any(word in line for word in _WORDS):
        return None
    line = line[:2000]
    for kind, pattern in _KINDS:
        if found := pattern.search(line):
            text = line[found.start() : found.start() + 240].decode("utf-8", "replace")
            return Ended(kind, "".join(c if c.isprintable() else " " for c in text).strip())
    return None
