"""`evener net`: install and remove the plug-in, the variables, the statistics."""

import ctypes
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.net import environment, install, plugin_path, stats
from evener.net.command import net
from evener.net.plugin import PluginError

RECORD = {
    "version": 1,
    "pid": 7,
    "rank": 3,
    "host": 'no"de',
    "time": 0.0,
    "net": {
        "devices": [],
        "peers": [],
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
    told = environment({})
    assert told == {
        "NCCL_NET_PLUGIN": str(plugin_path()),
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
    assert environment({"NCCL_NET": "Socket"}) == {}
    assert environment({"NCCL_NET_PLUGIN": "none"}) == {}


def test_statistics_are_read_and_shown(tmp_path: Path) -> None:
    (tmp_path / "net-7.json").write_text(json.dumps({**RECORD, "time": time.time()}))
    (tmp_path / "net-8.json").write_text("half a rec")
    (tmp_path / "net-9.json").write_text('{"version": 2}')
    rows = stats.rows(stats.read(tmp_path))
    assert [(row["rank"], row["source_port"]) for row in rows] == [(3, 20001)]
    run = CliRunner().invoke
    assert json.loads(run(net, ["stats", str(tmp_path), "--json"]).output)[0]["heals"] == 1
    text = run(net, ["stats", str(tmp_path), "--prometheus"]).output
    assert 'evener_net_path_sent_bytes_total{host="no\\"de",pid="7"' in text
    assert 'evener_net_path_live{host="no\\"de",pid="7",port="20001"} 1' in text
    assert "eth0" in run(net, ["stats", str(tmp_path)]).output


def test_no_directory_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENER_STATS_DIR", raising=False)
    assert CliRunner().invoke(net, ["stats"]).exit_code != 0
