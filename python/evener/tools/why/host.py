"""One host's ranks from outside: rings, processes, answers. Also the process that does it by ssh.

    python -m evener.tools.why.host FOLDER    a line of JSON a second; `gather` or `times` (without
                                              stacks) on its standard input is answered by a
                                              line with all files

It ends when its standard input ends, and removes FOLDER then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evener.tools.why import process, ras
from evener.tools.why.folders import sweep
from evener.watch.inside import SIGNAL, STACKS, TIMES
from evener.watch.ring import Mark, Reader

_PERIOD = 0.5
_ANSWER = 2.5
"""Seconds for a rank's own answer; who needs longer is looked at from outside."""
_LINGER = 10.0
_GONE = "XZ"
_STOPPED = "TtXZ"


class Host:
    """The watched ranks of one job on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rings: dict[int, Reader] = {}
        self._kills: dict[int, tuple[Path | None, int | None]] = {}

    def look(self) -> list[dict[str, Any]]:
        """Each rank's progress, cheaply: for every second."""
        self._find()
        return [self._short(ring) for _, ring in sorted(self._rings.items())]

    def gather(self, stacks: bool = True) -> dict[str, str]:
        """Name > text: all that is known of every rank here, within 8 seconds.

        stacks: also those of past operations, which costs a rank most of an answer.
        """
        self._find()
        rings = dict(sorted(self._rings.items()))
        if not rings:
            return {}
        states = {rank: process.look(ring.pid, ring.started) for rank, ring in rings.items()}
        asked = time.time()
        able = {r for r, found in states.items() if found.state not in _STOPPED}
        for rank in able:
            self._ask(rank, STACKS if stacks else TIMES)
        with ThreadPoolExecutor(len(rings) + 1) as pool:
            heard = pool.submit(ras.ask, None, 3.0)
            looked = {
                r: pool.submit(self._stacks, r, rings[r].pid, asked, r in able) for r in rings
            }
            answers = {rank: future.result() for rank, future in looked.items()}
            report = heard.result()
        files = {}
        for rank, ring in rings.items():
            if states[rank].state == "D":  # a disk's answer may have come in the meantime
                states[rank] = process.look(ring.pid, ring.started)
            seen, recorder = self._document(ring, states[rank], *answers[rank])
            files[f"rank.{rank}.seen.json"] = json.dumps(seen)
            files[f"rank.{rank}.recorder.json"] = json.dumps(recorder)
        name = socket.gethostname()
        if report:
            files[f"{name}.ras.txt"] = report
        return files

    def last(self) -> dict[str, str]:
        """What the rings hold, of ranks that may be gone: nobody is asked."""
        files = {}
        for rank, ring in sorted(self._rings.items()):
            state = process.look(ring.pid, ring.started)
            seen, _ = self._document(ring, state, {}, [], "")
            files[f"rank.{rank}.seen.json"] = json.dumps(seen)
        return files

    # --- pieces ---

    def _find(self) -> None:
        for path in self.folder.glob("rank.*"):
            number = path.name[5:]
            if number.isdecimal():
                known = self._rings.get(int(number))
                if known is None or process.look(known.pid).state in _GONE:
                    with contextlib.suppress(OSError, ValueError):
                        ring = Reader(path)
                        if known is None or ring.pid != known.pid:  # a rank that was started again
                            self._rings[int(number)] = ring
                            file = process.memory_kills(ring.pid)
                            before = process.counted(file) if file else None
                            self._kills[int(number)] = (file, before)

    def _short(self, ring: Reader) -> dict[str, Any]:
        seen = ring.read()
        issued = sum(max(group.get("issued", 0), 0) for group in _groups(seen.state).values())
        return {
            "rank": ring.rank, "world": ring.world, "pid": ring.pid, "host": ring.host,
            "step": seen.step, "marks": seen.marks, "issued": issued, "batches": seen.batches,
            "oom": self._killed(ring.rank), "state": process.look(ring.pid, ring.started).state,
        }  # fmt: skip

    def _killed(self, rank: int) -> int:
        """Kills for memory in the rank's cgroup since it began; -1: unknown."""
        file, before = self._kills.get(rank, (None, None))
        now = process.counted(file) if file else None
        return now - before if now is not None and before is not None else -1

    def _ask(self, rank: int, what: bytes) -> None:
        (self.folder / f"rank.{rank}.answer").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fd = os.open(self.folder / f"rank.{rank}.ask", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(fd, what)
            finally:
                os.close(fd)

    def _stacks(
        self, rank: int, pid: int, asked: float, able: bool
    ) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        """The rank's own answer, stacks, and where these are from."""
        if able:
            end = time.monotonic() + _ANSWER
            path = self.folder / f"rank.{rank}.answer"
            waits = (self.folder / f"rank.{rank}.ask").exists()
            while waits and time.monotonic() < end and process.look(pid).state not in _GONE:
                with contextlib.suppress(OSError, ValueError):
                    answer = json.loads(path.read_text())
                    return answer, answer["threads"], "the rank's own answer"
                time.sleep(0.02)
            if threads := self._signal(rank, pid, asked):
                return {}, threads, "faulthandler, by a signal"
        if process.look(pid).state in _GONE:
            return {}, [], ""
        threads = process.py_spy(pid)
        return {}, threads, "py-spy" if threads else ""

    def _signal(self, rank: int, pid: int, asked: float) -> list[dict[str, Any]]:
        path = self.folder / f"rank.{rank}.stack"
        if not path.exists() or not _catches(pid, SIGNAL):
            return []
        with contextlib.suppress(OSError):
            before = path.stat().st_size
            os.kill(pid, SIGNAL)
            for _ in range(50):
                time.sleep(0.02)
                if path.stat().st_size > before:
                    time.sleep(0.05)
                    return process.faulthandler(path.read_text(errors="replace")[before:])
        return []

    def _document(
        self,
        ring: Reader,
        state: process.Process,
        answer: dict[str, Any],
        threads: list[dict[str, Any]],
        source: str,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        seen, now = ring.read(marks=True), time.monotonic()
        groups = _groups(seen.state)
        wall, clock = answer.get("wall", seen.state_wall), answer.get("monotonic", seen.state_time)
        document = {
            "evener_seen": 1,
            "rank": ring.rank,
            "world": ring.world,
            "host": ring.host,
            "pid": ring.pid,
            "step": seen.step,
            "place": "data loader" if seen.since else "",
            "place_s": now - seen.since if seen.since else -1.0,
            "up_s": now - seen.started,
            "loader_s": seen.loader,
            "heard_s": now - seen.state_time if seen.state_time else -1.0,
            # The monotonic clock is the host's: what differs is the clock that the rank sees.
            "clock_off_s": (wall - clock) - (time.time() - now) if clock else 0.0,
            "groups": groups,
            "looks": seen.state.get("looks", 0),
            "waiting": seen.state.get("waiting", 0),
            "memory": process.memory(ring.pid),
            "pending": answer.get("pending", {}),
            "threads": threads,
            "stacks_from": source,
            "process": state.document(),
            "sockets": process.sockets(ring.pid),
            "cards": answer.get("cards", {}),
            "marks": [_mark(mark, now) for mark in seen.last[-40:]],
        }
        recorder = answer.get("recorder") or {
            "version": "", "entries": [],
            "pg_config": {n: {"desc": "", "ranks": g["ranks"]} for n, g in groups.items()},
            "pg_status": {
                # Who waits in a collective answers: this rank has not issued what others wait for.
                n: {"last_enqueued_collective": -1, "last_completed_collective": -1}
                for n in groups
            },
        }  # fmt: skip
        recorder["rank"] = ring.rank
        return document, recorder


def _groups(state: dict[str, Any]) -> dict[str, Any]:
    groups = state.get("groups")
    return groups if isinstance(groups, dict) else {}


def _mark(mark: Mark, now: float) -> dict[str, Any]:
    return {
        "what": mark.what, "group": mark.group, "seq": mark.seq, "elements": mark.elements,
        "dtype": mark.dtype, "entered": mark.entered, "step": mark.step, "ago_s": now - mark.time,
    }  # fmt: skip


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: another one would end by it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def main() -> int:
    """Serve one launcher until it goes."""
    sweep()
    host = Host(Path(sys.argv[1]))
    lock, ended = threading.Lock(), threading.Event()

    def say(document: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(document) + "\n")
            sys.stdout.flush()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() in ("gather", "times"):
                say({"files": host.gather(line.strip() == "gather")})
        ended.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=listen, daemon=True).start()
    try:
        while not ended.wait(_PERIOD * 2):
            say({"ranks": host.look()})
    except BrokenPipeError:  # noqa: S110 - the launcher is gone
        pass
    finally:
        # Ranks that end just now still write; after a killed launcher they end a little later.
        end = time.monotonic() + _LINGER
        while time.monotonic() < end and any(r["state"] not in _GONE for r in host.look()):
            time.sleep(0.1)
        shutil.rmtree(host.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
