"""`evener net`: install and remove the plug-in, the variables, the statistics."""

import copy
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.base import settings
from evener.net import adopt, environment, install, plugin_path, stats
from evener.net.choice import Machine
from evener.net.command import net
from evener.net.plugin import PluginError

LARGE = Machine(gpus=4, processors=64)
RECORD = {
    "version": 1,
    "pid": 7,
    "rank": 3,
    "host": 'no"de',
    "time": 0.0,
    "net": {
        "devices": [
            {"name": "eth0", "address": "10.0.0.1", "bytes_sent": 45_000_000, "bytes_received": 6}
        ],
        "peers": [
            {
                "peer": "10.0.0.2:5 (abc)",
                "connections": 24,
                "comms": 4,
                "under_way": 0,
                "trials": 31,
                "gains": 17,
                "rerolls": 13,
                "best_rate": 125_000_000,
                "late": 19,
            }
        ],
        "paths": [
            {
                "peer": "10.0.0.2:5 (abc)",
                "nic": "eth0",
                "source_port": 20001,
                "state": "live",
                "bytes_sent": 5,
                "bytes_received": 6,
                "rate": 7,
                "rtt_us": 8,
                "retransmits": 9,
                "heals": 1,
            }
        ],
    },
}
LIVE = RECORD["net"]["paths"][0]  # type: ignore[index]
RECORD["net"]["ended"] = [  # type: ignore[index]
    {**LIVE, "source_port": 20002, "state": "ended", "why": why, "time": 1.0}
    for why in ("not worth keeping", "the peer closed it", "the peer closed it")
]


def test_the_plug_in_has_every_table() -> None:
    library = ctypes.CDLL(str(plugin_path()))
    for version in range(6, 13):
        name = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{version}")
        assert name.value == b"Evener"


def test_enable_and_disable(tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(net, ["enable", "--prefix", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "lib" / "libnccl-net.so"
    assert path.read_bytes() == plugin_path().read_bytes()
    assert "LD_LIBRARY_PATH" in shown.output
    # Again is an upgrade, not an error.
    assert run(net, ["enable", "--prefix", str(tmp_path)]).exit_code == 0
    assert run(net, ["disable", "--prefix", str(tmp_path)]).exit_code == 0
    assert not path.exists()
    assert "was not there" in run(net, ["disable", "--prefix", str(tmp_path)]).output


def test_another_plug_in_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    path = install.target(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"somebody else's")
    for act in (install.enable, install.disable):
        with pytest.raises(PluginError, match=r"libnccl-net\.so"):
            act(tmp_path)
    assert path.read_bytes() == b"somebody else's"


def test_the_variables_respect_a_choice() -> None:
    on = {"EVENER_NET": "on"}
    assert environment(on) == {
        "NCCL_NET_PLUGIN": str(plugin_path()),
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
    assert environment({**on, "NCCL_NET": "Socket"}) == {}
    assert environment({**on, "NCCL_NET_PLUGIN": "none"}) == {}
    assert environment({"EVENER_NET": "off"}, LARGE) == {}
    mine = {**on, "NCCL_NET_PLUGIN_REF_COUNT": "0"}
    assert "uses" in adopt(mine)
    assert mine["NCCL_NET_PLUGIN"] == str(plugin_path())
    assert mine["NCCL_NET_PLUGIN_REF_COUNT"] == "0"
    assert "left as it is: NCCL_NET=Socket is set" in adopt({**on, "NCCL_NET": "Socket"})
    assert "left as it is: EVENER_NET=off" in adopt({"EVENER_NET": "off"}, LARGE)


def test_by_itself_it_takes_machines_with_processors_to_spare() -> None:
    nodes = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert environment(nodes, LARGE) == environment({}, LARGE) == environment({"EVENER_NET": "on"})
    assert "(EVENER_NET=auto)" in adopt(dict(nodes), LARGE)
    few = Machine(gpus=4, processors=63)
    rdma = Machine(gpus=4, processors=64, rdma=("mlx5_0",))
    for env, machine, why in (
        (nodes, Machine(gpus=0, processors=64), "no NVIDIA GPU"),
        (nodes, few, "a rank has 15 processors"),
        ({}, few, "a rank has 15 processors"),
        (nodes, rdma, "mlx5_0"),
        ({**nodes, "WORLD_SIZE": "4"}, LARGE, "on one node"),
    ):
        assert environment(env, machine) == {}
        assert why in adopt(dict(env), machine)
    assert environment({**nodes, "NCCL_IB_DISABLE": "1"}, rdma)
    assert environment({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, few)


def test_the_shell_gets_them_on_any_machine() -> None:
    shown = CliRunner().invoke(net, ["env"])
    assert shown.exit_code == 0
    assert f"export NCCL_NET_PLUGIN={plugin_path()}" in shown.output


def _environment_of(code: str, **variables: str) -> tuple[dict[str, str | None], str]:
    """What a fresh process that runs `code` ends with, and what it printed to stderr."""
    names = ("NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT")
    shown = f"import json, os; print(json.dumps([os.environ.get(name) for name in {names}]))"
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(names, json.loads(done.stdout), strict=True)), done.stderr


def test_importing_evener_turns_it_on_where_asked_and_says_so_once() -> None:
    told, said = _environment_of("import evener", RANK="0", EVENER_NET="on")
    assert told == environment({"EVENER_NET": "on"})
    assert said == f"evener: NCCL uses {plugin_path()} (EVENER_NET=on)\n"
    assert _environment_of("import evener", RANK="1", EVENER_NET="on") == (told, "")
    nothing = dict.fromkeys(told, None)
    assert _environment_of("import evener", RANK="0", EVENER_NET="off") == (nothing, "")
    mine = {"EVENER_NET": "on", "NCCL_NET_PLUGIN": "mine"}
    assert _environment_of("import evener", **mine) == ({**nothing, "NCCL_NET_PLUGIN": "mine"}, "")
    child = (
        "import evener, subprocess, sys; subprocess.run([sys.executable, '-c', 'import evener'])"
    )
    _, said = _environment_of(child, RANK="0", **mine)
    assert said == "evener: NCCL's network is left as it is: NCCL_NET_PLUGIN=mine is set\n"
    assert _environment_of("import evener", RANK="1", **mine)[1] == ""
    _, said = _environment_of("import evener", RANK="0", EVENER_NET="yes")
    assert said == "evener: NCCL's network is left as it is: EVENER_NET=yes\n"
    launched = {"EVENER_NET": "on", "NCCL_NET_PLUGIN": str(plugin_path())}
    assert _environment_of("import evener", RANK="0", **launched)[1] == ""
    taken_back = "import evener.net.plugin as p; p.withdraw()"
    assert _environment_of(taken_back, RANK="1", EVENER_NET="on") == (nothing, "")


def test_statistics_are_read_and_shown(tmp_path: Path) -> None:
    (tmp_path / "net-7.json").write_text(json.dumps({**RECORD, "time": time.time()}))
    (tmp_path / "net-8.json").write_text("half a rec")
    (tmp_path / "net-9.json").write_text('{"version": 2}')
    rows = stats.rows(stats.read(tmp_path))
    assert [(row["rank"], row["source_port"]) for row in rows] == [(3, 20001)]
    run = CliRunner().invoke
    told = json.loads(run(net, ["stats", str(tmp_path), "--json"]).output)
    assert told[0]["heals"] == 1
    assert [row["state"] for row in told] == ["live", "ended", "ended", "ended"]
    text = run(net, ["stats", str(tmp_path), "--prometheus"]).output
    assert 'evener_net_path_sent_bytes_total{host="no\\"de",pid="7"' in text
    same = 'rank="3",peer="10.0.0.2:5 (abc)",nic="eth0",port="20001"'
    assert f'evener_net_path_live{{host="no\\"de",pid="7",{same}}} 1' in text
    assert 'evener_net_nic_sent_bytes_total{host="no\\"de",pid="7",rank="3",nic="eth0"} 4' in text
    shown = run(net, ["stats", str(tmp_path)]).output
    assert "eth0:20001" in shown and "20002" not in shown
    assert "have ended: 2 x the peer closed it; 1 x not worth keeping (--ended" in shown
    assert "45.0 MB" in shown
    all_shown = run(net, ["stats", str(tmp_path), "--ended"]).output
    assert all_shown.count("eth0:20002") == 3 and "have ended" not in all_shown
    record = copy.deepcopy(RECORD)
    record["net"]["peers"][0]["peer"] = "[fd00::1]:5 (abc)"  # type: ignore[index]
    (tmp_path / "net-7.json").write_text(json.dumps(record))
    assert "[fd00::1]:5" in run(net, ["stats", str(tmp_path)]).output
    row = next(line for line in shown.splitlines() if "1.00 Gb/s" in line)
    assert [word for word in row.split() if word.isdecimal()] == ["3", "24", "31", "17", "13", "19"]


def test_what_packets_did_is_shown_when_their_connections_are_over(tmp_path: Path) -> None:
    record = copy.deepcopy(RECORD)
    counts = {"sent": 9000, "lost": 5, "timed_out": 6, "late": 7, "rtt_us_log2": [0, 0, 9, 0, 1]}
    over = {"connections": 0, "trials": 0, "rerolls": 0}
    record["net"] |= {"packets": counts, "workers": [{"writes": 300}, {"writes": 100}]}  # type: ignore[operator]
    record["net"]["peers"][0] |= over  # type: ignore[index]
    (tmp_path / "net-7.json").write_text(json.dumps(record))
    shown = CliRunner().invoke(net, ["stats", str(tmp_path)]).output
    row = next(line for line in shown.splitlines() if "udp" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[2:] == ["udp", "9000", "22.5", "5", "6", "7", "<4 us", "<16 us"]
    assert "1.00 Gb/s" not in shown


def test_no_directory_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENER_STATS_DIR", raising=False)
    assert CliRunner().invoke(net, ["stats"]).exit_code != 0


def test_an_engine_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_NET_ENGINE", "rdma")
    with pytest.raises(settings.SettingError) as refused:
        settings.check_net()
    assert "EVENER_NET_ENGINE='rdma'" in str(refused.value)
    for engine in ("tcp", "udp", "xdp", ""):
        monkeypatch.setenv("EVENER_NET_ENGINE", engine)
        settings.check_net()
