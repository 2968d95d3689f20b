"""The checklist: a machine made of files, this machine, and a peer on loopback."""

import json
import shutil
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evener.net.choice import Machine
from evener.tools.doctor import Line, examine, kernel, nccl, nics, peer
from evener.tools.doctor.command import doctor
from evener.tools.doctor.line import exit_status
from evener.tools.doctor.peer import Server, examine_peer, flows, paths, per_flow_cap, rate


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def states(lines: object) -> dict[str, str]:
    return {line.name: line.state for line in lines}  # type: ignore[attr-defined]


def test_cards(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        sys__class__net__eth0__operstate="up",
        sys__class__net__eth0__speed="100000",
        sys__class__net__eth0__mtu="9000",
        sys__class__net__eth1__operstate="up",
        sys__class__net__eth1__speed="1000",
        sys__class__net__eth1__mtu="1500",
        sys__class__net__eth2__operstate="down",
        sys__class__net__docker0__operstate="up",
        sys__class__net__eth3__operstate="up",
        sys__class__net__eth3__speed="-1",
        sys__class__net__eth3__mtu="1500",
    )
    found = list(nics.ethernet(root))
    assert states(found) == {"eth0": "good", "eth1": "bad", "eth3": "info"}
    assert "mtu 9000" in next(line.fix for line in found if line.name == "eth3")


def test_no_card_at_all(tmp_path: Path) -> None:
    assert [line.state for line in nics.ethernet(tmp_path)] == ["bad"]


def test_small_buffers_are_named_with_the_value_that_helps(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__sys__net__core__rmem_max="212992",
        proc__sys__net__core__wmem_max=str(1 << 30),
        proc__sys__net__ipv4__tcp_rmem="4096\t131072\t6291456",
    )
    found = {line.name: line for line in kernel.buffers(root)}
    assert found["net.core.rmem_max"].fix == "sysctl -w net.core.rmem_max=67108864"
    assert found["net.core.wmem_max"].state == "good"
    assert found["net.ipv4.tcp_rmem"].fix.endswith("'4096 131072 67108864'")


@pytest.mark.parametrize(
    ("control", "queue", "state"),
    [("cubic", "fq_codel", "good"), ("bbr", "fq", "good"), ("bbr", "pfifo_fast", "bad")],
)
def test_congestion_control(control: str, queue: str, state: str, tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__sys__net__ipv4__tcp_congestion_control=control,
        proc__sys__net__core__default_qdisc=queue,
    )
    assert [line.state for line in kernel.congestion(root)] == [state]


def test_io_uring(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__sys__kernel__io_uring_disabled="2")
    (line,) = kernel.io_uring(root)
    assert line.state == "info" and "nothing today" in line.gain


def test_a_plugin_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "libnccl-net-evener.so"
    path.write_bytes(b"no library")
    assert nccl.examine_plugin(path).state == "bad"


def test_a_library_without_the_interface() -> None:
    import ctypes.util

    name = ctypes.util.find_library("c")
    assert name is not None
    line = nccl.examine_plugin(Path(name))
    assert (line.state, line.found) == ("bad", "exports no ncclNetPlugin_v5 to v12")


def test_this_machine() -> None:
    found = examine()
    assert {line.subject for line in found} == {"gpu", "nccl", "nics", "kernel"}
    assert all(line.found for line in found)
    assert all(line.fix for line in found if line.state == "bad")
    # What a tuning gains, and what happens without a fix of what is broken.
    assert all(line.gain for line in found if line.state == "bad" and line.severity == "slow")


def test_text_and_json() -> None:
    assert Line("nics", "eth0", "bad", "1 Gb/s", "buy a card").text() == (
        "[ ] eth0: 1 Gb/s\n      fix: buy a card"
    )
    shown = CliRunner().invoke(doctor, ["--json"])
    document = json.loads(shown.output)
    assert document["good"] == (shown.exit_code == 0)
    keys = {"subject", "name", "state", "found", "fix", "gain", "severity"}
    assert set(document["lines"][0]) == keys
    assert document["status"] == shown.exit_code


@pytest.fixture
def server() -> object:
    one = Server("127.0.0.1")
    thread = threading.Thread(target=one.serve, args=(10,), daemon=True)
    thread.start()
    yield one
    one.close()


def test_a_peer_on_loopback(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.tools.doctor.peer._SECONDS", 0.05)
    assert rate("127.0.0.1", server.port, 2, 0.05) > 0
    found = examine_peer("127.0.0.1", server.port)
    assert [line.name for line in found] == ["flows", "paths"]
    assert "by number of flows: 1:" in found[0].found


def test_several_flows_that_gain_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.tools.doctor.peer.rate", lambda _host, _port, n: min(n, 4) * 1e9)
    line = next(iter(flows("node-b", 1)))
    assert line.state == "bad"
    assert "one flow gets 1/4.0 of what 4 get" in line.found


@pytest.mark.parametrize(
    ("rates", "cap"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 1.0),
        ({1: 1.0, 2: 2.0, 4: 4.1, 8: 5.0}, 1.0),  # the card is full before the eighth
        ({1: 1.0, 2: 1.0, 4: 2.0, 8: 3.0}, 0.0),  # a hash over paths
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 0.0),
        ({1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0}, 0.0),
    ],
)
def test_a_cap_a_flow_is_told_from_paths(rates: dict[int, float], cap: float) -> None:
    assert per_flow_cap(rates) == cap


def test_a_cap_is_said_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.tools.doctor.peer.rate", lambda _host, _port, n: n * 0.625e9)
    assert "each flow gets about 5.00 Gb/s" in next(iter(flows("node-b", 1))).found


def test_the_nccl_that_is_loaded_says_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    class Library:
        def __init__(self, path: str) -> None:
            assert path == "/opt/new nccl/libnccl.so.2.32.3"

        def ncclGetVersion(self, number: Any) -> int:  # noqa: N802
            number._obj.value = 23203
            return 0

    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 00:00 1   /lib/libnccl-net.so\n"
                    "7f01-7f02 r-xp 0 00:00 1   /opt/new nccl/libnccl.so.2.32.3\n" * 2)  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nccl.ctypes, "CDLL", Library)
    assert nccl.loaded(maps) == (2, 32, 3)
    assert nccl.accepted(nccl.loaded(maps)) == range(6, 13)


@pytest.mark.parametrize(
    ("version", "highest"),
    [((2, 19, 3), 7), ((2, 23, 4), 8), ((2, 28, 9), 11), ((2, 30, 7), 12), ((2, 18, 1), None)],
)
def test_what_an_nccl_takes(version: tuple[int, ...], highest: int | None) -> None:
    takes = nccl.accepted(version)
    assert (max(takes) if takes else None) == highest


def test_a_plugin_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NET_PLUGIN", "/nowhere/libnccl-net-x.so")
    found = [line for line in nccl.plugin(Path("/")) if line.state == "bad"]
    assert "is not there" in found[0].found


def test_strict_reverse_path_filters_matter_with_several_cards(tmp_path: Path) -> None:
    files = {f"sys__class__net__eth{n}__operstate": "up" for n in range(2)}
    files |= {f"proc__sys__net__ipv4__conf__eth{n}__rp_filter": str(n) for n in range(2)}
    files["proc__sys__net__ipv4__conf__all__rp_filter"] = "0"
    root = machine(tmp_path, **files)
    (line,) = nics.replies(root)
    assert line.state == "bad"
    assert "strict on eth1" in line.found
    machine(tmp_path, proc__sys__net__ipv4__conf__all__rp_filter="2")
    assert [line.state for line in nics.replies(root)] == ["good"]


@pytest.mark.parametrize(
    ("value", "nodes", "state"), [("1", 2, "bad"), ("1", 1, "good"), ("0", 2, "good")]
)
def test_numa_balancing(value: str, nodes: int, state: str, tmp_path: Path) -> None:
    root = machine(tmp_path, proc__sys__kernel__numa_balancing=value)
    for node in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    assert [line.state for line in kernel.balancing(root)] == [state]


def test_cpu_governor(tmp_path: Path) -> None:
    root = machine(tmp_path, sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave")
    assert [line.state for line in kernel.governor(root)] == ["info"]


def test_a_peer_that_is_not_there() -> None:
    closed = Server("127.0.0.1")
    closed.close()
    assert next(iter(flows("127.0.0.1", closed.port))).state == "bad"


def test_paths_to_a_name_that_is_none() -> None:
    assert next(iter(paths("no-such-host.invalid"))).state == "info"


def test_the_server_takes_a_limited_number_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_MOST_CONNECTIONS", 3)
    server = peer.Server("127.0.0.1")
    thread = threading.Thread(target=server.serve, args=(1.0,), daemon=True)
    thread.start()
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    turned_away = 0
    for stranger in strangers[3:]:
        stranger.settimeout(20)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        turned_away += 1
    assert turned_away == 5
    for stranger in strangers:
        stranger.close()
    thread.join(20)
    server.close()


# --- verdicts ---


def line(state: str, severity: str = "slow") -> Line:
    return Line("nics", "eth0", state, "found", "fix", "gain", severity)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([], 0),
        ([line("good"), line("info")], 0),
        ([line("good", "broken")], 0),
        ([line("bad")], 1),
        ([line("bad"), line("bad", "broken")], 2),
    ],
)
def test_the_exit_status_is_the_worst_line(lines: list[Line], status: int) -> None:
    assert exit_status(lines) == status


def test_a_line_says_what_its_fix_gains() -> None:
    assert line("bad").text().splitlines() == [
        "[ ] eth0: found", "      fix: fix", "      gain: gain"
    ]  # fmt: skip
    assert line("bad", "broken").text().startswith("[!] ")
    assert line("good").text() == "[x] eth0: found"


def test_gains_follow_from_what_was_found(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__sys__net__ipv4__tcp_rmem="4096 131072 1250000",
        sys__class__net__eth0__operstate="up",
        sys__class__net__eth0__speed="100000",
        sys__class__net__eth0__mtu="1500",
    )
    (buffer,) = kernel.buffers(root)
    assert "beyond 10.0 Gb/s at a round trip of 1 ms" in buffer.gain  # 1.25 MB in 1 ms
    (card,) = nics.ethernet(root)
    # 1448 of 1538 bytes, 8948 of 9038.
    assert card.gain == "99% of the rate are data, 94% now; 6 times fewer packets"


@pytest.mark.parametrize(
    ("env", "has", "state", "said"),
    [
        ({"EVENER_NET": "on"}, Machine(0, 2), "good", "EVENER_NET=on"),
        ({"EVENER_NET": "off"}, Machine(4, 64), "info", "EVENER_NET=off"),
        ({}, Machine(0, 64), "info", "no NVIDIA GPU"),
        ({}, Machine(4, 8), "info", "a rank has 2 processors, and the plug-in wants 16"),
        ({}, Machine(4, 64, ("mlx5_0",)), "info", "this machine has mlx5_0"),
        ({}, Machine(4, 64), "good", "EVENER_NET=auto"),
        ({"NCCL_NET": "Socket"}, Machine(4, 64), "info", "NCCL_NET=Socket is set"),
    ],
)
def test_it_says_whether_jobs_here_get_the_plug_in_and_why(
    env: dict[str, str], has: Machine, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVENER_NET", "NCCL_NET", "NCCL_NET_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Machine, "here", classmethod(lambda _: has))
    (found,) = nccl.choice(Path("/"))
    assert found.state == state
    assert said in found.found


# As OpenSSH 9.2 says it.
SAID = {
    "ssh: Could not resolve hostname gpu9: Name or service not known": ("does not resolve", "DNS"),
    "me@gpu9: Permission denied (publickey,password).": ("accepts no key", "ssh-copy-id gpu9"),
    "No ED25519 host key is known for gpu9 and ...\nHost key verification failed.": (
        "is not known here",
        "ssh-keyscan",
    ),
    "ssh: connect to host gpu9 port 22: Connection refused": ("no sshd listens", "start sshd"),
    "ssh: connect to host gpu9 port 22: Connection timed out": ("does not answer", "firewall"),
    "ssh: connect to host gpu9 port 22: No route to host": ("does not answer", "ping gpu9"),
}


@pytest.mark.parametrize("said", SAID)
def test_a_name_that_does_not_resolve_is_not_a_missing_key(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (found,) = examine_peer("gpu9")
    assert (found.state, found.severity) == ("bad", "broken")
    problem, fix = SAID[said]
    assert problem in found.found and fix in found.fix
    assert ("ssh-copy-id" in found.fix) == ("denied" in said)
    done = CliRunner().invoke(doctor, ["--peer", "gpu9"])
    assert done.exit_code == 2


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh (package openssh-client)")
def test_the_real_ssh_and_a_name_that_is_none() -> None:
    (found,) = examine_peer("no-such-host.invalid")
    assert found.found == "the name no-such-host.invalid does not resolve"


def test_without_torch_it_says_so_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `uvx evener doctor`: the plug-in is looked at all the same."""
    monkeypatch.setitem(sys.modules, "torch", None)
    shown = {line.name: line for line in examine() if line.subject in ("gpu", "nccl")}
    assert "not installed" in shown["torch"].found and "not installed" in shown["NCCL"].found
    assert not [line for line in shown.values() if "cannot be told" in line.found]
