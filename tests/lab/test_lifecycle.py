"""Whatever ends a lab, nothing of it is left: no process, no device, no mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from evener.tools.lab import Lab, LabError, Spec, directory

pytestmark = pytest.mark.lab

# Builds a lab, starts something stubborn in it, and says the process ids that hold it.
_OWNER = """
import signal, subprocess, sys, time
from evener.tools.lab import Lab
with Lab(sys.argv[1]) as lab:
    stubborn = "trap '' TERM INT HUP; while :; do sleep 1; done"
    programs = [n.popen(["sh", "-c", stubborn], start_new_session=True) for n in lab.nodes]
    for node in lab.nodes:
        while "sleep" not in node.run(["ps", "-eo", "comm"]).stdout: pass
    print(lab._keeper.pid, *(p.pid for p in programs), flush=True)
    time.sleep(60)
"""


def start_owner(spec: str = "2x1,paths=2", prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", _OWNER, spec]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def holders(owner: subprocess.Popen[str]) -> set[int]:
    """The keeper, the programs, and all of their descendants."""
    assert owner.stdout is not None
    found = {int(word) for word in owner.stdout.readline().split()}
    assert found, "the lab did not start"
    for _ in range(4):
        for pid in list(found):
            children = Path(f"/proc/{pid}/task/{pid}/children")
            with contextlib.suppress(FileNotFoundError):
                found |= {int(word) for word in children.read_text().split()}
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def namespaces() -> set[str]:
    """Network namespaces in which some process lives."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))  # noqa: PTH115
    return found


def eventually(check: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if check():
            return True
        time.sleep(0.02)
    return check()


@pytest.mark.parametrize("end", ["KILL", "TERM", "INT"])
def test_nothing_is_left_when_the_owner_ends(end: str) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    devices = sorted(os.listdir("/sys/class/net"))  # noqa: PTH208
    owner = start_owner()
    held = holders(owner)
    assert len(held) >= 8  # keeper, two holders, two first processes, two programs and more
    inside = {os.readlink(f"/proc/{pid}/ns/net") for pid in held if alive(pid)}  # noqa: PTH115
    owner.send_signal(getattr(signal, f"SIG{end}"))
    owner.wait(20)
    assert eventually(lambda: not any(map(alive, held))), [p for p in held if alive(p)]
    assert not (inside - {os.readlink("/proc/self/ns/net")}) & namespaces()  # noqa: PTH115
    assert Path("/proc/self/mounts").read_text() == mounts
    assert sorted(os.listdir("/sys/class/net")) == devices  # noqa: PTH208
    names = Path("/proc/net/unix").read_text()
    assert not any(directory.name_of(pid)[1:] in names for pid in held)


def test_nothing_is_left_when_the_keeper_is_killed() -> None:
    owner = start_owner()
    held = holders(owner)
    keeper = next(
        pid for pid in held if b"evener.tools.lab.keeper" in _command(pid) and _is_first(pid)
    )
    os.kill(keeper, signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, held - {owner.pid})))
    owner.kill()
    owner.wait()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _is_first(pid: int) -> bool:
    """The keeper, not a process that it forked: it leads its session."""
    return os.getsid(pid) == pid


def test_a_lab_outlives_the_thread_that_built_it() -> None:
    built: list[Lab] = []
    thread = threading.Thread(target=lambda: built.append(Lab("1x1").start()))
    thread.start()
    thread.join()
    try:
        assert built[0].nodes[0].run(["hostname"]).stdout == "node0\n"
    finally:
        built[0].close()


def test_a_forked_child_does_not_keep_a_lab_up() -> None:
    lab = Lab("1x1").start()
    keeper = lab._keeper
    assert keeper is not None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        lab.close()
        assert keeper.returncode == 0  # -9 where it was killed after ten seconds
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_two_labs_at_once_do_not_meet() -> None:
    serve = (
        "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()"
    )
    ask = "import socket; socket.create_connection(('node0', 5000), 5)"
    python = sys.executable
    with (
        Lab("2x1") as one,
        Lab("2x1") as two,
        one.nodes[0].popen([python, "-c", serve], stdout=-1, text=True) as server,
    ):
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        refused = two.nodes[1].run([python, "-c", ask], timeout=30)
        assert "ConnectionRefused" in refused.stderr
        assert one.nodes[1].run([python, "-c", ask], timeout=30).returncode == 0


def test_a_congestion_control_that_the_kernel_does_not_have() -> None:
    with pytest.raises(LabError) as refused:
        Lab(Spec(congestion="nosuch")).start()
    assert "nosuch" in str(refused.value)


def _unprivileged() -> list[str]:
    """A command that gives up every privilege; as another user where that one can run Python."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed (package util-linux)")
    if os.getuid() != 0:
        return []
    nobody = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups"]
    # Run a second time from within: setpriv itself may start what its user may not.
    script = (
        "import evener.tools.lab.network, pathlib, subprocess, sys; pathlib.Path.cwd();"
        "subprocess.run([sys.executable, '-c', ''], check=True)"
    )
    if subprocess.run([*nobody, sys.executable, "-c", script], capture_output=True).returncode == 0:
        return nobody
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all"]


_WITHOUT_RIGHTS = """
import sys
from evener.tools.lab import Lab, LabUnavailableError
try:
    lab = Lab("2x1@100mbit,paths=2,cap=50mbit").start()
except LabUnavailableError as error:
    print("refused", error.problem)
    sys.exit()
with lab:
    assert lab.mode == "user namespace", lab.mode
    assert lab.why
    serve = "import socket; s = socket.create_server(('', 80)); print('up', flush=True); s.accept()"
    ask = "import os, socket; socket.create_connection(('node1', 80), 9); print(os.getuid())"
    with lab.nodes[1].popen([sys.executable, "-c", serve], stdout=-1, text=True) as server:
        assert server.stdout.readline() == "up\\n"
        print(lab.nodes[0].run([sys.executable, "-c", ask], timeout=30, check=True).stdout.strip())
    lab.fault("path1", "blackhole")
    lab.fault("path0", "loss 1%")
    lab.fault("path0", "heal")
    lab.fault("node0", "down")
    print(lab.nodes[0].run(["hostname"]).stdout.strip())
    agent = lab.nodes[0].environment()["OMPI_MCA_plm_rsh_agent"].split()
    print(lab.nodes[0].run([*agent, "node1", "hostname"], timeout=30, check=True).stdout.strip())
"""


def test_without_privileges_it_is_a_user_namespace() -> None:
    prefix = _unprivileged()
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _WITHOUT_RIGHTS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": "/tmp"},
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("refused"):
        pytest.skip(done.stdout.strip())
    # Inside as outside: a program is the user who started it.
    user = "65534" if "--reuid=65534" in prefix else str(os.getuid())
    assert done.stdout.split() == [user, "node0", "node1"]


def test_a_user_namespace_s_lab_is_gone_after_kill() -> None:
    owner = start_owner(prefix=_unprivileged())
    line = owner.stdout.readline() if owner.stdout else ""
    if not line:
        pytest.skip("user namespaces are refused here")
    held = {int(word) for word in line.split()}
    owner.kill()
    owner.wait()
    assert eventually(lambda: not any(map(alive, held)))
