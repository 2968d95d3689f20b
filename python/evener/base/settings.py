"""Every environment variable that Evener reads: declared here, once, and nowhere else.

A variable is a `Setting`: name, kind, default, meaning. Code reads it with `SETTING.get()`; the
documentation (docs/reference/settings.md) and `evener settings` are printed from the same
declarations, so none of them can say something else. Values are read when asked for, never at
import.

A value that cannot be is refused with the name, the value and what is allowed: a training job that
was started with a typing error must stop before its first step, not train on a default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from evener.base.units import parse_size
from evener.errors import UsageError

T = TypeVar("T")

_REGISTRY: dict[str, Setting] = {}

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
AUTO = "auto"


class SettingError(UsageError):
    """An environment variable has a value that cannot be."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(
            f"{name}={value!r} is not {allowed}", f"set {name} to {allowed}, or unset it"
        )


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable."""

    name: str
    group: str
    default: T
    allowed: str
    meaning: str
    parse: Callable[[str], T]
    show: Callable[[T], str] = str

    def get(self, env: Mapping[str, str] | None = None) -> T:
        """The value in `env` (default: the process's), or the default where unset or empty.

        Raises SettingError where the value is not `allowed`.
        """
        text = (os.environ if env is None else env).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise SettingError(self.name, text, self.allowed) from None

    def is_set(self, env: Mapping[str, str] | None = None) -> bool:
        """Whether the user gave a value at all."""
        return bool((os.environ if env is None else env).get(self.name, "").strip())


def _declare(setting: Setting[T]) -> Setting[T]:
    if setting.name in _REGISTRY:
        raise ValueError(f"{setting.name} is declared twice")
    _REGISTRY[setting.name] = setting
    return setting


def _flag(group: str, name: str, default: bool, meaning: str) -> Setting[bool]:
    def parse(text: str) -> bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)

    return _declare(
        Setting(name, group, default, "0 or 1", meaning, parse, lambda v: "1" if v else "0")
    )


def _number(
    group: str,
    name: str,
    default: int,
    meaning: str,
    *,
    low: int = 0,
    high: int | None = None,
    what: str = "a whole number",
) -> Setting[int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    bounds = f"{low} or more" if high is None else f"{low} to {high}"
    return _declare(Setting(name, group, default, f"{what}, {bounds}", meaning, parse))


def _count_or_auto(group: str, name: str, default: int, meaning: str) -> Setting[int | str]:
    def parse(text: str) -> int | str:
        value = AUTO if text.lower() == AUTO else int(text)
        if value != AUTO and int(value) < 0:
            raise ValueError(text)
        return value

    allowed = f"a whole number, 0 or more, or {AUTO}"
    return _declare(Setting(name, group, default, allowed, meaning, parse))


def _size(group: str, name: str, default: int, meaning: str) -> Setting[int]:
    def parse(text: str) -> int:
        value = parse_size(text)
        if value < 0:
            raise ValueError(text)
        return value

    allowed = "a size in bytes, 0 or more (k, M, G: powers of 1024; kB, MB, GB: of 1000)"
    return _declare(Setting(name, group, default, allowed, meaning, parse))


def _real(
    group: str,
    name: str,
    default: float,
    meaning: str,
    *,
    allowed: str,
    ok: Callable[[float], bool],
) -> Setting[float]:
    def parse(text: str) -> float:
        value = float(text)
        if not ok(value):  # NaN fails every comparison, so it is refused here too
            raise ValueError(text)
        return value

    return _declare(Setting(name, group, default, allowed, meaning, parse, lambda v: f"{v:g}"))


def _choice(
    group: str,
    name: str,
    default: str,
    choices: tuple[str, ...],
    meaning: str,
    planned: str = "",
) -> Setting[str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    allowed = " or ".join(choices) + (f" ({planned} is planned)" if planned else "")
    return _declare(Setting(name, group, default, allowed, meaning, parse))


def _text(
    group: str, name: str, default: str, meaning: str, allowed: str = "any text"
) -> Setting[str]:
    return _declare(Setting(name, group, default, allowed, meaning, str))


# Set by one process of Evener for another, or by click; no user sets them.
_INTERNAL = ("EVENER_LAUNCH_", "EVENER_TEST_", "EVENER_DRIVE_", "_EVENER_")


def misspelt(names: Iterable[str]) -> list[str]:
    """A line on each name that is, or nearly is, one of Evener's, and no setting.

    A variable that nobody reads is no error to anyone else: the job would train on the default.
    """
    found = []
    for name in names:
        if name in _REGISTRY or name.startswith(_INTERNAL) or "_" not in name:
            continue
        ours = name.startswith(("EVENER_", "LIGHT_"))
        near = difflib.get_close_matches(name.upper(), _REGISTRY, 1, 0.8 if ours else 0.9)
        if near:
            found.append(f"{name} is not a setting and has no effect; {near[0]} is one")
        elif name.startswith("EVENER_"):
            found.append(
                f"{name} is not a setting and has no effect; `evener settings` lists those that are"
            )
    return found


def registry() -> dict[str, Setting]:
    """All settings by name, in the order of their declaration."""
    return dict(_REGISTRY)


def check_net() -> None:
    """Raise SettingError where a variable of the plug-in has a value that cannot be.

    The plug-in itself can but refuse to start, and NCCL then takes another network.
    """
    for setting in _REGISTRY.values():
        if setting.group == _NET:
            setting.get()


# --- comm: the collective layer (LightCC's names, so that its command lines work as they are) ---

_COMM = "Collectives"

LIGHT_2D_ALLREDUCE = _flag(
    _COMM,
    "LIGHT_2D_ALLREDUCE",
    False,
    "All-reduce in two levels: reduce-scatter inside the node, exchange of shards between nodes, "
    "all-gather inside the node.",
)
LIGHT_INTRA_SIZE = _number(
    _COMM,
    "LIGHT_INTRA_SIZE",
    8,
    "Ranks of one node that form the inner level. Where a node has fewer, their detected number is "
    "taken and logged.",
    low=1,
)
LIGHT_HIERARCHICAL_THRESHOLD = _size(
    _COMM,
    "LIGHT_HIERARCHICAL_THRESHOLD",
    1 << 30,
    "Largest bucket, in bytes, that goes through the two-level all-reduce; larger ones go flat.",
)
EVENER_PARTITION_BYTES = _size(
    _COMM,
    "EVENER_PARTITION_BYTES",
    32 << 20,
    "Gradients of a tensor larger than this many bytes are reduced in parts, so that others need "
    "not wait until all of it has crossed. 0: never; forced top-k never does.",
)
EVENER_ROWS_THRESHOLD = _size(
    _COMM,
    "EVENER_ROWS_THRESHOLD",
    1 << 20,
    "The gradient of an embedding of at least this many bytes crosses the network as the rows that "
    "were looked up, where that is less (evener.ddp.accelerate). 0: never.",
)
EVENER_TRIAL_STEPS = _number(
    _COMM,
    "EVENER_TRIAL_STEPS",
    3,
    "Steps per turn in which a planner tries its choice, DDP's own way and the next best ones. "
    "They take turns, more where steps scatter, and the fastest is kept. 0: its choice is kept "
    "untried.",
    high=100,
)
LIGHT_TOPK_ALLREDUCE = _flag(
    _COMM,
    "LIGHT_TOPK_ALLREDUCE",
    False,
    "Between nodes, send only the entries of largest magnitude; the rest is kept as a residual and "
    "added to the next step's gradient (error feedback). Changes the arithmetic.",
)
LIGHT_TOPK_RATIO = _real(
    _COMM,
    "LIGHT_TOPK_RATIO",
    0.01,
    "Share of the entries of a buffer that top-k sends.",
    allowed="a number above 0 and at most 1",
    ok=lambda value: 0 < value <= 1,
)
LIGHT_TOPK_THRESHOLD = _size(
    _COMM,
    "LIGHT_TOPK_THRESHOLD",
    1 << 20,
    "Smallest buffer, in bytes, that is sent as top-k; smaller ones are sent dense. It is compared "
    "with what a rank would send between nodes: after the reduce-scatter, its shard.",
)
LIGHT_TOPK_FP16 = _flag(
    _COMM, "LIGHT_TOPK_FP16", False, "Send the values of top-k as FP16 instead of FP32."
)

EVENER_TOPK_WARMUP = _number(
    _COMM,
    "EVENER_TOPK_WARMUP",
    0,
    "Steps within which top-k comes down from 25% of the entries to its ratio.",
)
EVENER_GUARD_STEPS = _number(
    _COMM,
    "EVENER_GUARD_STEPS",
    200,
    "In the sixth step, and whenever this number of steps has passed, each compressed bucket is "
    "compared with its dense reduction, and falls back to a milder form past a limit "
    "(docs/reference/forms.md). 0: never.",
)
EVENER_GUARD_RESIDUAL = _real(
    _COMM,
    "EVENER_GUARD_RESIDUAL",
    0.0,
    "Largest norm of a bucket's residual over its gradient's. 0: each form's own limit, which for "
    "top-k depends on the optimizer.",
    allowed="a number, 0 or more",
    ok=lambda value: 0 <= value < float("inf"),
)
EVENER_GUARD_COSINE = _real(
    _COMM,
    "EVENER_GUARD_COSINE",
    -1.0,
    "Least cosine between a bucket's compressed and dense reduction. -1: each form's own limit.",
    allowed="a number from -1 to 1",
    ok=lambda value: -1 <= value <= 1,
)

HOROVOD_FUSION_THRESHOLD = _size(
    _COMM,
    "HOROVOD_FUSION_THRESHOLD",
    128 << 20,
    "Largest bucket, in bytes, into which gradients are fused. 0: one bucket a tensor.",
)
HOROVOD_CYCLE_TIME = _real(
    _COMM,
    "HOROVOD_CYCLE_TIME",
    1.0,
    "Milliseconds for which Horovod's asynchronous operations are gathered before they are "
    "announced to the other ranks. Waiting for one announces at once.",
    allowed="a number of milliseconds, 0 or more",
    ok=lambda value: 0 <= value < float("inf"),
)
HOROVOD_CACHE_CAPACITY = _number(
    _COMM,
    "HOROVOD_CACHE_CAPACITY",
    1024,
    "Agreements on Horovod's operations that are remembered, so that the same operation is "
    "announced by a number. 0: none, and no schedule is frozen.",
)
EVENER_FREEZE_AFTER = _number(
    _COMM,
    "EVENER_FREEZE_AFTER",
    8,
    "How often the same sequence of small Horovod all-reduces must come in a row before it runs "
    "without negotiation. 0: never.",
    high=64,
)
EVENER_HOROVOD_ZERO_STEP = _flag(
    _COMM,
    "EVENER_HOROVOD_ZERO_STEP",
    True,
    "hvd.broadcast_optimizer_state takes a step with gradients of zeros where the optimizer has no "
    "state, as upstream's: it counts in Adam's bias correction, and weight decay moves parameters. "
    "0: no such step.",
)
HOROVOD_AUTOTUNE = _flag(
    _COMM,
    "HOROVOD_AUTOTUNE",
    False,
    "hvd.DistributedOptimizer lets the planner choose, among what loses nothing, as with "
    'mode="auto", floor="exact". Upstream\'s other autotuning variables have no effect.',
)
HOROVOD_TIMELINE = _text(
    _COMM,
    "HOROVOD_TIMELINE",
    "",
    "File into which rank 0 writes a timeline of Horovod's operations, in Chrome's trace format. "
    "DYNAMIC: none until hvd.start_timeline().",
    allowed="the path of a file, or DYNAMIC",
)
HOROVOD_TIMELINE_MARK_CYCLES = _flag(
    _COMM, "HOROVOD_TIMELINE_MARK_CYCLES", False, "Mark rounds of negotiation in the timeline."
)
HOROVOD_STALL_CHECK_DISABLE = _flag(
    _COMM,
    "HOROVOD_STALL_CHECK_DISABLE",
    False,
    "Do not warn of operations that some ranks submitted and others did not.",
)
HOROVOD_STALL_CHECK_TIME_SECONDS = _real(
    _COMM,
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    60.0,
    "Seconds after which such an operation is warned of, with the missing ranks.",
    allowed="a number of seconds above 0",
    ok=lambda value: 0 < value < float("inf"),
)
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = _real(
    _COMM,
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    0.0,
    "Seconds after which such an operation ends the job with an error on every rank. 0: "
    "EVENER_TIMEOUT.",
    allowed="a number of seconds, 0 or more",
    ok=lambda value: 0 <= value < float("inf"),
)
HOROVOD_DYNAMIC_PROCESS_SETS = _flag(
    _COMM,
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    False,
    "Accepted for the sake of existing command lines: process sets can be added at any time.",
)
HOROVOD_MPI_THREADS_DISABLE = _flag(
    _COMM,
    "HOROVOD_MPI_THREADS_DISABLE",
    False,
    "Accepted for the sake of existing command lines. Evener never calls MPI from a thread.",
)
EVENER_TIMEOUT = _real(
    _COMM,
    "EVENER_TIMEOUT",
    300.0,
    "Seconds that a rank waits for its peers, in a collective or at start, before it reports an "
    "error that names what it waited for. Not set: under DistributedDataParallel as long as its "
    "process group waits.",
    allowed="a number of seconds above 0",
    ok=lambda value: 0 < value < float("inf"),
)
OUTER = ("auto", "nccl", "staged")
EVENER_OUTER = _choice(
    _COMM,
    "EVENER_OUTER",
    "auto",
    OUTER,
    "What carries the exchange between nodes. `nccl`: the collective library (Gloo on CPUs). "
    "`staged`: Evener's own transport by way of host memory, which uses none of the GPU's SMs. "
    "`auto`: on GPUs of several hosts both are measured, else `nccl` "
    "(docs/architecture/collectives.md).",
)
EVENER_PROFILE = _text(
    _COMM,
    "EVENER_PROFILE",
    "",
    "A file in which rank 0 of `evener.ddp.accelerate` leaves the profile of a training step, for "
    "`evener plan --profile`. Unset: none is written.",
    allowed="the path of a file",
)
EVENER_RENDEZVOUS_FILE = _text(
    _COMM,
    "EVENER_RENDEZVOUS_FILE",
    "",
    "A file that all nodes share, or a folder for one: rank 0 leaves its address there where the "
    "launcher gives neither MASTER_ADDR nor MPI. Rank 0 removes it when all have come.",
    allowed="the path of a file or folder on all nodes",
)
EVENER_HOSTID = _text(
    _COMM,
    "EVENER_HOSTID",
    "",
    "The name of this rank's host, where Evener and NCCL are to see different hosts: ranks with "
    "the same name are one node. Unset: NCCL_HOSTID, or else the host's own name.",
    allowed="a name",
)

# --- the door without a line ---

_DOOR = "Evener under any DistributedDataParallel or FSDP2 model, or Trainer"

EVENER_WATCH_FLOOR = _real(
    _DOOR,
    "EVENER_WATCH_FLOOR",
    20.0,
    "Seconds without progress on any rank below which `evener launch` never says that a job stands "
    "still (docs/guide/stuck.md). Long steps raise the limit by themselves.",
    allowed="a number of seconds above 0",
    ok=lambda value: 0 < value < float("inf"),
)
EVENER_DDP = _choice(
    _DOOR,
    "EVENER_DDP",
    "off",
    ("off", "exact", "auto"),
    "Put Evener under every DistributedDataParallel that a program makes, without a changed line "
    "(docs/guide/door.md). exact: lossless. auto: down to EVENER_FLOOR where that is faster.",
)
EVENER_FLOOR = _text(
    _DOOR,
    "EVENER_FLOOR",
    "",
    "The least exact form in which EVENER_DDP=auto and EVENER_FSDP=auto may send gradients. Unset: "
    "bf16.",
    allowed="a form that accelerate(floor=...) takes",
)
EVENER_EVERY = _count_or_auto(
    _DOOR,
    "EVENER_EVERY",
    0,
    "Each rank of a DistributedDataParallel trains by itself for this many steps; then the changes "
    "of the weights are averaged (docs/guide/slow-networks.md). This is another algorithm than "
    "DDP's. It holds for accelerate(every=) too. auto: as many as the times of a step and of an "
    "exchange ask for. 0: gradients are averaged in every step.",
)
EVENER_OVERLAP = _number(
    _DOOR,
    "EVENER_OVERLAP",
    0,
    "With EVENER_EVERY: an exchange runs behind this many of the next steps, fewer than a round "
    "has, and is applied after them. It holds for accelerate(overlap=) too. 0: ranks wait for it.",
)
EVENER_HUB = _text(
    _DOOR,
    "EVENER_HUB",
    "",
    "With EVENER_EVERY: where the hub listens. This job is then one node of several that come and "
    "go, and its changes of the weights are averaged with theirs (docs/guide/slow-networks.md). "
    "`evener launch --join` sets it, and the three below.",
    "HOST:PORT",
)
EVENER_HUB_TOKEN = _text(
    _DOOR,
    "EVENER_HUB_TOKEN",
    "",
    "With EVENER_HUB: the line in the hub's token file.",
    "the line that `evener hub` wrote",
)
EVENER_HUB_SLOT = _text(
    _DOOR,
    "EVENER_HUB_SLOT",
    "",
    "With EVENER_HUB: which share of the data this node reads, and how many there are. Not set: "
    "samplers divide the data among the ranks of this node alone.",
    "SLOT/SLOTS, counted from 0",
)
EVENER_HUB_NODE = _text(
    _DOOR,
    "EVENER_HUB_NODE",
    "",
    "With EVENER_HUB: this node's name in the hub's lines. Not set: its host and process.",
)
EVENER_DDP_PLAIN = _number(
    _DOOR,
    "EVENER_DDP_PLAIN",
    8,
    "Steps that a model takes with DDP itself before Evener is put under it: they show which "
    "optimizer steps it, and how fast DDP is. From the fourth on they are measured. Not set and "
    "with EVENER_EVERY: 1.",
    low=1,
)

EVENER_FSDP = _choice(
    _DOOR,
    "EVENER_FSDP",
    "off",
    ("off", "exact", "bf16", "int8", "int4", "auto"),
    "Put Evener under every model that a program shards with fully_shard over all of its ranks, "
    "without a changed line (docs/guide/fsdp.md). Weights are sent as exact differences. exact: "
    "gradients as FSDP2 sends them. A form: gradients in it. auto: what is fastest when tried, "
    "down to EVENER_FLOOR, FSDP2 alone among it.",
)
EVENER_FSDP_MIRROR = _choice(
    _DOOR,
    "EVENER_FSDP_MIRROR",
    "host",
    ("host", "gpu", "off"),
    "Where EVENER_FSDP keeps its copy of the gathered weights. off: gather as FSDP2 does.",
)
EVENER_ZERO = _text(
    _DOOR,
    "EVENER_ZERO",
    "",
    "Train every transformers Trainer that a program makes, and every trainer of trl's, under "
    "evener.zero, without a changed line (docs/guide/memory.md). on: by the defaults and the "
    "training arguments. off, or unset: not.",
    allowed="on, off, or the path of a configuration (JSON)",
)

# --- elastic jobs, functions that run as jobs ---

_ELASTIC = "Elastic jobs and horovod.run"

HOROVOD_ELASTIC_TIMEOUT = _real(
    _ELASTIC,
    "HOROVOD_ELASTIC_TIMEOUT",
    600.0,
    "Seconds that the launcher of an elastic job waits for enough slots, and for the workers that "
    "it started, before it gives up.",
    allowed="a number of seconds above 0",
    ok=lambda value: 0 < value < float("inf"),
)
EVENER_ELASTIC = _text(
    _ELASTIC,
    "EVENER_ELASTIC",
    "",
    "Set by the launcher of an elastic job for its workers: where its store is.",
    allowed="what the launcher sets",
)
EVENER_ELASTIC_WORKER = _number(
    _ELASTIC,
    "EVENER_ELASTIC_WORKER",
    0,
    "Set by the launcher of an elastic job for its workers: which one this is.",
)

EVENER_RUN = _text(
    _ELASTIC,
    "EVENER_RUN",
    "",
    "Set by `horovod.run` for its ranks: where they get the function, and bring its results.",
    allowed="what the launcher sets",
)

# --- net: the NCCL plug-in. Its Rust side reads the same declarations: scripts/docs.py writes them
# to crates/engine/src/settings_generated.rs. ---

_NET = "Network"

EVENER_NET = _choice(
    _NET,
    "EVENER_NET",
    "auto",
    ("auto", "off", "on"),
    "Whether `import evener`, `evener launch` and `evener lab` point NCCL at Evener's plug-in, "
    "where neither NCCL_NET nor NCCL_NET_PLUGIN is set. auto: on machines with GPUs, without RDMA "
    "devices and with 16 processors or more per rank, for jobs of several nodes.",
)
EVENER_NET_ENGINE = _choice(
    _NET,
    "EVENER_NET_ENGINE",
    "tcp",
    ("tcp", "udp", "xdp"),
    "What carries what a process sends. tcp: streams. udp: Evener's packets over UDP sockets, to "
    "processes that take them; to others TCP. xdp: as udp, past the kernel's stack where the card, "
    "the kernel and the process's rights allow it.",
)
EVENER_NET_IFNAME = _text(
    _NET,
    "EVENER_NET_IFNAME",
    "",
    "Interfaces that carry NCCL's traffic, by the rules of NCCL_SOCKET_IFNAME (prefixes; `=` exact "
    "names; `^` all but these), which is used where this is unset. Neither set: all that run, less "
    "loopback, container bridges and link-local addresses.",
    allowed="a list such as eth0,eth1 or =eth0 or ^docker",
)
EVENER_NET_DEVICES = _choice(
    _NET,
    "EVENER_NET_DEVICES",
    "auto",
    ("auto", "pair", "aggregate", "nic"),
    "What NCCL sees. pair: one device that uses all NICs, twice (each with half of the speed, at "
    "least 10 Gb/s: NCCL takes twice as many channels). aggregate: the same once. nic: one device "
    "a NIC. auto: aggregate where the NICs' drivers say less than 40 Gb/s in all, else pair.",
)
EVENER_NET_SPEED = _number(
    _NET,
    "EVENER_NET_SPEED",
    0,
    "Speed in Mb/s that NCCL is told of; it steers the choice between tree and ring. 0: the sum of "
    "what the NICs' drivers say.",
)
EVENER_NET_WORKERS = _number(
    _NET,
    "EVENER_NET_WORKERS",
    0,
    "Worker threads of a process. 0: one for every four processors it may use, 1 to 8.",
    high=16,
)
EVENER_NET_FLOWS = _number(
    _NET,
    "EVENER_NET_FLOWS",
    16,
    "TCP connections between two processes at the start. More are opened while throughput grows, "
    "up to twice as many.",
    low=1,
    high=128,
)
EVENER_NET_CONGESTION = _text(
    _NET,
    "EVENER_NET_CONGESTION",
    "",
    "Congestion control of TCP connections, the kernel's. Unset: the system's, but cubic "
    "instead of bbr.",
    allowed="a name from net.ipv4.tcp_allowed_congestion_control",
)
EVENER_NET_TIMEOUT = _real(
    _NET,
    "EVENER_NET_TIMEOUT",
    60.0,
    "Seconds for which every path to a peer may be dead before its communicators get an error.",
    allowed="a number of seconds above 0",
    ok=lambda value: 0 < value < float("inf"),
)
EVENER_STATS_DIR = _text(
    _NET,
    "EVENER_STATS_DIR",
    "",
    "Directory in which every process keeps a statistics file, rewritten every second "
    "(docs/reference/records.md). Unset: none.",
    allowed="a directory",
)
EVENER_NET_TRACE_DIR = _text(
    _NET,
    "EVENER_NET_TRACE_DIR",
    "",
    "Directory in which every process writes what its UDP engine does, packet by packet "
    "(docs/reference/network-trace.md); `evener net trace show` and Wireshark read it. Unset: "
    "none.",
    allowed="a directory",
)
EVENER_NET_TRACE_MB = _number(
    _NET,
    "EVENER_NET_TRACE_MB",
    64,
    "Most megabytes of trace per process: the last ones are kept.",
    low=1,
    high=1 << 20,
)

# --- embeddings ---

EVENER_EMBEDDING_TOKEN = _text(
    "Embeddings",
    "EVENER_EMBEDDING_TOKEN",
    "",
    "What clients of `evener embedding serve` send as `Authorization: Bearer TOKEN`. Unset: none "
    "is asked for, and only this machine can reach the server.",
    allowed="a secret word",
)

# --- compilation ---

EVENER_COMPILE_DIR = _text(
    "Compilation",
    "EVENER_COMPILE_DIR",
    "~/.cache/evener/compile",
    "Where `evener.compile` keeps the sizes it has seen and what was compiled for them.",
    allowed="a directory",
)

# --- log ---

_ZERO = "Memory"

EVENER_SSD_IO = _choice(
    _ZERO,
    "EVENER_SSD_IO",
    "auto",
    ("auto", "io_uring", "threads"),
    "How `evener.zero` reads and writes its file on an SSD. `auto`: io_uring where it is allowed, "
    "else a pool of threads; one line says which.",
)
EVENER_SSD_TIMEOUT = _real(
    _ZERO,
    "EVENER_SSD_TIMEOUT",
    120.0,
    "Seconds without an answer from the SSD after which training ends with an error.",
    allowed="a number of seconds from 1",
    ok=lambda value: 1.0 <= value < 1e6,
)

_LOG = "Log"

EVENER_LOG = _choice(
    _LOG,
    "EVENER_LOG",
    "info",
    ("error", "warning", "info", "debug"),
    "Least severe message that is printed. Choices that Evener makes are logged at `info` by rank "
    "0, and by every rank at `debug`.",
)


def rust() -> str:
    """crates/engine/src/settings_generated.rs: what the NCCL plug-in reads without Python."""
    lines = [
        "//! Environment variables, made from python/evener/base/settings.py by `make docs`.",
        "",
        "/// Name, default, and what is allowed, of one environment variable.",
        "#[derive(Debug, Clone, Copy)]",
        "pub struct Setting {",
        "    /// The variable.",
        "    pub name: &'static str,",
        "    /// Its value where it is unset or empty.",
        "    pub default: &'static str,",
        "    /// What it may be, in words.",
        "    pub allowed: &'static str,",
        "}",
    ]
    for setting in _REGISTRY.values():
        if setting.group != _NET and setting.name != "EVENER_LOG":
            continue
        default = setting.show(setting.default)
        name = setting.name.removeprefix("EVENER_").removeprefix("NET_")
        lines += ["", f"/// {setting.meaning}", f"pub const {name}: Setting = Setting {{"]
        for field, value in (
            ("name", setting.name),
            ("default", default),
            ("allowed", setting.allowed),
        ):
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'    {field}: "{quoted}",')
        lines.append("};")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """docs/reference/settings.md, from the declarations."""
    lines = [
        "# Environment variables",
        "",
        "Made from `python/evener/base/settings.py` by `make docs`; `evener settings` prints the "
        "same with the values in force. A value that is not allowed is refused at start.",
    ]
    group = None
    for setting in _REGISTRY.values():
        if setting.group != group:
            group = setting.group
            lines += ["", f"## {group}", "", "| name | default | allowed | meaning |"]
            lines += ["|---|---|---|---|"]
        default = setting.show(setting.default) or "(unset)"
        lines.append(f"| `{setting.name}` | {default} | {setting.allowed} | {setting.meaning} |")
    return "\n".join(lines) + "\n"
