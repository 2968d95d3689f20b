"""How a Horovod operation runs: agreed natively, launched one by one, in one order on all ranks.

The caller's thread makes an `Entry`, submits what it is (not its data) to the negotiator and gets a
handle. The negotiator (`crates/negotiate`, native, without the GIL) finds out with the other ranks
what comes next, whatever the order in which each of them submits: its answers come in the same
order on every rank, fused, and are launched one by one (`executor`): by the engine's thread, or, to
save two changes of threads, by a caller that waits; a lock says who. Where the
ranks' requests do not fit together every rank gets the same HorovodInternalError and the next
operation works; torch.distributed by itself would abort one process, hang, or return garbage.

A steady sequence of small all-reduces is frozen: nothing is agreed any more, a flag travels in the
collective itself, or before it in shared memory where all ranks are on one machine (the gate).
`crates/negotiate/src/lib.rs` has the protocol and why it is safe.

A caller that waits for its own operation launches it on its own CUDA stream, as torch.distributed
does, and returns when it is in that stream; its error, if any, comes as torch.distributed's would.
What the engine's thread launches runs on another stream, and is complete when its handle is.

Gradients do not come this way: the optimizer's go through `evener.comm.reducer`.
"""

from __future__ import annotations

import itertools
import secrets
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from evener._native import Answer, Negotiator
from evener.base import settings
from evener.base.log import info0, logger
from evener.comm.world import contact, rendezvous
from evener.comm.world.ranks import Ranks
from evener.comm.world.world import World
from evener.horovod import dtypes, kinds
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.entry import Entry, Handle, Set
from evener.horovod.executor import Executor
from evener.horovod.steps import Steps
from evener.horovod.timeline import Timeline
from evener.watch import inside

# A larger step is not frozen: what agreement costs is nothing beside its data.
_FROZEN_BYTES = 1 << 20


# Seconds in which rank 0 waits for the others to end too; it serves them longer where they do not.
_TOGETHER = 0.3
# Seconds in which the others wait for rank 0 to hear that they end.
_HEARD = 5.0
_SERVING: list[Negotiator] = []


def serve_others() -> None:
    """Wait until nobody needs rank 0's negotiation any more: at this process's end.

    A rank that has finished does not fail operations of the others on process sets without it.
    """
    told = False
    while _end_served(0.5):
        if not told:
            told = True
            logger.info("rank 0 has finished, and stays until the other ranks have")


def _end_served(seconds: float) -> bool:
    """Close what nobody needs any more: whether something is left."""
    _SERVING[:] = [negotiator for negotiator in _SERVING if not negotiator.close(seconds)]
    return bool(_SERVING)


class Engine:
    """The negotiator, the thread and the groups, from `hvd.init()` to `hvd.shutdown()`."""

    def __init__(
        self,
        ranks: Ranks,
        world: World,
        timeout: float,
        process_sets: Sequence[Sequence[int]] = (),
    ) -> None:
        """Collective over the world's ranks. timeout: seconds a collective may wait."""
        self._ranks, self._world, self._timeout = ranks, world, timeout
        self.limit = timedelta(seconds=timeout)
        self.groups: dict[tuple[int, ...], Set] = {}
        self.sets: dict[int, Set] = {0: self.make_set(list(range(ranks.size)))}
        for number, members in enumerate(process_sets, 1):
            self.sets[number] = self.make_set(list(members))
        self.join_device: int = -1
        warn = settings.HOROVOD_STALL_CHECK_TIME_SECONDS.get()
        self._negotiator = Negotiator(
            ranks.rank,
            ranks.size,
            [list(members) for members in process_sets],
            settings.HOROVOD_FUSION_THRESHOLD.get(),
            settings.HOROVOD_CACHE_CAPACITY.get(),
            settings.EVENER_FREEZE_AFTER.get(),
            _FROZEN_BYTES,
            0.0 if settings.HOROVOD_STALL_CHECK_DISABLE.get() else warn,
            settings.HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.get() or timeout,
            settings.HOROVOD_CYCLE_TIME.get() / 1e3,
            timeout,
        )
        self.timeline = Timeline(self._negotiator.now)
        path = settings.HOROVOD_TIMELINE.get()
        if path and path != "DYNAMIC":  # before any rank can announce anything
            self.start_timeline(path, settings.HOROVOD_TIMELINE_MARK_CYCLES.get())
        self.homogeneous = self._connect()
        # Whether the frozen schedule's flag is reduced in shared memory.
        self._gated = self._open_gate()
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count(1)
        self._counters: dict[str, itertools.count[int]] = {}
        self._entries: dict[tuple[int, str], Entry] = {}
        inside.waits("horovod", lambda: [name for _, name in list(self._entries)])
        self._lock = threading.Lock()
        self._broken: HorovodInternalError | None = None
        self._closing = False
        # Whoever holds it takes launches from the negotiator, and does them.
        self._drive = threading.Lock()
        self._news_lock = threading.Lock()
        self._driver = 0
        self._executor = Executor(self)
        self.steps = Steps(self._announce)
        self._thread = threading.Thread(target=self._work, name="evener-horovod", daemon=True)
        self._thread.start()

    def _connect(self) -> bool:
        """Meet the other ranks' negotiators; whether all nodes have the same number of ranks."""
        control = self.sets[0].cpu
        mine = (
            contact.own_place(),
            self._negotiator.port,
            secrets.token_hex(16) if self._ranks.rank == 0 else "",
            self._ranks.local_size,
        )
        told: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(told, mine, group=control)
        place, port, token, _ = told[0]
        try:
            self._negotiator.connect(rendezvous.addresses_of(place), port, token)
        except RuntimeError as error:
            raise HorovodInternalError(
                f"rank {self._ranks.rank} of {self._ranks.size} did not reach the negotiation of "
                f"rank 0 at port {port} of {place[1]}: {error}",
                "open the nodes' firewalls to each other, or set GLOO_SOCKET_IFNAME to the "
                "interface that leads to the other nodes",
            ) from error
        return len({local_size for _, _, _, local_size in told}) == 1

    def _open_gate(self) -> bool:
        """Share memory with all other ranks, if all are on this machine; the same on all."""
        ranks, control = self._ranks, self.sets[0].cpu
        if ranks.local_size != ranks.size or ranks.size == 1:
            return False
        folder = Path("/dev/shm")
        path = folder if folder.is_dir() else Path(tempfile.gettempdir())
        path /= f"evener-gate-{secrets.token_hex(16)}"
        try:
            told: list[Any] = [None] * ranks.size
            problem = ""
            try:
                if ranks.rank == 0:
                    path.touch(mode=0o600)
                    with path.open("r+b") as file:
                        file.truncate(Negotiator.gate_bytes(ranks.size))
            except OSError as error:
                problem = str(error)
            dist.all_gather_object(told, str(path), group=control)
            try:
                if not problem:
                    self._negotiator.open_gate(told[0])
            except (OSError, RuntimeError) as error:
                problem = str(error)
            dist.all_gather_object(told, problem, group=control)
        finally:
            path.unlink(missing_ok=True)
        if any(told):
            why = next(t for t in told if t)
            info0("operations that repeat take longer, because ranks share no memory: %s", why)
            return False
        self._negotiator.use_gate()
        return True

    def make_set(self, ranks: list[int]) -> Set:
        """Groups of these ranks. Collective over them; made once for the same ranks."""
        key = tuple(ranks)
        if key not in self.groups:
            made = Set(ranks, None, None, None)
            if self._ranks.rank in ranks:
                made.place = ranks.index(self._ranks.rank)
                world = self._world
                every = len(ranks) == world.size
                made.cpu = world.group if every else world.new_group(ranks, "gloo", self.limit)
                made.cuda = made.cpu
                if torch.cuda.is_available() and dist.is_nccl_available():
                    made.cuda = world.new_group(ranks, "nccl", self.limit)
            self.groups[key] = made
        return self.groups[key]

    # --- the callers' side ---

    def submit(self, entry: Entry, *, urgent: bool = False) -> int:
        """Submit; gives the handle. urgent: the caller waits for it, so announce it at once.

        Raises ValueError for a name that is in flight, HorovodInternalError where an earlier
        operation failed for good.
        """
        inputs = entry.inputs
        gpu = bool(inputs) and inputs[0].is_cuda
        number = self._register(entry)
        drives = urgent and self._drive.acquire(blocking=False)
        if drives:
            self._driver = threading.get_ident()
            entry.here = True
        elif gpu:
            entry.ready = torch.cuda.current_stream(inputs[0].device).record_event()
        labels = entry.labels or itertools.repeat("")
        tensors: list[tuple[int, Sequence[int], str]] = [
            (dtypes.DTYPE_NUMBERS[tensor.dtype], tensor.shape, label)
            for tensor, label in zip(inputs, labels, strict=False)
        ]
        taken = self._negotiator.submit(
            entry.kind,
            entry.name,
            entry.set,
            tensors,
            gpu,
            entry.op,
            entry.root,
            entry.factors,
            entry.splits,
            urgent,
            drives,
        )
        if not taken:  # another thread's, on the short way
            self._done([(entry, None, self._in_flight(entry.name))])
        return number

    @staticmethod
    def _in_flight(name: str) -> ValueError:
        return ValueError(
            f"{name!r} is still in flight; synchronize it first, or give the second one another "
            "name"
        )

    def _register(self, entry: Entry) -> int:
        handle = entry.handle = Handle()
        key = (entry.set, entry.name)
        with self._lock:
            if self._broken is not None:
                raise HorovodInternalError(
                    f"{entry.name}: an earlier operation failed ({self._broken.problem})",
                    "call hvd.shutdown() and hvd.init() to begin anew",
                )
            if key in self._entries:
                raise self._in_flight(entry.name)
            self._entries[key] = entry
            number = next(self._numbers)
            self._handles[number] = handle
        if (ring := inside.writer) is not None:
            elements = entry.inputs[0].numel() if entry.inputs else -1
            ring.mark(entry.name[-24:], "horovod", number, elements)
        return number

    def quick(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        name: str,
        op: int,
        factors: tuple[float, float],
    ) -> bool:
        """Reduce one tensor over all ranks and wait: the short way of `submit` and `synchronize`.

        False where it is not for it, and nothing was done. source, output: without history,
        contiguous, the same shape and dtype.
        """
        if self._broken is not None or self.timeline.active:
            return False
        if not self._executor.is_direct(source) or factors != (1.0, 1.0):
            return False
        if not self._drive.acquire(blocking=False):
            return False
        found = 0
        try:
            found = self._negotiator.quick(
                name,
                dtypes.DTYPE_NUMBERS[source.dtype],
                source.shape,
                source.is_cuda,
                op,
                factors,
            )
            if found == 1:
                try:
                    self._executor.direct(source, output, op)
                except RuntimeError as error:  # torch's; how far the peers got is not known
                    self._fail([name], error)
                    raise cast(HorovodInternalError, self._broken) from error
        finally:
            if found != 2:
                self._drive.release()
        if found == 2:  # it is submitted, and goes on as others do
            entry = Entry(
                kinds.ALLREDUCE, name, [source], [output], op=op, factors=factors, here=True
            )
            try:
                number = self._register(entry)
            except BaseException:
                self._negotiator.undrive()
                self._drive.release()
                raise
            self._driver = threading.get_ident()
            self.synchronize(number)
        return found != 0

    def automatic_name(self, kind: str) -> str:
        """The next name of an operation that was given none; the same sequence on all ranks."""
        with self._lock:
            counter = self._counters.setdefault(kind, itertools.count(1))
            return f"noname.{next(counter)}"

    def poll(self, number: int) -> bool:
        """Whether the operation has ended; True for a handle that is not known (any more)."""
        handle = self._handles.get(number)
        return handle is None or handle.done

    def synchronize(self, number: int, *, at_once: bool = True) -> Any:
        """Wait, and give the result; None for a handle that is not known (any more).

        at_once: announce what was submitted now, and not after HOROVOD_CYCLE_TIME.
        """
        handle = self._handles.pop(number, None)
        if handle is None:
            return None
        mine = self._driver == threading.get_ident()
        if not mine and not handle.done:
            mine = self._drive.acquire(blocking=False)
            if at_once:
                self._negotiator.flush(mine)
            elif mine:
                self._negotiator.drive()
        if mine:
            try:
                while not handle.done and self._broken is None:
                    self._step(1.0)
            finally:
                self._driver = 0
                self._negotiator.undrive()
                self._drive.release()
        if handle.lock.locked():
            while not handle.lock.acquire(timeout=1.0):
                # The launching thread may hang in a collective with a peer that is gone.
                if (reason := self._negotiator.ended()) is not None:
                    if not handle.lock.acquire(timeout=1.0):
                        raise self._end(reason)
                    break
        if handle.error is not None:
            raise handle.error
        return handle.value

    def _announce(self, name: str) -> None:
        """Submit a barrier of this name, for which nobody waits."""
        self._handles.pop(self.submit(Entry(kinds.BARRIER, name)), None)
        self._negotiator.flush(False)

    def set_of(self, number: int | None) -> Set:
        """The process set of that number. ValueError where there is none."""
        found = None if number is None else self.sets.get(number)
        if found is None:
            raise ValueError(
                f"process set {number} does not exist: give it to hvd.init(process_sets=...) or "
                "hvd.add_process_set() first"
            )
        return found

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a process set, collectively; its number, -1 where there is one of these ranks."""
        return int(self._agreed(Entry(kinds.ADD_SET, "add_process_set", splits=ranks)))

    def remove_set(self, number: int) -> bool:
        """Forget a process set, collectively; whether it was there."""
        entry = Entry(kinds.REMOVE_SET, "remove_process_set", root=number)
        return bool(self._agreed(entry) == number)

    def _agreed(self, entry: Entry) -> Any:
        entry.finish = lambda _outputs, answer: answer.value
        return self.synchronize(self.submit(entry, urgent=True))

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Write a timeline into `path` from now on. Only rank 0 does."""
        if self._ranks.rank == 0:
            self.timeline.start(path, mark_cycles)
            self._negotiator.record(True)

    def stop_timeline(self) -> None:
        """Complete the file."""
        if self._ranks.rank == 0:
            self._negotiator.record(False)
            self._news()
            self.timeline.stop()

    def frozen(self) -> tuple[bool, int]:
        """Whether a frozen schedule holds, and how many launches there were without agreement."""
        return self._negotiator.frozen()

    def close(self) -> None:
        """Finish what is agreed, and end the thread. The others go on without this rank."""
        self._negotiator.shutdown()
        self._thread.join(timeout=5.0)
        self._closing = True
        _end_served(0.0)
        if not self._negotiator.close(_HEARD if self._ranks.rank else _TOGETHER):
            _SERVING.append(self._negotiator)  # the others go on, among themselves
        self.stop_timeline()
        for made in self.groups.values():
            made.cpu = made.cuda = None  # they end with their world

    # --- launching ---

    def _work(self) -> None:
        while not self._closing and self._broken is None:
            if self._negotiator.await_work(0.5):
                with self._drive:
                    self._step(0.0)
            if self._ranks.rank == 0:
                self._news()

    def _step(self, timeout: float) -> None:
        """Do the next launch, if there is one within `timeout` seconds. Called by who drives."""
        item = self._negotiator.next(timeout)
        if item is None:
            return
        answers, frozen, real, reason = item
        if reason is not None:
            self._end(reason)
            return
        if self.timeline.active:
            self._news()  # what was negotiated stands before what is launched
        try:
            self._launch(answers, frozen, real)
        except RuntimeError as error:  # torch's; which peers got how far is unknown from here
            self._fail([answer.name for answer in answers], error)

    def _news(self) -> None:
        with self._news_lock:
            self._tell()

    def _tell(self) -> None:
        events, warnings = self._negotiator.news()
        for text in warnings:
            logger.warning("Horovod operations are %s", text)
        self.timeline.negotiated(events)

    def _launch(self, answers: list[Answer], frozen: bool, real: bool) -> None:
        entries: list[Entry | None] = [
            self._entries.get((answer.set, answer.name)) for answer in answers
        ]
        if frozen:
            if not real:  # this rank may have some of them; it brings zeros
                entries = [None] * len(answers)
            flagged: bool | None
            if self._gated:
                flagged = self._negotiator.exchange(not real)
                if flagged is None:
                    return  # why it ended comes next
                self._negotiator.finished(flagged)
                if not flagged:
                    self._executor.run(answers, entries)
            else:
                flagged = self._executor.frozen(answers, entries, not real)
                self._negotiator.finished(flagged)
            if flagged:
                return
        else:
            pairs = []
            for answer, entry in zip(answers, entries, strict=True):
                if answer.error:
                    fix = "give the operation fitting tensors on every rank"
                    if "called shutdown" in answer.error:
                        fix = "let every rank do the same operations before it ends"
                    self._done([(entry, None, HorovodInternalError(answer.error, fix))])
                elif entry is not None or self._included(answer.set):
                    pairs.append((answer, entry))
            if not pairs:
                return
            answers = [answer for answer, _ in pairs]
            entries = [entry for _, entry in pairs]
            self._executor.run(answers, entries)
            if answers[0].kind == kinds.BARRIER and entries[0] is None:
                self.steps.take(answers[0].name, list(answers[0].splits))
            if answers[0].kind == kinds.JOIN:
                self.steps.all_joined()
                # Ranks that joined early made fewer calls; counting starts anew on all of them.
                with self._lock:
                    self._counters.clear()
        done: list[tuple[Entry | None, Any, BaseException | None]] = []
        for answer, entry in zip(answers, entries, strict=True):
            if entry is None:
                continue
            value, failure = entry.result, None
            if entry.finish is not None:
                try:
                    value = entry.finish(list(entry.outputs or ()), answer)
                except BaseException as error:  # noqa: BLE001 - handed to whoever synchronizes
                    failure = error
            done.append((entry, value, failure))
        self._done(done)

    def _included(self, number: int) -> bool:
        made = self.sets.get(number)
        return made is not None and made.place is not None

    def _done(self, done: Sequence[tuple[Entry | None, Any, BaseException | None]]) -> None:
        """Entries with what came of them: a value, or an error."""
        with self._lock:
            for entry, _, _ in done:
                if entry is not None:
                    self._entries.pop((entry.set, entry.name), None)
        for entry, value, error in done:
            if entry is not None and entry.handle is not None:
                entry.handle.finish(value, error)

    def _fail(self, failed: list[str], error: RuntimeError) -> None:
        names = ", ".join(failed[:4])
        reason = f"{names} failed: {str(error).strip() or type(error).__name__}"
        self._break(
            HorovodInternalError(
                f"rank {self._ranks.rank} of {self._ranks.size}: {reason}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within EVENER_TIMEOUT={self._timeout:g} s",
            )
        )
        # The others cannot go on without this rank.
        self._negotiator.fail(reason[:500])

    def _end(self, reason: str) -> HorovodInternalError:
        error = HorovodInternalError(
            f"rank {self._ranks.rank} of {self._ranks.size}: Horovod has been shut down: {reason}",
            "look for the first error on the other ranks; call hvd.shutdown() and hvd.init() to "
            "begin anew",
        )
        self._break(error)
        return error

    def _break(self, error: HorovodInternalError) -> None:
        with self._lock:
            self._broken = self._broken or error
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            if entry.handle is not None:
                entry.handle.finish(None, error)
