"""What runs in a watched rank: a mark at the end of an optimizer's step, and a thread that mostly
sleeps.

The rest is counted by torch itself: how many batches a data loader's iterator gave, how many
operations a group issued; and its flight recorder, which has the operations, is on by default for
NCCL and for Gloo. So neither is wrapped, and the program runs torch's own code.

    twice a second   the thread writes these numbers into the ring, and whether the main thread is
                     in its data loader: that is how progress is seen from outside
    on a question    (a byte in the pipe `rank.N.ask`) it writes the recorder's entries, all
                     threads' stacks and what Horovod waits for into `rank.N.answer`
    on a signal      faulthandler writes stacks into `rank.N.stack`, without the GIL, for a rank
                     whose thread does not answer

Nothing here may raise into the program or print: a rank that cannot be watched trains on.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from evener.base import imports
from evener.watch.ring import Writer

VARIABLE = "EVENER_LAUNCH_WATCH"
SIGNAL = signal.SIGRTMAX - 5
STACKS, TIMES = b"?", b"t"
"""What can be asked: everything, or no stacks of past operations."""
_PERIOD = 0.5
_FRAMES = 40
_ENTRIES = 400
_LOADERS = ("/torch/utils/data/", "/torchdata/")
_EXCHANGE = re.compile(r"/torch/distributed/|/horovod/|/evener/(?:comm|horovod|net)/")
_GET_FLAGS, _UP, _LOOPBACK, _RUNNING = 0x8913, 0x1, 0x8, 0x40
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)

writer: Writer | None = None
"""This rank's ring; None where it is not watched."""
_compiling: Callable[[], bool] = bool
"""torch.compiler.is_dynamo_compiling. Kept: to look it up through torch is slow right after a step,
when nothing of it is in the caches."""
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""The iterators of data loaders that are alive; `_made` counts all that were ever made."""
_made = 0
_members: dict[str, tuple[Any, list[int]]] = {}
"""Name of a group > torch's dict of its ranks, and the ranks in order: sorted once."""
_sources: dict[str, Callable[[], list[str]]] = {}
_kept: list[IO[str]] = []
_started = threading.Lock()
_ending = threading.Event()


def waits(name: str, pending: Callable[[], list[str]]) -> None:
    """Register what a library waits for: `pending()` gives the names of what it submitted and the
    other ranks have not. Called from the watching thread, when it is asked."""
    _sources[name] = pending


def arm() -> None:
    """Watch this process, if it is a rank of a watched job. Never raises."""
    try:
        _arm(Path(os.environ[VARIABLE]))
    except Exception as error:  # noqa: BLE001 - a program that never asked must run
        if not isinstance(error, FileExistsError):
            sys.stderr.write(f"evener: this rank is not watched: {error}\n")


def _arm(folder: Path) -> None:
    global writer
    rank, world = _place(os.environ)
    if rank < 0 or writer is not None:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A process that this rank starts has the rank's variables too: the first one is the rank.
    writer = Writer(folder / f"rank.{rank}", rank, world, socket.gethostname())
    stack = (folder / f"rank.{rank}.stack").open("w")
    _kept.append(stack)
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, None):
        faulthandler.register(SIGNAL, stack, all_threads=True)
    os.register_at_fork(after_in_child=_forked)
    imports.after("torch.utils.data.dataloader", _loader)
    imports.after("torch.optim.optimizer", _optimizer)
    imports.after("torch.compiler", _compiler)
    imports.after("torch.distributed.distributed_c10d", lambda _: _start(folder, rank))


def _place(env: os._Environ[str]) -> tuple[int, int]:
    for rank, size in _RANKS:
        if env.get(rank, "").isdecimal():
            world = env.get(size, "")
            return int(env[rank]), int(world) if world.isdecimal() else 0
    return -1, 0


def _forked() -> None:
    """A child of a rank (a worker of its data loader) writes nothing into the rank's ring."""
    global writer
    writer = None


def _loader(module: Any) -> None:
    with contextlib.suppress(Exception):
        kind = module._BaseDataLoaderIter
        inner = kind.__init__

        def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807 - it is one
            global _made
            inner(self, *given, **named)
            _iterators.add(self)
            _made += 1

        kind.__init__ = __init__


def _optimizer(module: Any) -> None:
    def after(*_: Any) -> None:
        ring = writer
        if ring is not None and not _compiling():
            ring.step()

    # It only looks: steps may be deferred all the same (evener.comm.overlap.optimizers).
    after.evener_observes = True  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        module.register_optimizer_step_post_hook(after)


def _compiler(module: Any) -> None:
    global _compiling
    _compiling = module.is_dynamo_compiling


# --- the thread ---


def _start(folder: Path, rank: int) -> None:
    if not _started.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):
        ask = folder / f"rank.{rank}.ask"
        ask.unlink(missing_ok=True)
        os.mkfifo(ask, 0o600)
        # Open for both: a pipe without a writer would be readable, at its end, for ever.
        fd = os.open(ask, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(
            target=_serve, args=(fd, folder, rank), daemon=True, name="evener-watch"
        )
        thread.start()
        atexit.register(_end, fd, thread)


def _end(fd: int, thread: threading.Thread) -> None:
    """Python aborts a process that ends while another thread is in torch's code."""
    _ending.set()
    with contextlib.suppress(OSError):
        os.write(fd, b"\n")
    thread.join(1.0)


def _serve(fd: int, folder: Path, rank: int) -> None:
    known: dict[str, Any] = {}
    said, looks, waiting, loader = 0.0, 0, 0, _Loader()
    main = threading.main_thread().ident
    while True:
        asked, _, _ = select.select([fd], [], [], _PERIOD)
        if _ending.is_set():
            return
        if writer is None:  # switched off; on again, it goes on
            continue
        try:
            now = time.monotonic()
            groups = _groups()
            looks += 1
            waiting += _look(loader, now, main or 0)
            if groups != known or now - said > 2.0:
                known, said = groups, now
                _tell(writer, {"groups": groups, "looks": looks, "waiting": waiting})
            if asked:
                asks = b""
                with contextlib.suppress(BlockingIOError):
                    asks = os.read(fd, 4096)
                _answer(folder, rank, groups, STACKS in asks)
        except Exception:  # noqa: BLE001, S112 - groups that come and go; the next turn looks again
            continue


def _look(loader: _Loader, now: float, main: int) -> bool:
    """Write what the main thread does with its data loader; whether it communicates.

    Its frame is let go at once: a frame keeps all that its functions hold, process groups too.
    """
    frame = sys._current_frames().get(main)
    if writer is not None:
        writer.loader(*loader.look(now, frame))
    return _communicates(frame)


def _tell(ring: Writer, state: dict[str, Any]) -> None:
    """Write a state, without the members of groups where they do not fit: an answer has them."""
    if not ring.state(state):
        groups = {name: {**group, "ranks": []} for name, group in state["groups"].items()}
        ring.state({**state, "groups": groups})


class _Loader:
    """What is known of the data loader, by one look after the other."""

    def __init__(self) -> None:
        self._batches, self._given, self._since, self._seconds = 0, (0, 0), 0.0, 0.0
        self._last = time.monotonic()

    def look(self, now: float, frame: Any) -> tuple[int, float, float]:
        """As the ring has it. frame: where the main thread is."""
        given = _made, sum(getattr(one, "_num_yielded", 0) for one in list(_iterators))
        moved = given != self._given
        self._given, self._batches = given, self._batches + moved
        if _loads(frame):
            self._seconds += now - self._last
            self._since = now if moved or not self._since else self._since
        else:
            self._since = 0.0
        self._last = now
        return self._batches, self._since, self._seconds


def _loads(frame: Any) -> bool:
    """Whether a thread is in a data loader."""
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _LOADERS):
            return True
        frame = frame.f_back
    return False


def _communicates(frame: Any) -> bool:
    """Whether the innermost frames of a thread are of torch.distributed or of an exchange."""
    for _ in range(4):
        if frame is None:
            return False
        if _EXCHANGE.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _answer(folder: Path, rank: int, groups: dict[str, Any], stacks: bool = True) -> None:
    document = {
        "recorder": _recorder(groups, stacks),
        "threads": _threads(),
        "pending": {name: source()[:1000] for name, source in _sources.items()},
        "cards": _cards(),
        "wall": time.time(),
        "monotonic": time.monotonic(),
    }
    part = folder / f"rank.{rank}.answer.part"
    part.write_text(json.dumps(document))
    part.rename(folder / f"rank.{rank}.answer")


def _groups() -> dict[str, Any]:
    """Group > its ranks in the job, and how many operations this rank has issued in it."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return {}
    found: dict[str, Any] = {}
    for group, ranks in list(module._world.pg_group_ranks.items()):
        name = module._world.pg_names.get(group)
        if name is None or group == module.GroupMember.NON_GROUP_MEMBER:
            continue
        try:
            issued = int(group._get_sequence_number_for_group())
        except Exception:  # noqa: BLE001 - a backend without numbers
            issued = -1
        if name not in _members or _members[name][0] is not ranks:
            _members[name] = ranks, sorted(ranks, key=ranks.get)
        found[str(name)] = {"ranks": _members[name][1], "issued": issued}
    return found


def _recorder(groups: dict[str, Any], stacks: bool) -> dict[str, Any]:
    """torch's flight recorders, NCCL's and Gloo's in one dump in the format of NCCL's.

    stacks: with the line of the program that issued each operation, which takes ten times as long.
    Of Gloo's the names and members of the groups are added, which it does not know, and that an
    operation is complete, which it says as `retired`.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    parts = []
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        with contextlib.suppress(Exception):
            parts.append(
                pickle.loads(getattr(c10d, name)(True, stacks, False))
            )  # torch's own, of this process
    parts = [part for part in parts if part.get("entries")]
    merged: dict[str, Any] = {
        "version": parts[0]["version"] if parts else "",
        "pg_config": {
            name: {"name": name, "desc": "", "ranks": group["ranks"]}
            for name, group in groups.items()
        },
        "pg_status": {},
        "entries": [],
    }
    for at, part in enumerate(parts):
        for entry in part["entries"][-_ENTRIES:]:
            gloo = str(entry["profiling_name"]).startswith("gloo:")
            name = str(entry["process_group"][0])
            known = groups.get(name, {}).get("ranks", [])
            if at:  # a group with both: each counts for itself
                name += "/gloo"
            desc = str(entry["process_group"][1])
            entry["process_group"] = [name, desc]
            merged["pg_config"].setdefault(name, {"name": name, "desc": desc, "ranks": known})
            seq = entry.get("collective_seq_id", -1)
            status = part["pg_status"].get(str(entry["pg_id"]), {})
            # Gloo's status counts messages too, which it does not record.
            done = not gloo and seq <= status.get("last_completed_collective", -1)
            if (gloo and entry.get("retired")) or (done and not entry.get("is_p2p")):
                entry["state"] = "completed"
            if not gloo:
                merged["pg_status"][name] = status
            entry["frames"] = (entry.get("frames") or [])[:_FRAMES]
            merged["entries"].append(entry)
    return merged


def _cards() -> dict[str, bool]:
    """Cards that are up in this process's network namespace, and whether they have a carrier."""
    found: dict[str, bool] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                raw = fcntl.ioctl(any_, _GET_FLAGS, struct.pack("16sH22x", name.encode()[:15], 0))
                flags = struct.unpack_from("<H", raw, 16)[0]
                if flags & _UP and not flags & _LOOPBACK:
                    found[name] = bool(flags & _RUNNING)
    return found


def _threads() -> list[dict[str, Any]]:
    """Stacks of all threads but this one, innermost frame first; the main thread is the first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == own:
            continue
        frames: list[str] = []
        at: Any = frame
        while at is not None and len(frames) < _FRAMES:
            frames.append(f"{at.f_code.co_filename}:{at.f_lineno} {at.f_code.co_name}")
            at = at.f_back
        found.append({"name": names.get(ident, "?"), "main": ident == main, "frames": frames})
    return found
