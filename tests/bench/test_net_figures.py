"""`evener bench net` on a machine that does something else besides."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from click.testing import CliRunner

from evener.errors import UsageError
from evener.tools.bench import busy
from evener.tools.bench.net import command, drive


def test_the_run_of_median_bandwidth_counts_with_the_range_of_all() -> None:
    samples = [[{"size": 8, "bandwidth": b, "stall": b / 10}] for b in (5.0, 9.0, 1.0)]
    assert drive.medians(samples) == [
        {"size": 8, "bandwidth": 5.0, "stall": 0.5, "least": 1.0, "most": 9.0}
    ]
    assert drive.medians(samples[:1])[0]["bandwidth"] == 5.0


def test_others_are_what_the_kernel_counts_while_we_sleep(tmp_path: Path) -> None:
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    # user nice system idle iowait irq softirq steal: 100 ticks are a second.
    stat.write_text("cpu  100 0 50 9000 70 0 0 0 0 0\ncpu0 ...\n")
    later = threading.Timer(0.1, stat.write_text, ("cpu  140 0 80 9100 99 10 10 10 0 0\n",))
    later.start()
    assert busy.others(tmp_path, 0.5) == 100 / 100 / 0.5
    later.join()
    assert busy.others(tmp_path / "none", 0.0001) == 0


def test_a_busy_machine_is_said_and_a_quiet_one_is_not() -> None:
    assert busy.warning([], 2) == busy.warning([0.1, 0.2], 2) == ""
    assert "used up to 1.9 of 2 processors" in busy.warning([0.0, 1.9], 2)


def test_each_engine_has_a_row_and_another_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ["--sizes", "4096", "--seconds", "0.05", "--json", str(path)]
    result = CliRunner().invoke(command.net, [*options, "--engine", "tcp, udp"])
    assert result.exit_code == 0, result.output
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [name.split()[-1] for name in results] == ["streams", "tcp", "udp"]
    refused = CliRunner().invoke(command.net, ["--engine", "tcp,quic"])
    assert isinstance(refused.exception, UsageError) and "'quic'" in str(refused.exception)
