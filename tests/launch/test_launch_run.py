"""`evener launch` with real engines: output, the first failure, and that nothing is left behind.

Other hosts are other addresses of the loopback network: reached by a real sshd of our own where
there is one, and by a stand-in for ssh that runs the command here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# No torch in the ranks: the engines are slow enough to start.
TRAIN = """
import os, sys, time
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
print("rank", rank, os.environ.get("FOO", "-"), os.environ.get("LIGHT_INTRA_SIZE", "-"))
if "fail" in sys.argv and rank == "1":
    print("out of cheese", file=sys.stderr)
    sys.exit(7)
if "fail" in sys.argv or "wait" in sys.argv:
    time.sleep(300)
"""

needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)")
ENGINES = [
    "--torchrun",
    pytest.param("--mpi", marks=[pytest.mark.mpi, needs_mpirun]),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    rsh = tmp_path / "rsh"
    rsh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    rsh.chmod(0o755)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from evener.cli import main; main()", "launch", *arguments]


def launch(job: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=job,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=150,
    )


def of_this_job(job: Path) -> list[str]:
    """Command lines of living processes that run the job's script or lead to it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            if entry.name.isdecimal() and str(job / "train.py") in words:
                found.append(words.replace("\0", " "))
    return found


def gone(job: Path) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not of_this_job(job):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_on_this_host(engine: str, job: Path) -> None:
    script = str(job / "train.py")
    done = launch(
        job,
        *(engine, "-np", "2", "-x", "FOO=b a r", "--output-dir", "out", sys.executable, script),
        LIGHT_INTRA_SIZE="2",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0@localhost] rank 0 b a r 2",
        "[1@localhost] rank 1 b a r 2",
    ]
    assert (job / "out" / "rank.1" / "stdout").read_text() == "rank 1 b a r 2\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_failing_rank_is_named_and_the_others_are_ended(engine: str, job: Path) -> None:
    script = str(job / "train.py")
    done = launch(job, engine, "-np", "2", sys.executable, script, "fail")
    assert done.returncode == 7
    assert "rank 1 on localhost failed first: exit status 7" in done.stderr
    assert "    out of cheese" in done.stderr
    assert "Traceback" not in done.stderr
    assert gone(job), of_this_job(job)


def test_a_command_reaches_the_ranks_as_it_was_typed(job: Path) -> None:
    words = ["a b", "$$", "${local_rank}", "$HOME", "'\"\\", "", "-x", "\u00b5"]
    code = "import sys; print(ascii(sys.argv[1:]))"
    done = launch(job, "-np", "1", sys.executable, "-c", code, *words)
    assert done.stdout == f"[0@localhost] {words!a}\n", done.stderr
    over = ("-H", "127.0.0.2:1", "--rsh", str(job / "rsh"))
    done = launch(job, *over, sys.executable, "-c", code, *words)
    assert done.stdout == f"[0@127.0.0.2] {words!a}\n", done.stderr


def test_over_another_shell_the_host_is_named(job: Path) -> None:
    done = launch(
        job,
        *("-H", "127.0.0.2:1,127.0.0.3:1", "--rsh", str(job / "rsh")),
        *(sys.executable, str(job / "train.py"), "fail"),
    )
    assert done.returncode == 7, done.stderr
    assert "[0@127.0.0.2] rank 0" in done.stdout
    assert "rank 1 on 127.0.0.3 failed first: exit status 7" in done.stderr
    assert gone(job), of_this_job(job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_when_the_launcher_ends(engine: str, number: int, job: Path) -> None:
    running = subprocess.Popen(
        command(engine, "-np", "2", sys.executable, str(job / "train.py"), "wait"),
        cwd=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert "rank" in running.stdout.readline()
        running.send_signal(number)
        assert running.wait(40) == (130 if number == signal.SIGINT else -9)
        assert gone(job), of_this_job(job)
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_over_a_real_sshd(engine: str, job: Path, sshd: list[str]) -> None:
    script = str(job / "train.py")
    over = (engine, "-H", "127.0.0.2:1,127.0.0.3:1", *sshd, "--start-timeout", "60")
    done = launch(
        job,
        *(*over, "-x", "FOO=it's", sys.executable, script),
        LIGHT_INTRA_SIZE="2",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0@127.0.0.2] rank 0 it's 2",
        "[1@127.0.0.3] rank 1 it's 2",
    ]
    running = subprocess.Popen(
        command(*over, sys.executable, script, "wait"),
        cwd=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert "rank" in running.stdout.readline()
    finally:
        running.kill()  # even so: the broken connection ends the other hosts' part
        running.wait()
    assert gone(job), of_this_job(job)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "4", "-H", "a:1,b:2", "true"], "-np 4 needs 4 slots, but there are 3 (a:1, b:2)"),
        (["-np", "1", "no-such-command"], "'no-such-command'"),
        (["-np", "1", "-x", "NOT_SET_HERE", "true"], "NOT_SET_HERE is not set"),
        (["-np", "1", "--network-interface", "eth77", "true"], "eth77"),
        (["-np", "1", "-H", "a:1", "--hostfile", "f", "true"], "--hostfile"),
        (["true"], "-np"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: list[str], said: str, job: Path
) -> None:
    done = launch(job, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_and_programs_that_are_not_there(job: Path) -> None:
    done = launch(job, "-H", "gpu9.invalid:1", "--rsh", "false", "true")
    assert done.returncode == 1
    assert "host gpu9.invalid cannot be reached by false" in done.stderr
    alone = {"PATH": str(job)}
    assert "openssh-client" in launch(job, "-H", "gpu9.invalid:1", "true", **alone).stderr
    assert "openmpi-bin" in launch(job, "--mpi", "-np", "1", sys.executable, **alone).stderr


def test_dry_run_prints_what_would_run_and_starts_nothing(job: Path) -> None:
    done = launch(job, "-np", "3", "-H", "gpu8.invalid:2,gpu9.invalid:2", "--dry-run", "true")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "# torchrun: over ssh"
    assert "gpu8.invalid" in lines[1]
    assert "--nproc-per-node=1" in lines[2]


def test_variables_for_other_hosts_stand_in_no_command_line(job: Path) -> None:
    """Over a shell that keeps what it was given: the ranks have the variables, `ps` does not."""
    kept = job / "kept"
    (job / "rsh").write_text(f'#!/bin/sh\nshift\necho "$*" >> {kept}\nexec sh -c "$*"\n')
    (job / "train.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "lines = [p.read_bytes() for p in Path('/proc').glob('[0-9]*/cmdline') if p.exists()]\n"
        "shown = any(b'hf_' + b'5ecret' in line for line in lines)\n"
        "print(os.environ['HF_TOKEN'], os.environ['MINE'], shown)\n"
    )
    done = launch(
        job,
        *("-H", "127.0.0.2:1,127.0.0.3:1", "--rsh", str(job / "rsh"), "-x", "MINE"),
        *(sys.executable, str(job / "train.py")),
        HF_TOKEN="hf_5ecret",
        MINE="it's\nmine",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hf_5ecret it's") == 2
    assert done.stdout.count("mine False") == 2
    assert "5ecret" not in kept.read_text()
    assert "mine" not in kept.read_text()
    shown = launch(
        job,
        *("-H", "gpu8.invalid:1,gpu9.invalid:1", "-x", "DB_PASSWORD=5ecret", "--dry-run", "true"),
        HF_TOKEN="hf_5ecret",
    )
    assert shown.returncode == 0, shown.stderr
    assert "HF_TOKEN" in shown.stdout
    assert "5ecret" not in shown.stdout + shown.stderr


def test_variables_larger_than_a_pipe_arrive_or_are_refused(job: Path) -> None:
    options = ("-H", "127.0.0.2:1", "--rsh", str(job / "rsh"), sys.executable)
    script = (str(job / "train.py"),)
    done = launch(job, *options, *script, **{f"HF_{n}": "x" * 100_000 for n in range(3)})
    assert done.returncode == 0, done.stderr
    done = launch(job, *options, *script, **{f"HF_{n}": "x" * 100_000 for n in range(12)})
    if done.returncode:  # a pipe is larger than 1 MiB for the privileged alone
        assert done.returncode == 2
        assert "take 12" in done.stderr
