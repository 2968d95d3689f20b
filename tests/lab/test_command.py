"""`evener lab`, as it is typed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from evener.cli import main; main()", "lab"]


def lab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_show_draws_what_would_be_built() -> None:
    shown = lab("show", "--nodes", "3", "--paths", "4", "--nics", "2", "--flow-cap", "5gbit")
    assert shown.returncode == 0
    for word in ("node2", "eth1", "path3", "6.25gbit", "5gbit", "cubic"):
        assert word in shown.stdout


def test_show_for_machines() -> None:
    shown = json.loads(lab("show", "--spec", "2x2@25gbit,paths=4", "--json").stdout)
    assert shown["path_rate"] == 6_250_000_000
    assert shown["queue_bytes"] == 1_562_500
    assert shown["nodes"][1]["ranks"] == [2, 3]


def test_the_link_takes_delay_and_loss() -> None:
    shown = json.loads(lab("show", "--link", "100mbit,delay=40ms,loss=1%", "--json").stdout)
    assert (shown["link_rate"], shown["delay_ns"], shown["loss"]) == (10**8, 4 * 10**7, 0.01)
    assert shown["short"] == "2x1@100mbit,delay=40ms,loss=1%"


def test_a_dry_run_builds_nothing() -> None:
    fault = ("--fault", "1s:path1:rate 1gbit")
    shown = lab("run", "--paths", "2", *fault, "--dry-run", "--", "python", "a file.py")
    assert "1s:path1:rate 1gbit" in shown.stdout
    assert "python 'a file.py'  (2 times)" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--nodes", "0", "--", "true"), "nodes=0"),
        (("run", "--fault", "1s:path1:blackhole", "--", "true"), "no path1"),
        (("run", "--spec", "2x2", "--paths", "2", "--", "true"), "both say"),
        (("run", "--fault", "1s:path0:delay=9ms", "--", "true"), "--delay 0ms"),
        (("run", "--link", "1gbit,delay=1ms", "--delay", "2ms", "--", "true"), "both say"),
        (("run", "--env", "A", "--", "true"), "NAME=VALUE"),
        (("run",), "COMMAND"),
        (("shell", "node9", "--nodes", "2"), "no host 'node9'"),
        (("fault", "--lab", "1", "path0", "explode"), "not a fault"),
        (("fault", "--lab", "1", "path0", "down"), "no lab of process 1"),
    ],
)
def test_mistakes_are_named_and_end_with_status_2(arguments: tuple[str, ...], said: str) -> None:
    done = lab(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.lab
def test_run_streams_and_ends_with_the_first_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "job.sh").write_text("echo rank $RANK; [ $RANK != 3 ] || exit 7; sleep 60")
    arguments = ("--nodes", "2", "--slots", "2", "--output-dir", str(out), "--", "sh", "job.sh")
    done = lab("run", *arguments, cwd=tmp_path)
    assert done.returncode == 7
    assert "[3@node1] rank 3" in done.stdout
    assert "rank 3 on node1 failed first: exit status 7" in done.stderr
    assert (out / "rank.3.stdout").read_text() == "rank 3\n"


@pytest.mark.lab
def test_a_script_under_tmp_is_there_in_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("echo here")
    done = lab(
        "run", "--nodes", "1", "--no-prefix", "--", "sh", str(tmp_path / "job.sh"), cwd=Path("/")
    )
    assert (done.returncode, done.stdout) == (0, "here\n")


@pytest.mark.lab
def test_run_with_a_fault_and_a_time_limit() -> None:
    faults = ("--fault", "0s:path0:blackhole", "--timeout", "1")
    done = lab("run", "--nodes", "1", *faults, "--", "sleep", "60")
    assert done.returncode == 124
    assert "path0: blackhole" in done.stderr and "not done after 1 s" in done.stderr


@pytest.mark.lab
def test_ctrl_c_ends_all() -> None:
    command = [*COMMAND, "run", "--nodes", "2", "--", "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err


@pytest.mark.lab
def test_other_terminals_find_a_lab_that_is_up() -> None:
    command = [*COMMAND, "up", "--nodes", "2", "--paths", "2"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stderr is not None
        while "Ctrl-C" not in (line := process.stderr.readline()):
            assert line, "the lab did not come up"
        pid = str(process.pid)
        labs = json.loads(lab("list", "--json").stdout)
        assert [one["spec"] for one in labs if one["pid"] == process.pid] == ["2x1@25gbit,paths=2"]
        assert lab("shell", "--lab", pid, "node1", "--", "hostname").stdout == "node1\n"
        assert lab("fault", "--lab", pid, "path1", "blackhole").returncode == 0
        assert lab("fault", "--lab", pid, "path2", "blackhole").returncode == 2
        process.terminate()
        process.communicate(timeout=30)
    assert all(one["pid"] != int(pid) for one in json.loads(lab("list", "--json").stdout))


@pytest.mark.lab
def test_a_shell_of_its_own_lab() -> None:
    done = lab("shell", "node1", "--nodes", "2", "--", "sh", "-c", "hostname; exit 5")
    assert (done.stdout, done.returncode) == ("node1\n", 5)


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (package openmpi-bin)"
)
def test_mpirun_fills_the_lab_where_no_hosts_are_named() -> None:
    done = lab("mpirun", "--nodes", "2", "--slots", "2", "--", "hostname")
    assert sorted(done.stdout.split()) == ["node0", "node0", "node1", "node1"], done.stderr
    named = lab("mpirun", "--nodes", "2", "--", "-np", "1", "-H", "node1", "hostname")
    assert named.stdout == "node1\n", named.stderr


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys, evener.tools.lab.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0
