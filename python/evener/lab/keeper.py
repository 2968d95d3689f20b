"""The process that holds a lab: it builds it, changes it, and takes it along when it ends.

One keeper a lab, started by `Lab` as a program of its own: forking a process that has threads, or
moving it between namespaces, is not safe, and this one has a single thread. It watches its parent
through a pidfd, which tells of the parent's end and not of the end of the thread that started it.
When it ends, by whatever cause, the kernel ends the nodes (see `node`), and the routers go with the
last descriptor that names them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from evener.lab import linux, node, wire
from evener.lab.faults import Action, Target
from evener.lab.plan import Plan
from evener.lab.spec import Spec


def main(fd: int, parent: int) -> int:
    """Serve the lab of `parent` over the socket `fd` until either goes."""
    control = socket.socket(fileno=fd)
    watch = os.pidfd_open(parent)
    if os.getppid() != parent:  # it went before we looked
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    request, _ = wire.receive(control)
    keeper = Keeper(Spec(**request["spec"]), request["keep"])
    try:
        fds = keeper.build()
        wire.send(control, {"mode": keeper.mode, "why": keeper.why, "notes": keeper.notes}, fds)
        wire.close(fds[: len(fds) - len(keeper.nodes) * len(node.NAMESPACES)])
        return keeper.serve(control, watch)
    except OSError as error:
        wire.send(control, {"refused": str(error)})
        return 1
    finally:
        keeper.end()


class Keeper:
    """The lab's namespaces."""

    def __init__(self, spec: Spec, keep: list[str]) -> None:
        self.plan = Plan(spec)
        self.keep = keep
        self.mode = ""
        self.why = ""
        self.notes: list[str] = []
        self.nodes: list[node.Held] = []

    def build(self) -> list[int]:
        """Everything. Returns the descriptors that enter the nodes, user namespace first.

        Raises OSError with what the kernel refused.
        """
        linux.adopt_orphans()  # so that `end` can wait for each node's process 1
        user = self._own()
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", str(node.STAGE), "tmpfs", 0, "mode=755")
        (node.STAGE / "lab").mkdir()
        started = [node.start(n.name, self.plan.hosts(), self.keep) for n in self.plan.nodes]
        # Imported here, while the nodes mount their file systems.
        from evener.lab.network import Network

        self.nodes = [node.finish(*s) for s in started]
        for held in self.nodes:
            self.notes += [note for note in held.notes if note not in self.notes]
        self.network = Network(self.plan, [held.namespaces[0] for held in self.nodes])
        self.notes += self.network.notes
        return [*user, *(fd for held in self.nodes for fd in held.namespaces)]

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

    def serve(self, control: socket.socket, parent: int) -> int:
        """Answer requests until the other end closes or `parent`, a pidfd, ends."""
        selector = selectors.DefaultSelector()
        selector.register(control, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == parent:
                    return 0
                try:
                    request, fds = wire.receive(control)
                except (EOFError, ConnectionError):
                    return 0
                wire.close(fds)
                wire.send(control, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "fault":
                target = Target.parse(request["target"], self.plan.spec)
                self.network.fault(target, Action(**request["action"]))
                return {}
            if request["do"] == "traffic":
                return {"traffic": self.network.traffic()}
        except OSError as error:
            return {"error": str(error)}
        return {"error": f"the keeper knows no {request['do']!r}"}

    def end(self) -> None:
        """End all nodes, and wait until they are gone."""
        for held in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(held.holder, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
