"""What launchers of others call: `horovod.runner`'s run, gloo_run, mpi_run and their like."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from evener.horovod.runner import _HorovodArgs, mpi_run
from evener.horovod.runner.common.util import safe_shell_exec
from evener.horovod.runner.common.util.settings import Settings
from evener.horovod.runner.function import RunError
from evener.horovod.runner.gloo_run import gloo_run
from evener.horovod.runner.launch import _run
from evener.tools.launch.discovery import Script


class Stream(io.StringIO):
    """Says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_lines_are_written_when_they_are_complete() -> None:
    read, write = os.pipe()
    out = Stream()
    with os.fdopen(read, "rb") as source:
        arguments = (source, out, "stdout", 3, False)
        thread = threading.Thread(target=safe_shell_exec.prefix_connection, args=arguments)
        thread.start()
        for text, said in (
            ("a\r", "[3]<stdout>:a\r"),
            ("\nb", "\n"),
            ("c\nd\r\ne", "[3]<stdout>:bc\n[3]<stdout>:d\r\n"),
        ):
            out.written.clear()
            out.seek(0)
            out.truncate()
            os.write(write, text.encode())
            assert out.written.wait(20)
            assert out.getvalue() == said
        os.close(write)
        thread.join(20)
    assert out.getvalue().endswith("[3]<stdout>:e")


def line_of(monkeypatch: pytest.MonkeyPatch, settings: Settings, nics: list[str], mpi: str) -> str:
    lines = []

    def execute(line: str, **_: object) -> int:
        lines.append(" ".join(line.split()))
        return 0

    monkeypatch.setattr(mpi_run.safe_shell_exec, "execute", execute)
    monkeypatch.setattr(mpi_run, "_get_mpi_implementation", lambda _=None: mpi)
    mpi_run.mpi_run(settings, nics, {"A": "1", "HOME": "/nowhere"}, ["python", "a b.py"])
    return lines[0]


def test_mpirun_by_its_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(num_proc=4, hosts="a:2,b:2", ssh_port=7, run_func_mode=True)
    assert line_of(monkeypatch, settings, ["eth0", "eth1"], "OpenMPI") == (
        "mpirun --allow-run-as-root --tag-output -np 4 -H a:2,b:2 -bind-to none -map-by slot "
        '-mca pml ob1 -mca btl ^openib -mca plm_rsh_args "-p 7" '
        "-mca btl_tcp_if_include eth0,eth1 -x NCCL_SOCKET_IFNAME=eth0,eth1 -x A python 'a b.py'"
    )
    assert line_of(monkeypatch, settings, ["eth0"], "MPICH") == (
        "mpirun -l -np 4 -ppn 2 -hosts a,b -bind-to none -map-by slot -bootstrap=ssh "
        "-bootstrap-exec-args \"-p 7\" -iface eth0 -genv NCCL_SOCKET_IFNAME=eth0 python 'a b.py'"
    )
    with pytest.raises(RuntimeError, match="as many slots on each host"):
        line_of(monkeypatch, Settings(num_proc=3, hosts="a:2,b:1"), [], "IntelMPI")


def test_an_mpirun_that_is_not_there_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(num_proc=1, hosts="localhost:1", run_func_mode=True)
    with pytest.raises(RuntimeError, match="install Open MPI"):
        line_of(monkeypatch, settings, [], "Missing")
    monkeypatch.setattr(mpi_run, "_get_mpi_implementation", lambda _=None: "OpenMPI")
    monkeypatch.setattr(mpi_run.safe_shell_exec, "execute", lambda *_, **__: 9)
    with pytest.raises(RuntimeError, match="exit code 9"):
        mpi_run.mpi_run(settings, [], {}, ["true"])
    with pytest.raises(TypeError, match="env argument must be a dict"):
        mpi_run.mpi_run(settings, [], os.environ, ["true"])  # type: ignore[arg-type]


def test_gloo_run_starts_ranks_and_says_that_they_failed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "rank = os.environ['HOROVOD_RANK']\n"
        "pathlib.Path(sys.argv[1], rank).write_text(os.environ['GIVEN'])\n"
        "sys.exit(int(os.environ['STATUS']))\n"
    )
    settings = Settings(num_proc=2, hosts="localhost:2")
    command = [sys.executable, str(script), str(tmp_path)]
    gloo_run(settings, ["lo"], {"GIVEN": "yes", "STATUS": "0"}, "127.0.0.1", command)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["yes", "yes"]
    with pytest.raises(RunError, match="one or more processes exited with non-zero status"):
        gloo_run(settings, None, {"GIVEN": "no", "STATUS": "3"}, "127.0.0.1", command)


def place() -> tuple[str, str]:
    return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]


def test_run_calls_a_function_or_a_command() -> None:
    given = _HorovodArgs()
    given.num_proc, given.run_func = 2, place
    assert _run(given) == [("0", "2"), ("1", "2")]
    given = _HorovodArgs()
    given.num_proc, given.command = 1, [sys.executable, "-c", "raise SystemExit(4)"]
    with pytest.raises(RuntimeError, match="ended with status 4"):
        _run(given)


def test_a_discovery_script_needs_no_first_line(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("echo one:2\necho two\n")
    script.chmod(0o700)
    assert Script(script, 4).find() == {"one": 2, "two": 4}
