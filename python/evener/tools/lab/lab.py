"""`Lab`: a simulated cluster as a context manager; its nodes are `host.Node`s.

    with Lab(Spec(nodes=2, paths=4)) as lab:
        lab.nodes[0].run(["ping", "-c1", "node1"])
        lab.fault("path1", "blackhole")

The lab itself is held by another process, see `keeper`; this module talks to it, and starts
programs inside nodes by way of `enter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from evener.base.ports import free_port
from evener.tools.lab import environment, sshd, wire
from evener.tools.lab.errors import LabError, LabUnavailableError
from evener.tools.lab.faults import Action, Event, Target
from evener.tools.lab.host import Argument, Node
from evener.tools.lab.kills import Kills, parse_period
from evener.tools.lab.launch import LineCallback, Result, run_slots
from evener.tools.lab.layout import Layout
from evener.tools.lab.spec import Spec
from evener.tools.lab.timeline import Timeline
from evener.tools.launch import horovod_path

logger = logging.getLogger("evener.lab")

_PER_NODE = 5  # descriptors: net, uts, ipc, pid, mnt
_LOOPBACK = "set up a machine where root or user namespaces are allowed, or take plain loopback"


class Lab:
    """A simulated cluster, built by `with` (or `start`) and taken down at its end.

    `keep`: files and directories under /tmp or /dev/shm that nodes must see; the Python
    environment and the working directory are seen in any case. Both are otherwise empty in each
    node. `loopback`: where this machine allows no namespaces, start every process here on plain
    loopback, without rates, faults and separate hosts; otherwise that is a LabUnavailableError.

    `mode`: "root", "user namespace" or "loopback"; `why`: how it came to that; `notes`: what a
    node cannot have on this machine.
    """

    def __init__(
        self,
        spec: Spec | str | None = None,
        *,
        keep: Iterable[Argument] = (),
        loopback: bool = False,
    ) -> None:
        self.spec = Spec.parse(spec) if isinstance(spec, str) else spec or Spec()
        self.layout = Layout(self.spec)
        self.mode = "not started"
        self.why = ""
        self.notes: list[str] = []
        self.nodes: list[Node] = []
        self._keep = [*_needed(), *(str(Path(path).resolve()) for path in keep)]
        self._loopback = loopback
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._timeline: Timeline | None = None
        self._launches = 0
        self._sshd: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        return self if self.nodes and self.mode != "closed" else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> Lab:
        """Build it. Raises LabUnavailableError where the machine does not allow it."""
        if self.mode not in ("not started", "closed"):
            raise LabError("this lab is built already", "build another Lab")
        self.nodes = []
        try:
            self._start_keeper()
        except LabUnavailableError as error:
            if not self._loopback:
                raise
            self.mode, self.why = "loopback", error.problem
            logger.warning("plain loopback: no rates, no faults, one host (%s)", error.problem)
        groups = self._by_node()
        for node, fds, variables in zip(self.layout.nodes, groups, self._variables(), strict=True):
            self.nodes.append(Node(node, fds, variables))
        return self

    def close(self) -> None:
        """Take it down with everything that runs in it. Twice does no harm."""
        if self._timeline is not None:
            self._timeline.stop()
            self._timeline = None
        for node in self.nodes:
            if node._fds is not None:
                node._fds = ()
        wire.close(self._fds)
        self._fds = []
        if self._control is not None:
            with contextlib.suppress(OSError):
                # For forked children of ours too, who may still hold a copy.
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        if self._keeper is not None:
            try:
                self._keeper.wait(10)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
        for process in self._sshd:
            process.wait()
        self._sshd = []
        self.mode = "closed"

    def launch(
        self,
        argv: Sequence[Argument],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Argument | None = None,
        timeout: float | None = None,
        on_line: LineCallback | None = None,
        prefix: bool = True,
        quiet: bool = False,
        output_dir: Argument | None = None,
        grace: float = 5.0,
        horovod: bool = False,
        kill: str | None = None,
    ) -> Result:
        """Run `argv` once a slot, as a launcher would, and wait for all of them.

        Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, NODE_RANK,
        MASTER_ADDR (node0) and MASTER_PORT, and its node's variables; `env` is laid over them. A
        node sees its own `slots` GPUs alone, in order, where there are enough for all. Ranks share
        this machine's cores out: OMP_NUM_THREADS, unless it is set. `horovod`: `import horovod`
        gives Evener's, and a process gets HOROVOD_RANK and so on too.

        Output: `on_line(rank, node, stream, line)` for each line, else lines are printed, with
        `[rank@node]` in front unless `prefix` is off, or dropped with `quiet`. `output_dir`: also
        keep each rank's output in `rank.N.stdout` and `rank.N.stderr` there.

        `kill`: a period, like "60s". In each one a node, drawn from the Spec's seed, dies as by
        `kill -9`, and after a third of the period its processes are started again as they were.

        The first process that fails decides: the others get SIGTERM and, `grace` seconds later,
        SIGKILL. After `timeout` seconds all of them do, and the status is 124.
        """
        spec = self.spec
        if not self.nodes:
            raise LabError(f"the lab is {self.mode}", "launch inside its `with` block")
        period = None if kill is None else parse_period(kill)
        if period is not None:
            self._need_network()
        self._launches += 1
        port = 29499 + self._launches if self.mode != "loopback" else free_port("127.0.0.1")
        address = self.nodes[0].addresses[0]

        python_path: dict[str, str] = {}
        if horovod:
            path = (env or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
            python_path = {"PYTHONPATH": horovod_path.put_in_place(path)[0]}

        def start(rank: int) -> subprocess.Popen[bytes]:
            index, _ = spec.place(rank)
            told = environment.of_slot(rank, spec, address, port)
            told |= environment.of_threads(spec.world_size)
            if horovod:
                name = self.nodes[index].name
                told |= environment.of_horovod_slot(rank, spec, name)
            return self.nodes[index].popen(
                argv,
                env={**told, **(env or {}), **python_path},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # The terminal's Ctrl-C comes to us, and we end the ranks.
                start_new_session=True,
            )

        return run_slots(
            start,
            [self.nodes[spec.place(rank)[0]].name for rank in range(spec.world_size)],
            timeout=timeout,
            on_line=on_line,
            prefix=prefix,
            quiet=quiet,
            output_dir=None if output_dir is None else Path(output_dir),
            grace=grace,
            kills=None if period is None else Kills(period, spec.hash_seed, self._kill),
        )

    def _kill(self, name: str) -> None:
        """End every process of a node but those that hold it."""
        node = next(node for node in self.nodes if node.name == name)
        node.run([sys.executable, "-I", "-S", "-c", "import os; os.kill(-1, 9)"], timeout=30)

    def fault(self, target: str, action: str) -> None:
        """Do `action` to `target` now: `fault("path1", "blackhole")`, see `faults`.

        Raises UsageError for what this lab does not have, LabError where the kernel refuses.
        """
        Target.parse(target, self.spec)
        what = Action.parse(action)
        what.require(self.spec)
        if what.kind == "flap":
            self._line().flap(target, int(what.value))
            return
        if self._timeline is not None and what.kind in ("heal", "up", "down"):
            self._timeline.settle(target)
        self._fault(target, what)

    def schedule(self, *events: str | Event) -> None:
        """Faults on a timeline that starts now: `schedule("12s:path1:blackhole", ...)`."""
        parsed = [
            event if isinstance(event, Event) else Event.parse(event, self.spec) for event in events
        ]
        self._need_network()
        self._line().add(parsed)

    def sshd(self) -> None:
        """Start a real sshd in each node, so that `ssh node1 CMD` works inside the lab.

        Launchers that were led to the lab's own remote agent go through ssh from now on. Returns
        when all of them answer. Raises LabError, with the package's name where it is missing.
        """
        self._need_network()
        if not self._sshd:
            for node in self.nodes:
                for name in environment.AGENT_VARIABLES:
                    node.variables.pop(name, None)
            self._sshd = sshd.start(self.nodes, self.mode)

    def traffic(self) -> dict[str, int]:
        """Bytes that each NIC has sent into each path so far: {"node0.eth0.path1": 1234, ...}."""
        answer: dict[str, int] = self._ask({"do": "traffic"})["traffic"]
        return answer

    def _fault(self, target: str, action: Action) -> None:
        self._ask({"do": "fault", "target": target, "action": action.to_json()})
        logger.info("%s: %s", target, action.kind)

    def _line(self) -> Timeline:
        if self._timeline is None:
            self._need_network()
            self._timeline = Timeline(self.fault, self._fault)
        return self._timeline

    def _need_network(self) -> None:
        if self._control is None:
            raise LabError(
                f"the lab is {self.mode}: there is no network to change",
                "inside `with`, on a machine that allows namespaces",
            )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._need_network()
        assert self._control is not None
        with self._lock:
            try:
                wire.send(self._control, request)
                answer, _ = wire.receive(self._control)
            except (OSError, EOFError):
                raise LabError("the process that holds the lab has ended") from None
        if "error" in answer:
            raise LabError(f"the kernel refused {request['do']}: {answer['error']}")
        return answer

    def _start_keeper(self) -> None:
        if sys.platform != "linux":
            raise LabUnavailableError(f"{sys.platform} has no namespaces", _LOOPBACK)
        ours, theirs = wire.pair()
        with theirs:
            # The keeper must find what we found, wherever Evener was imported from.
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "evener.tools.lab.keeper",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours to answer
            )
        self._control = ours
        try:
            request = {
                "spec": dataclasses.asdict(self.spec),
                "keep": self._keep,
                "owner": os.getpid(),
                "directory": str(Path.cwd()),
                "inherited": environment.inherited(),
                "variables": self._variables(),
            }
            wire.send(ours, request)
            answer, self._fds = wire.receive(ours)
        except (OSError, EOFError) as error:
            self.close()
            raise LabError(f"the process that holds the lab ended: {error}") from None
        except BaseException:
            self.close()
            raise
        if "problem" in answer:
            self.close()
            raise LabError(answer["problem"], answer["fix"])
        if "refused" in answer:
            self.close()
            raise LabUnavailableError(f"this machine allows no lab: {answer['refused']}", _LOOPBACK)
        self.mode, self.why, self.notes = answer["mode"], answer["why"], answer["notes"]
        for note in self.notes:
            logger.warning("%s", note)

    def _by_node(self) -> list[list[int] | None]:
        if self.mode == "loopback":
            return [None] * self.spec.nodes
        user = self._fds[: len(self._fds) - _PER_NODE * self.spec.nodes]
        rest = self._fds[len(user) :]
        return [
            [*user, *rest[start : start + _PER_NODE]] for start in range(0, len(rest), _PER_NODE)
        ]

    def _variables(self) -> list[dict[str, str]]:
        available = environment.gpus()
        if 0 < len(available) < self.spec.world_size:
            logger.warning(
                "%d GPUs for %d slots: slots share them%s",
                len(available),
                self.spec.world_size,
                ", side by side by NVIDIA's MPS"
                if environment.mps()
                else " and take turns. Fix: run nvidia-cuda-mps-control -d before the lab",
            )
        return [
            environment.of_node(
                node.name,
                ["lo"] if self.mode == "loopback" else [nic.device for nic in node.nics],
                environment.share(
                    available, self.spec.ranks(node.index).start, self.spec.sizes[node.index]
                ),
                isolated=self.mode != "loopback",
            )
            for node in self.layout.nodes
        ]


def _needed() -> list[str]:
    """What Python, the caller's relative paths and NVIDIA's MPS need, wherever it lies."""
    here = [sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]), *sys.path]
    if (pipes := environment.mps()) is not None:
        here.append(str(pipes))
    with contextlib.suppress(FileNotFoundError):
        here.append(str(Path.cwd()))
    return sorted({str(Path(path).resolve()) for path in here if path and Path(path).exists()})


@functools.cache
def unavailable() -> str | None:
    """Why no lab can be built on this machine; None where one can. Builds a small one to see."""
    try:
        with Lab(Spec(nodes=1)):
            return None
    except LabError as error:
        return error.problem


def signal_name(status: int) -> str:
    """`exit status 3`, or `SIGKILL` for -9."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
