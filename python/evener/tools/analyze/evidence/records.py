"""What the readers find. Each record keeps `where` it was read, see model.Run.cite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MOST = 20_000
"""Records of one kind that are kept; a file can hold any number."""


GLOO = "gloo"
"""The group of waits that Gloo tells by an exception: it gives no number."""


NO_OOM = "its memory cgroup counts no kill"
"""The text of an exit by SIGKILL that was not for memory."""


@dataclass(slots=True)
class Wait:
    """One rank's watchdog gave up on an operation. -1 where the text does not say a number."""

    rank: int
    where: int
    seq: int = -1
    op: str = ""
    numel_in: int = -1
    numel_out: int = -1
    waited_ms: int = -1
    group: str = ""
    """The process group as the line names it; empty where it does not."""
    enqueued: int = -1
    completed: int = -1
    time: float = -1.0
    local: bool = False
    """`rank` counts within the group: the line has no global rank."""


@dataclass(slots=True)
class Desync:
    """A report that names ranks: torch's desync report, monitoredBarrier, Horovod, DETAIL."""

    kind: str
    """`behind`, `mismatch`; `reached`: the first rank came to a barrier and missed the second;
    `stalled` and `ready`, which may pass."""
    ranks: tuple[int, ...]
    text: str
    where: int
    last: int = -1
    """The last operation that they finished."""
    op: str = ""
    others: str = ""
    """What the others ran, for a mismatch."""


@dataclass(slots=True)
class Beat:
    """One rank's heartbeat monitor found its watchdog stuck."""

    rank: int
    outstanding: int
    seconds: int
    where: int


@dataclass(slots=True)
class Operation:
    """One entry of a flight recorder."""

    group: str
    seq: int
    op: str
    sizes_in: tuple[tuple[int, ...], ...]
    sizes_out: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    p2p: bool
    created: int
    frames: tuple[str, ...]


@dataclass(slots=True)
class Dump:
    """One rank's flight recorder."""

    rank: int
    where: int
    version: str
    groups: dict[str, tuple[str, tuple[int, ...]]]
    """Group > its description and members."""
    operations: list[Operation]
    status: dict[str, tuple[int, int]]
    """Group > last enqueued and last completed, where the dump says so."""


@dataclass(slots=True)
class Counts:
    """One operation's counts over a communicator, from RAS: count > how many ranks."""

    communicator: str
    op: str
    counts: Counter[int]
    named: dict[int, tuple[int, ...]]
    """Count > the ranks that are known to have it."""
    where: int
    snapshot: int = 0


@dataclass(slots=True)
class Absentee:
    """A rank or process that RAS got no answer of."""

    communicator: str
    ranks: tuple[int, ...]
    text: str
    dead: bool
    where: int


@dataclass(slots=True)
class Timing:
    """One finished collective on one rank, from NCCL Inspector."""

    communicator: str
    rank: int
    ranks: int
    op: str
    seq: int
    size: int
    micros: float
    host: str
    where: int


@dataclass(slots=True)
class Raised:
    """An exception that ended something, of Python or of C++."""

    rank: int
    """-1 where nothing says it."""
    host: str
    name: str
    text: str
    where: int
    time: float
    line: str
    """`file.py:12` of the innermost frame outside of libraries, empty where none was printed."""
    library: str = ""
    """The innermost frame."""
    task: int = -1
    """srun's task, which is the rank where each rank is one."""
    stream: str = ""


@dataclass(slots=True)
class Exit:
    """How a launcher says that a rank ended."""

    rank: int
    local: int
    pid: int
    host: str
    signal: int
    code: int
    where: int
    first: bool = False
    """The launcher calls it the first failure."""
    text: str = ""


@dataclass(slots=True)
class Meeting:
    """A rendezvous that failed."""

    kind: str
    """port, timeout, refused, name, unreachable, short."""
    host: str
    port: str
    text: str
    where: int
    extra: str = ""
    warning: bool = False
    """Only a warning: torch tries again, and mostly succeeds."""


@dataclass(slots=True)
class Xid:
    """An error of a GPU or NVSwitch that the driver reports."""

    bus: str
    code: int
    text: str
    where: int
    pid: int = -1
    switch: bool = False
    host: str = ""


@dataclass(slots=True)
class Sign:
    """One line of the system that explains an end: `kind` says which."""

    kind: str
    text: str
    where: int
    host: str = ""
    pid: int = -1
    rank: int = -1
    what: str = ""


@dataclass(slots=True)
class Seen:
    """One rank as it was seen from outside, while it ran or hung. -1 where nothing says it."""

    rank: int
    where: int
    world: int
    host: str
    pid: int
    state: str
    """/proc's letter; X where the process was gone."""
    wchan: str
    swap: int
    tracer: int
    place: str
    """The phase it was in, where that is known: data loader."""
    place_s: float
    step: int
    up_s: float
    loader_s: float
    """Seconds in its data loader so far."""
    clock_off_s: float
    """Its clock minus its host's."""
    frames: tuple[str, ...]
    """`file:line function` of the main thread, innermost first; empty where it gave none."""
    threads: dict[str, tuple[str, ...]]
    pending: tuple[str, ...]
    """Operations that it submitted by name and that wait for other ranks (Horovod)."""
    source: str
    """Where the stacks are from."""
    connections: tuple[tuple[str, str, int, int], ...] = ()
    """TCP: own end, other end, bytes not acknowledged, how often they were sent again."""
    down: tuple[str, ...] = ()
    """Cards that are up and have no carrier."""
    looks: int = 0
    """How often its main thread was looked at, and in how many it was in an exchange."""
    waiting: int = 0
    memory: tuple[int, int] = (0, 0)
    """Bytes of programs in its memory cgroup, and the limit; 0 without one."""
    submitted: dict[str, int] = field(default_factory=dict)
    """Horovod's operations that it submitted last, and their elements."""


@dataclass
class Evidence:
    """All that the readers found in all files."""

    waits: list[Wait] = field(default_factory=list)
    desyncs: list[Desync] = field(default_factory=list)
    beats: dict[int, Beat] = field(default_factory=dict)
    idle: dict[int, Wait] = field(default_factory=dict)
    """Ranks that were told of a hang, with what they enqueued last: they did not wait."""
    dumps: list[Dump] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    absent: list[Absentee] = field(default_factory=list)
    snapshots: int = 0
    timings: list[Timing] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    lone: list[Raised] = field(default_factory=list)
    """Errors of one line without a traceback: of an excerpt the last words, else maybe harmless."""
    exits: list[Exit] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    xids: list[Xid] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    moving: bool = False
    """The job went on while it was looked at: what ranks wait for then is no hang."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Ranks that said anything, and where first."""
    world: int = 0
    """Ranks of the job, as a launcher's line says it."""
    read: Counter[str] = field(default_factory=Counter)
    """Sources that were recognised, and how many records of each."""

    def add(self, record: object) -> None:
        """Keep a record; beyond a number of one kind, no more."""
        kept: list[object] = getattr(self, _PLACES[type(record)])
        self.read[type(record).__name__] += 1
        if len(kept) < _MOST * (10 if isinstance(record, Timing) else 1):
            kept.append(record)

    @property
    def ranks_named(self) -> bool:
        """Whether any traceback names its rank."""
        return any(raised.rank >= 0 for raised in self.raised)

    def __bool__(self) -> bool:
        return bool(self.read)


_PLACES: dict[type, str] = {
    Wait: "waits",
    Desync: "desyncs",
    Dump: "dumps",
    Counts: "counts",
    Absentee: "absent",
    Timing: "timings",
    Raised: "raised",
    Exit: "exits",
    Meeting: "meetings",
    Xid: "xids",
    Sign: "signs",
    Seen: "seen",
}
