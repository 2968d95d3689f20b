"""NCCL's own C interface by ctypes, as far as the benchmark calls it.

torch's process group adds work to each launch (a work object, events, a watchdog) that would hide
in the figures of small messages, and has neither groups over several GPUs of one process nor
aggregation. So NCCL is called as nccl-tests calls it: what a collective calls is said here
(`calls`), and `evener._native.Launcher` repeats it inside the time. The library is the one that
torch loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from evener.errors import EvenerError

TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "half": 6,
    "float": 7,
    "double": 8,
    "bfloat16": 9,
    "f8e4m3": 10,
    "f8e5m2": 11,
}
OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Call(NamedTuple):
    """A call of one rank; communicator and stream are the rank's."""

    function: str
    buffers: tuple[int, ...]
    """Addresses."""
    elements: int
    numbers: tuple[int, ...]
    """The other whole numbers in NCCL's order: type, then operation, root or peer."""


class NcclError(EvenerError):
    """A call into NCCL failed."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: 128 bytes, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


_P, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_NOT_SET = -(1 << 31)
# The first version with ncclAlltoAll, ncclGather, ncclScatter and nvlinkCentricSched.
_CONFIG_SINCE = 22800


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.28 (nccl.h). Later versions take what lies behind it as not given."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, _I) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        *((name, _I) for name in ("splitShare", "trafficClass")),
        ("commName", ctypes.c_char_p),
        *((name, _I) for name in ("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")),
        *((name, _I) for name in ("nChannelsPerNetPeer", "nvlinkCentricSched")),
    ]

    @classmethod
    def make(cls, **given: int) -> Config:
        """Nothing but `given`."""
        numbers = {field[0]: _NOT_SET for field in cls._fields_ if field[1] is _I}
        head = {"size": ctypes.sizeof(cls), "magic": 0xCAFEBEEF, "version": _CONFIG_SINCE}
        return cls(**{**numbers, **head, **given})


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_P],
    "ncclGetUniqueId": [_P],
    "ncclCommInitRank": [_P, _I, UniqueId, _I],
    "ncclCommInitRankConfig": [_P, _I, UniqueId, _I, _P],
    "ncclCommDestroy": [_P],
    "ncclCommGetAsyncError": [_P, _P],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclMemAlloc": [_P, _S],
    "ncclMemFree": [_P],
    "ncclCommRegister": [_P, _P, _S, _P],
    "ncclCommDeregister": [_P, _P],
    "ncclCommWindowRegister": [_P, _P, _S, _P, _I],
    "ncclCommWindowDeregister": [_P, _P],
    "ncclRedOpCreatePreMulSum": [_P, _P, _I, _I, _P],
    "ncclAllReduce": [_P, _P, _S, _I, _I, _P, _P],
    "ncclReduceScatter": [_P, _P, _S, _I, _I, _P, _P],
    "ncclReduce": [_P, _P, _S, _I, _I, _I, _P, _P],
    "ncclBroadcast": [_P, _P, _S, _I, _I, _P, _P],
    "ncclAllGather": [_P, _P, _S, _I, _P, _P],
    "ncclAlltoAll": [_P, _P, _S, _I, _P, _P],
    "ncclGather": [_P, _P, _S, _I, _I, _P, _P],
    "ncclScatter": [_P, _P, _S, _I, _I, _P, _P],
    "ncclSend": [_P, _S, _I, _I, _P, _P],
    "ncclRecv": [_P, _S, _I, _I, _P, _P],
}


class Nccl:
    """The loaded library. Functions are attributes: `nccl.ncclAllReduce(...)` gives the status."""

    def __init__(self) -> None:
        import torch  # loads the libnccl that it was built with

        del torch
        try:
            library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise NcclError(
                f"libnccl.so.2 cannot be loaded: {error}", "install torch with CUDA, or NCCL"
            ) from None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, _I
            setattr(self, name, function)
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [_I], _text
        self._error: Callable[[int], bytes] = library.ncclGetErrorString
        last = getattr(library, "ncclGetLastError", None)
        if last is not None:
            last.argtypes, last.restype = [_P], _text
        self._last: Callable[[Any], bytes] | None = last

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)

    def check(self, status: int, what: str) -> None:
        """Raise NcclError unless `status` is success (0)."""
        if status:
            text = self._error(status).decode("utf-8", "replace")
            more = self._last(None).decode("utf-8", "replace") if self._last else ""
            raise NcclError(
                f"{what}: {text} ({status}){': ' + more if more else ''}",
                "run again with NCCL_DEBUG=WARN to see where",
            )

    def has(self, name: str) -> bool:
        """Whether the library has this function."""
        return getattr(self, name) is not None

    def address(self, name: str) -> int:
        """Where a function lies."""
        return ctypes.cast(getattr(self, name), _P).value or 0

    def version(self) -> int:
        """2.28.9 is 22809."""
        number = ctypes.c_int()
        self.check(self.ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
        return number.value

    def unique_id(self) -> bytes:
        """A new communicator's id, for all its ranks."""
        value = UniqueId()
        self.check(self.ncclGetUniqueId(ctypes.byref(value)), "ncclGetUniqueId")
        return bytes(value.internal)

    def communicator(self, ranks: int, unique: bytes, rank: int) -> ctypes.c_void_p:
        """Start making a rank's communicator on the current GPU (inside a group).

        As nccl-tests' are: scheduled for NVLink where NCCL has that (2.28; it counts on GPUs of
        compute capability 10 and above).
        """
        handle = ctypes.c_void_p()
        value = UniqueId.from_buffer_copy(unique)
        if self.version() < _CONFIG_SINCE:
            status = self.ncclCommInitRank(ctypes.byref(handle), ranks, value, rank)
        else:
            config = Config.make(nvlinkCentricSched=1)
            status = self.ncclCommInitRankConfig(
                ctypes.byref(handle), ranks, value, rank, ctypes.byref(config)
            )
        self.check(status, "making a communicator")
        return handle


_text = ctypes.c_char_p


def calls(
    name: str, send: int, receive: int, count: int, item: int, kind: int, op: int,
    root: int, rank: int, ranks: int, has: Callable[[str], bool],
) -> list[list[Call]]:  # fmt: skip
    """What one rank calls. Each inner list is one group (ncclGroupStart to End).

    Where the library `has` a function for the whole collective, that one, as nccl-tests does.
    """
    block = count * item

    def sends(address: int, number: int, peer: int) -> Call:
        return Call("ncclSend", (address,), number, (kind, peer))

    def receives(address: int, number: int, peer: int) -> Call:
        return Call("ncclRecv", (address,), number, (kind, peer))

    both = (send, receive)
    if name == "all_reduce":
        return [[Call("ncclAllReduce", both, count, (kind, op))]]
    if name == "reduce_scatter":
        return [[Call("ncclReduceScatter", both, count, (kind, op))]]
    if name == "reduce":
        return [[Call("ncclReduce", both, count, (kind, op, root))]]
    if name == "broadcast":
        return [[Call("ncclBroadcast", both, count, (kind, root))]]
    if name == "all_gather":
        return [[Call("ncclAllGather", both, count, (kind,))]]
    if name == "alltoall" and has("ncclAlltoAll"):
        return [[Call("ncclAlltoAll", both, count, (kind,))]]
    if name == "gather" and has("ncclGather"):
        return [[Call("ncclGather", both, count, (kind, root))]]
    if name == "scatter" and has("ncclScatter"):
        return [[Call("ncclScatter", both, count, (kind, root))]]
    if name == "alltoall":
        return [
            [
                call
                for peer in range(ranks)
                for call in (
                    sends(send + peer * block, count, peer),
                    receives(receive + peer * block, count, peer),
                )
            ]
        ]
    if name == "gather":
        group = [sends(send, count, root)]
        if rank == root:
            group += [receives(receive + peer * block, count, peer) for peer in range(ranks)]
        return [group]
    if name == "scatter":
        group = [receives(receive, count, root)]
        if rank == root:
            group += [sends(send + peer * block, count, peer) for peer in range(ranks)]
        return [group]
    if name == "sendrecv":
        return [
            [sends(send, count, (rank + 1) % ranks), receives(receive, count, (rank - 1) % ranks)]
        ]
    # Hypercube: first the own block in its place, then twice as much with each partner.
    groups: list[list[Call]] = []
    if send != receive + rank * block:
        groups.append([sends(send, count, rank), receives(receive + rank * block, count, rank)])
    mask = 1
    while mask < ranks:
        mine = rank & ~(mask - 1)
        groups.append(
            [
                sends(receive + mine * block, count * mask, rank ^ mask),
                receives(receive + (mine ^ mask) * block, count * mask, rank ^ mask),
            ]
        )
        mask *= 2
    return groups


def functions(name: str, has: Callable[[str], bool]) -> list[str]:
    """The functions of NCCL that a collective is made of, each once."""
    groups = calls(name, 0, 0, 1, 1, 0, 0, 0, 0, 2, has)
    return list(dict.fromkeys(call.function for group in groups for call in group))
