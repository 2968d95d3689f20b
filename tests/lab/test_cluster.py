"""Nodes are separate hosts that reach each other by name; `launch` starts a program on all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.base.ports import free_port
from evener.errors import UsageError
from evener.tools.lab import Lab, LabError, Spec

pytestmark = pytest.mark.lab
PYTHON = sys.executable


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Spec(nodes=2, slots=2, link="1gbit", nics=2)) as built:
        yield built


def test_host_names_are_the_nodes_own(lab: Lab) -> None:
    names = [node.run(["hostname"], check=True).stdout.strip() for node in lab.nodes]
    assert names == ["node0", "node1"]


def test_tmp_is_the_nodes_own(lab: Lab) -> None:
    lab.nodes[0].run(["touch", "/tmp/mine", "/dev/shm/mine"], check=True)
    for path in ("/tmp/mine", "/dev/shm/mine"):
        assert lab.nodes[0].run(["ls", path]).returncode == 0
        assert lab.nodes[1].run(["ls", path]).returncode != 0
        assert not Path(path).exists()


def test_a_node_sees_its_own_nics_and_processes(lab: Lab) -> None:
    script = "import os; print(sorted(os.listdir('/sys/class/net')), os.getpid() < 1000)"
    seen = lab.nodes[0].run([PYTHON, "-c", script], check=True).stdout
    assert seen.strip() == "['eth0', 'eth1', 'lo'] True"


def test_a_node_sees_the_machine_s_devices(lab: Lab) -> None:
    # NCCL reads the topology there.
    for place in ("/sys/bus/pci/devices", "/sys/devices/system/cpu"):
        if Path(place).exists():
            here = sorted(path.name for path in Path(place).iterdir())
            assert lab.nodes[0].run(["ls", place], check=True).stdout.split() == sorted(here)


@pytest.mark.parametrize("name", ["node1", "node1-eth1"])
def test_nodes_reach_each_other_by_name(lab: Lab, name: str) -> None:
    serve = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); "
    serve += "c, peer = s.accept(); c.send(peer[0].encode())"
    ask = f"import socket; print(socket.create_connection(({name!r}, 5000), 9).recv(99).decode())"
    with lab.nodes[1].popen([PYTHON, "-c", serve], stdout=-1, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        answer = lab.nodes[0].run([PYTHON, "-c", ask], timeout=20)
    # Each NIC is reached through its fellow on the same rail.
    assert answer.stdout.strip() == lab.nodes[0].addresses["eth1" in name], answer.stderr


def test_every_address_is_reached_from_every_other(lab: Lab) -> None:
    serve = "import socket, time; s = socket.create_server(('', 5001)); print('up', flush=True)\n"
    serve += "for i in range(4): s.accept()[0].close()"
    ask = "import socket, sys\nfor a in sys.argv[1:3]:\n for b in sys.argv[3:5]:\n"
    ask += "  socket.create_connection((b, 5001), 9, (a, 0)).recv(1)\n"
    with lab.nodes[1].popen([PYTHON, "-c", serve], stdout=-1, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        every = [*lab.nodes[0].addresses, *lab.nodes[1].addresses]
        lab.nodes[0].run([PYTHON, "-c", ask, *every], timeout=60, check=True)


def test_congestion_control_is_the_lab_s(lab: Lab) -> None:
    script = "import socket; s = socket.create_connection(('node0', 5002), 9); "
    script += "print(s.getsockopt(socket.IPPROTO_TCP, 13, 16).rstrip(bytes(1)).decode())"
    serve = (
        "import socket; s = socket.create_server(('', 5002)); print('up', flush=True); s.accept()"
    )
    with lab.nodes[0].popen([PYTHON, "-c", serve], stdout=-1, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        assert lab.nodes[1].run([PYTHON, "-c", script], check=True).stdout.strip() == "cubic"


def test_keep_and_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("yes")
    with Lab("1x1", keep=[tmp_path / "kept"]) as small:
        assert small.nodes[0].run(["cat", str(tmp_path / "kept")]).stdout == "yes"
        where = small.nodes[0].run(["pwd"], check=True).stdout.strip()
        assert where == str(Path.cwd())


def test_nodes_reach_the_daemon_that_shares_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "mps" / "control"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipe.parent))
    with Lab("1x1") as small:
        assert small.nodes[0].run(["test", "-p", str(pipe)]).returncode == 0


def test_popen_hands_signals_on_and_ends_as_the_program(lab: Lab) -> None:
    script = "import signal, time, sys; signal.signal(15, lambda *_: sys.exit(9)); "
    script += "print('up', flush=True); time.sleep(60)"
    with lab.nodes[0].popen([PYTHON, "-c", script], stdout=-1) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(20) == 9
    with lab.nodes[0].popen(["sleep", "60"]) as process:
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    assert lab.nodes[0].run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV


def test_popen_passes_input_and_environment(lab: Lab) -> None:
    node = lab.nodes[1]
    assert node.run(["cat"], input="hello").stdout == "hello"
    assert node.run(["sh", "-c", "echo $A$NCCL_HOSTID"], env={"A": "1"}).stdout == "1node1\n"
    assert node.run(["sh", "-c", "echo $NCCL_HOSTID"], env={"NCCL_HOSTID": None}).stdout == "\n"


def test_a_program_that_is_not_there(lab: Lab) -> None:
    done = lab.nodes[0].run(["/no/such/program"])
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr
    assert lab.nodes[0].run(["true"], cwd="/no/such/place").returncode == 126
    with pytest.raises(UsageError):
        lab.nodes[0].popen([])


def test_run_ends_what_takes_too_long(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.nodes[0].run(["sleep", "60"], timeout=0.2)
    # Gone, or about to be: its parent collects it a moment after we have seen our child's end.
    for _ in range(200):
        listed = lab.nodes[0].run(["ps", "-eo", "comm"]).stdout
        if "sleep" not in listed:
            return
    pytest.fail(listed)


def test_launch_tells_ranks_what_a_launcher_tells(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "enp5s0")
    monkeypatch.setenv("EVENER_HOSTID", "one")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR "
    names += "NCCL_HOSTID NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME OMPI_COMM_WORLD_RANK HOSTNAME"
    names += " EVENER_HOSTID"
    script = "import os, sys; print(*(os.environ.get(name) for name in sys.argv[1:]))"
    lines: dict[int, tuple[str, str, str]] = {}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        lines[rank] = (node, stream, line)

    result = lab.launch([PYTHON, "-c", script, *names.split()], on_line=on_line)
    assert result.ok and result.statuses == (0, 0, 0, 0)
    first = lab.nodes[0].addresses[0]
    for rank, node, local in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)):
        told = f"{rank} 4 {local} 2 {node} {node} {first} node{node} eth0,eth1 eth0 None node{node}"
        told += " None"
        assert lines[rank] == (f"node{node}", "stdout", told)


@pytest.mark.parametrize("asked", ["", "3"])
def test_ranks_share_the_cores_out(asked: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with threads for all cores, they would wait for each other spinning."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    lines: list[str] = []
    script = 'echo "$OMP_NUM_THREADS"'
    assert lab.launch(["sh", "-c", script], on_line=lambda *line: lines.append(line[3])).ok
    assert lines == [asked or str(max(1, len(os.sched_getaffinity(0)) // 4))] * 4


@pytest.mark.parametrize(
    ("gpus", "nodes"),
    [
        (4, ("GPU-0,GPU-1", "GPU-2,GPU-3")),
        (3, ("GPU-0,GPU-1", "GPU-2,GPU-0")),
        (1, ("GPU-0", "GPU-0")),
        (0, ("", "")),
    ],
)
def test_each_node_sees_its_own_gpus_and_shares_where_there_are_too_few(
    gpus: int, nodes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = ",".join(f"GPU-{i}" for i in range(gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = {}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        seen[rank] = line

    with Lab("2x2") as small:
        small.launch(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], on_line=on_line)
    assert seen == {0: nodes[0], 1: nodes[0], 2: nodes[1], 3: nodes[1]}


def test_the_first_failure_ends_the_others(lab: Lab) -> None:
    script = 'if [ $RANK = 2 ]; then exit 7; fi; trap "" TERM; sleep 60 & wait; sleep 60'
    result = lab.launch(["sh", "-c", script], grace=0.3, quiet=True)
    assert (result.status, result.rank, result.node) == (7, 2, "node1")
    assert not result.ok and not result.timed_out
    # What was waited for would have ended by itself, with status 0.
    assert {result.statuses[rank] for rank in (0, 1, 3)} <= {-9, -15}


def test_a_launch_that_takes_too_long(lab: Lab) -> None:
    result = lab.launch(["sleep", "60"], timeout=0.5, quiet=True)
    assert result.timed_out and result.status == 124 and result.rank is None
    assert result.statuses == (-15,) * 4


def test_lines_keep_their_order_and_files_hold_them(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys\nfor i in range(2000): print('line', i)\nprint('last', end='')\n"
    script += "print('problem', file=sys.stderr)"
    assert lab.launch([PYTHON, "-c", script], output_dir=tmp_path / "out").ok
    out, err = capfd.readouterr()
    for rank in range(4):
        label = f"[{rank}@node{rank // 2}] "
        lines = [line.removeprefix(label) for line in out.splitlines() if line.startswith(label)]
        assert lines == [f"line {i}" for i in range(2000)] + ["last"]
        assert (tmp_path / "out" / f"rank.{rank}.stdout").read_text().endswith("1999\nlast")
        assert (tmp_path / "out" / f"rank.{rank}.stderr").read_text() == "problem\n"
    assert sorted(err.splitlines()) == [f"[{r}@node{r // 2}] problem" for r in range(4)]


def test_a_descendant_that_holds_the_pipe_is_not_waited_for(lab: Lab, tmp_path: Path) -> None:
    waited = tmp_path / "waited"
    assert lab.launch(["sh", "-c", f"(sleep 60; touch {waited}) & echo done"], quiet=True).ok
    assert not waited.exists()


def test_torch_all_reduces_across_nodes(lab: Lab) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.full((1000,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(value)\n"
        "print(value.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    lines: list[str] = []
    before = sum(lab.traffic().values())
    result = lab.launch(
        [PYTHON, "-c", script],
        env={"OMP_NUM_THREADS": "1"},
        timeout=120,
        on_line=lambda *line: lines.append(line[3]),
    )
    assert result.ok, lines
    assert [line for line in lines if line == "10000.0"] == ["10000.0"] * 4
    assert sum(lab.traffic().values()) - before > 4000  # it crossed the network
    assert not [line for line in lines if "c10d" in line or "cannot be retrieved" in line]


def test_a_lab_that_is_closed_says_so() -> None:
    with Lab("1x1") as small:
        node = small.nodes[0]
        with pytest.raises(LabError):
            small.start()
    assert small.mode == "closed"
    for use in (
        lambda: node.popen(["true"]),
        lambda: small.launch(["true"]),
        lambda: small.fault("path0", "down"),
        small.traffic,
    ):
        with pytest.raises(LabError):
            use()
    small.close()


def test_loopback_says_that_it_is_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(LabError) as refused:
        Lab("2x1").start()
    assert "loopback" in refused.value.fix
    lines = []
    with Lab("2x1", loopback=True) as plain:
        assert plain.mode == "loopback" and "plan9" in plain.why
        with pytest.raises(LabError):
            plain.fault("path0", "down")
        result = plain.launch(
            ["sh", "-c", "echo $RANK $MASTER_ADDR $NCCL_HOSTID $GLOO_SOCKET_IFNAME"],
            on_line=lambda *line: lines.append(line[3]),
        )
    assert result.ok
    assert sorted(lines) == ["0 127.0.0.1 node0 lo", "1 127.0.0.1 node1 lo"]
    with contextlib.closing(
        __import__("socket").create_server(("127.0.0.1", free_port("127.0.0.1")))
    ):
        pass


def test_a_node_dies_and_comes_back(tmp_path: Path) -> None:
    """With all that runs in it; the others' processes stay, and its own start again."""
    script = (
        'echo start $$ >> "$1/$RANK"; (while :; do echo x >> "$1/child$RANK"; sleep 0.1; done) & '
        "sleep 7; kill $!"
    )
    with Lab("2x2", keep=[tmp_path]) as lab:
        argv = ["sh", "-c", script, "sh", tmp_path]
        result = lab.launch(argv, kill="3s", quiet=True, timeout=60)
    assert result.ok
    starts = [len((tmp_path / str(rank)).read_text().splitlines()) for rank in range(4)]
    assert starts[0] == starts[1] and starts[2] == starts[3]
    assert sum(starts) > 4, starts


def test_kills_need_a_lab_and_a_period() -> None:
    with Lab("1x1") as lab, pytest.raises(UsageError, match="below 3s"):
        lab.launch(["true"], kill="1s")
