"""The process that holds a lab: it builds it, changes it, and takes it along when it ends.

One keeper a lab, started by `Lab` as a program of its own: forking a process that has threads, or
moving it between namespaces, is not safe, and this one has a single thread. It watches its parent
through a pidfd, which tells of the parent's end and not of the end of the thread that started it.
When it ends, by whatever cause, the kernel ends the nodes (see `node`), and the routers go with the
last descriptor that names them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from evener.errors import EvenerError
from evener.tools.lab import directory, enter, linux, node, wire
from evener.tools.lab.errors import LabError
from evener.tools.lab.faults import Action, Target
from evener.tools.lab.layout import Layout
from evener.tools.lab.spec import Spec

if TYPE_CHECKING:
    from evener.tools.lab.network import Network


def main(fd: int, parent: int) -> int:
    """Serve the lab of `parent` over the socket `fd` until either goes."""
    control = socket.socket(fileno=fd)
    watch = os.pidfd_open(parent)
    if os.getppid() != parent:  # it went before we looked
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    keeper = Keeper(wire.receive(control)[0])
    try:
        fds = keeper.build()
        wire.send(control, {"mode": keeper.mode, "why": keeper.why, "notes": keeper.notes}, fds)
        keeper.serve(control, watch)
    except (OSError, LabError) as error:
        with contextlib.suppress(OSError):
            if isinstance(error, LabError):
                wire.send(control, {"problem": error.problem, "fix": error.fix})
            else:
                wire.send(control, {"refused": str(error)})
        return 1
    finally:
        keeper.end()
    return 0


@dataclass
class _Running:
    """A command that an agent asked for."""

    process: int
    asked: socket.socket


class Keeper:
    """The lab's namespaces, and everyone who may ask for something."""

    def __init__(self, request: dict[str, Any]) -> None:
        """`request`: what `Lab` says of the lab: spec, paths to keep, environment and so on."""
        self.request = request
        self.layout = Layout(Spec(**request["spec"]))
        self.mode = ""
        self.why = ""
        self.notes: list[str] = []
        self.user: list[int] = []
        self.nodes: list[node.Held] = []
        self.network: Network | None = None
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, _Running] = {}

    def build(self) -> list[int]:
        """Everything. Returns the descriptors that enter the nodes, user namespace first.

        Raises OSError with what the kernel refused.
        """
        # Each namespace takes half a dozen descriptors.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        linux.adopt_orphans()  # so that `end` can wait for each node's process 1
        # An abstract name goes with its socket, and belongs to the network namespace it was made
        # in: this one is found from the host, the agents' one below from the nodes.
        self._listen(directory.name_of(os.getpid()))
        self.user = self._own()
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", str(node.STAGE), "tmpfs", 0, "mode=755")
        lab = node.STAGE / "lab"
        lab.mkdir()
        self._listen(str(lab / "agent"))
        with contextlib.suppress(FileNotFoundError):
            (lab / "ssh_config").write_bytes(Path("/etc/ssh/ssh_config").read_bytes())
        hosts, keep = self.layout.hosts(), self.request["keep"]
        started = [node.start(n.name, hosts, keep) for n in self.layout.nodes]
        # Imported here, while the nodes mount their file systems.
        from evener.tools.lab.network import Network

        self.nodes = [node.finish(*s) for s in started]
        for held in self.nodes:
            self.notes += [note for note in held.notes if note not in self.notes]
        self.network = Network(self.layout, [held.namespaces[0] for held in self.nodes])
        self.notes += self.network.notes
        return self._descriptors()

    def _descriptors(self) -> list[int]:
        return [*self.user, *(fd for held in self.nodes for fd in held.namespaces)]

    def _listen(self, name: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(name)
        listener.listen()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def _own(self) -> list[int]:
        """Get the rights to make namespaces: as root, else in a user namespace."""
        try:
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET, "mount, net")
        except PermissionError as error:
            refused = error
        else:
            self.mode, self.why = "root", "this process may make namespaces"
            return []
        uid, gid = os.getuid(), os.getgid()
        try:
            linux.unshare(linux.CLONE_NEWUSER, "user")
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            # As itself, not as root: programs in the nodes run as the user who started them.
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET, "mount, net in a user namespace")
        except OSError as error:
            raise OSError(error.errno, f"{refused}; {error}") from None
        self.mode, self.why = "user namespace", f"not privileged ({refused})"
        return [os.open("/proc/self/ns/user", os.O_RDONLY)]

    def serve(self, control: socket.socket, parent: int) -> None:
        """Answer requests until `control`'s other end closes or `parent`, a pidfd, ends."""
        self.selector.register(control, selectors.EVENT_READ, self._answer)
        self.selector.register(parent, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.fd == parent:
                    return
                if not key.data(key.fileobj) and key.fileobj is control:
                    return

    def _accept(self, listener: socket.socket) -> bool:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("=iII", credentials)[1] == os.getuid():
            self.selector.register(connection, selectors.EVENT_READ, self._answer)
        else:
            connection.close()
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; False once the other end is gone."""
        try:
            request, fds = wire.receive(connection)
        except (OSError, EOFError, ValueError):
            self.selector.unregister(connection)
            self._abandon(connection)
            connection.close()
            return False
        try:
            answer, handed = self._do(request, fds, connection)
        except (OSError, EvenerError) as error:
            answer, handed = {"error": str(error)}, []
        finally:
            wire.close(fds)
        if answer is not None:
            with contextlib.suppress(OSError):
                wire.send(connection, answer, handed)
        return True

    def _do(
        self, request: dict[str, Any], fds: list[int], connection: socket.socket
    ) -> tuple[dict[str, Any] | None, list[int]]:
        """An answer with descriptors; None where it comes later."""
        wanted = request.get("do")
        assert self.network is not None
        if wanted == "fault":
            target = Target.parse(request["target"], self.layout.spec)
            self.network.fault(target, Action(**request["action"]))
            return {}, []
        if wanted == "traffic":
            return {"traffic": self.network.traffic()}, []
        if wanted == "about":
            keys = ("spec", "owner", "inherited", "variables")
            about = {key: self.request[key] for key in keys}
            return {**about, "mode": self.mode, "why": self.why}, self._descriptors()
        if wanted == "run":
            self._run(request["node"], request["command"], fds, connection)
            return None, []
        return {"error": f"the lab knows no {wanted!r}"}, []

    def _run(self, host: str, command: str, fds: list[int], asked: socket.socket) -> None:
        """Start a shell command inside a node, with an agent's descriptors."""
        index = next((n.index for n in self.layout.nodes if host in (n.name, *n.addresses)), None)
        if index is None:
            names = ", ".join(n.name for n in self.layout.nodes)
            raise LabError(f"this lab has no host {host!r}", f"it has {names}")
        process = os.fork()
        if process == 0:
            environment = {**self.request["inherited"], **self.request["variables"][index]}
            self._become(command, fds, self.nodes[index].namespaces, environment)
        watch = os.pidfd_open(process)
        self.running[watch] = _Running(process, asked)
        self.selector.register(watch, selectors.EVENT_READ, self._ended)

    def _become(
        self, command: str, fds: list[int], namespaces: Sequence[int], env: dict[str, str]
    ) -> NoReturn:
        """In a new child: enter a node and run `command` there.

        Not by way of a new program: in a user namespace, an ordinary user's process loses with
        exec(2) the right to enter.
        """
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
            opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
            wire.close([fd for fd in opened if fd > 2 and fd not in namespaces])
            os.environ.clear()
            os.environ.update(env)
            inside = ",".join(map(str, namespaces))
            status = enter.main([inside, self.request["directory"], "/bin/sh", "-c", command])
            os._exit(status)
        except BaseException:  # noqa: BLE001 - nothing of this may return into the keeper's loop
            traceback.print_exc()
        os._exit(126)

    def _ended(self, watch: int) -> bool:
        """A command has ended: tell its agent."""
        self.selector.unregister(watch)
        os.close(watch)
        run = self.running.pop(watch)
        _, status = os.waitpid(run.process, 0)
        with contextlib.suppress(OSError):
            wire.send(run.asked, {"status": os.waitstatus_to_exitcode(status)})
        return True

    def _abandon(self, connection: socket.socket) -> None:
        """An agent has ended: its command goes with it."""
        for run in self.running.values():
            if run.asked is connection:
                os.kill(run.process, signal.SIGKILL)

    def end(self) -> None:
        """End all nodes, and wait until they are gone."""
        for held in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(held.holder, signal.SIGKILL)
        if self.network is not None:
            self.network.close()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
