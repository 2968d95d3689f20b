"""Hosts, slots and the commands that follow from them: pure, no process is started."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.tools.launch.command import launch
from evener.tools.launch.hosts import Host, is_local, parse_hostfile, parse_hosts, place
from evener.tools.launch.job import (
    _MPIRUN_5_TAG,
    _MPIRUN_TAG,
    Failure,
    Tagged,
    mpirun_failure,
    torchrun_failure,
)
from evener.tools.launch.plan import Wishes, mpirun, open_mpi_major, shell_line, torchrun
from evener.tools.launch.secret import is_secret


def test_hosts() -> None:
    assert parse_hosts("gpu1:2,gpu2:4, gpu3") == [Host("gpu1", 2), Host("gpu2", 4), Host("gpu3", 1)]
    assert parse_hosts("[fe80::1]:2,me@gpu2") == [Host("[fe80::1]", 2), Host("me@gpu2", 1)]


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\ngpu1 slots=2 max_slots=4\n\ngpu2:3  # Horovod's way\ngpu3\n")
    assert parse_hostfile(file) == [Host("gpu1", 2), Host("gpu2", 3), Host("gpu3", 1)]


@pytest.mark.parametrize(
    "text", ["gpu1:0", "gpu1:x", "gpu1:2,gpu1:2", ":2", "gpu 1:2", "-oProxy:1"]
)
def test_bad_hosts_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_hosts(text)
    assert text.partition(",")[0].partition(":")[0] in str(refused.value)


@pytest.mark.parametrize("line", ["gpu1 slots=none", "gpu1 slots=0", "gpu1 cores=2"])
def test_bad_hostfile_lines_are_refused_with_their_number(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"gpu0\n{line}\n")
    with pytest.raises(UsageError, match="line 2"):
        parse_hostfile(file)
    with pytest.raises(UsageError, match=r"none\.txt"):
        parse_hostfile(tmp_path / "none.txt")


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 60))
def test_ranks_fill_the_hosts_in_order(slots: list[int], ranks: int) -> None:
    hosts = [Host(f"h{index}", count) for index, count in enumerate(slots)]
    if ranks > sum(slots):
        with pytest.raises(UsageError, match=f"-np {ranks} needs {ranks} slots"):
            place(hosts, ranks)
        return
    placed = place(hosts, ranks)
    assert sum(host.slots for host in placed) == ranks
    assert [host.name for host in placed] == [host.name for host in hosts][: len(placed)]
    assert all(a.slots == b.slots for a, b in zip(placed[:-1], hosts, strict=False))


def test_this_host_is_known() -> None:
    assert is_local("localhost")
    assert not is_local("name.invalid")
    assert not is_local("127.0.0.2")  # loopback, but on no interface: the tests' other host


WISHES = Wishes(
    command=("python", "train.py", "--name", "a b"), env={"FOO": "x y"}, interface="eth1"
)
HERE = {
    "PATH": "/bin",
    "LIGHT_2D_ALLREDUCE": "1",
    "HOROVOD_RANK": "7",
    "HOME": "/home/me",
    "NCCL_DEBUG": "INFO",
}


def test_torchrun_over_ssh() -> None:
    hosts = [Host("gpu1", 2), Host("gpu2", 1)]
    plan = torchrun(hosts, WISHES, HERE, {"gpu1"}, "over ssh")
    assert plan.rank_hosts == ("gpu1", "gpu1", "gpu2")
    first, second = plan.commands
    assert (first.remote, first.first_rank, first.ranks) == (False, 0, 2)
    assert (second.remote, second.first_rank, second.ranks) == (True, 2, 1)
    for index, command in enumerate(plan.commands):
        assert f"--node-rank={index}" in command.argv
        assert "--master-addr=gpu1" in command.argv
        assert command.argv[-4:] == ("python", "train.py", "--name", "a b")
        assert command.env["NCCL_SOCKET_IFNAME"] == command.env["GLOO_SOCKET_IFNAME"] == "eth1"
    # What is ours alone does not travel; the rank of an outer launcher least of all.
    assert {"PATH", "LIGHT_2D_ALLREDUCE", "NCCL_DEBUG"} <= second.env.keys()
    assert not {"HOME", "HOROVOD_RANK"} & second.env.keys()
    line = shlex.split(shell_line(second, WISHES, "/data/my job"))
    assert line[:2] == ["ssh", "gpu2"]
    assert line[2].startswith("cd '/data/my job' && env PATH=/bin ")
    assert "'FOO=x y'" in line[2] or "FOO='x y'" in line[2]


def test_localhost_is_no_address_for_others() -> None:
    plan = torchrun([Host("localhost", 1), Host("gpu2", 1)], WISHES, HERE, {"localhost"}, "")
    assert not any("--master-addr=localhost" in command.argv for command in plan.commands)


@pytest.mark.parametrize(
    ("major", "expected"),
    [
        (4, ["--mca plm_rsh_agent ssh", "--tag-output", "--mca oob_tcp_if_include eth1"]),
        (5, ["--prtemca plm_ssh_agent ssh", "--output tag", "--prtemca oob_tcp_if_include eth1"]),
    ],
)
def test_mpirun(major: int, expected: list[str]) -> None:
    hosts = [Host("gpu1", 2), Host("gpu2", 2)]
    plan = mpirun(hosts, 4, WISHES, HERE, {"gpu1"}, major, True, "asked for")
    (command,) = plan.commands
    line = " ".join(command.argv)
    for part in [*expected, "--allow-run-as-root -np 4 -H gpu1:2,gpu2:2", "-x LIGHT_2D_ALLREDUCE"]:
        assert part in line
    assert command.argv[command.argv.index("FOO=x y") - 1] == "-x"
    assert "HOROVOD_RANK" not in line


@pytest.mark.parametrize(
    ("text", "major"),
    [("mpirun (Open MPI) 4.1.4\n\nReport bugs", 4), ("mpirun (Open MPI) 5.0.11\n", 5)],
)
def test_open_mpi_versions(text: str, major: int) -> None:
    assert open_mpi_major(text) == major


@pytest.mark.parametrize("option", ["--mpi-args=-v", "--binding-args=", "--master-port=29500"])
def test_options_that_an_elastic_job_has_nothing_for_are_refused(option: str) -> None:
    done = CliRunner().invoke(launch, ["--min-np", "1", "-H", "ha,hb", option, "true"])
    name, _, value = option.partition("=")
    assert isinstance(done.exception, UsageError)
    assert done.exception.problem.startswith(f"{name} {value} and an elastic job")


@pytest.mark.parametrize(
    "text", ["HYDRA build details:\n    Version: 4.1", "mpirun (Open MPI) 3.1.6", ""]
)
def test_another_mpi_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        open_mpi_major(text)


def test_failures_as_the_engines_say_them() -> None:
    said = (
        "prterun detected ...\n   Process name: [prterun-vm-25764@1,1]\n   Exit code:    3\n",
        "  Process name: [[3868,1],1]\n  Exit code:    3\n",
    )
    for text in said:
        assert mpirun_failure(text) == Failure(1, 3)
    killed = (
        "mpirun noticed that process rank 2 with PID 0 on node vm exited on\nsignal 9 (Killed)."
    )
    assert mpirun_failure(killed) == Failure(2, -9)
    assert mpirun_failure("no route to host") is None
    root = (
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 1)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 5 (local_rank: 1)\n"
        "  exitcode  : 3 (pid: 23624)\n"
    )
    assert torchrun_failure(root) == Failure(5, 3)
    assert torchrun_failure("Traceback") is None


def test_lines_that_open_mpi_4_tears_are_put_together() -> None:
    tagged = Tagged(_MPIRUN_TAG)
    assert tagged.feed("[1,0]<stdout>:whole\n") == [(0, "whole")]
    assert tagged.feed("[1,1]<stdout>:to[1,0]<stdout>:other\n") == [(0, "other")]
    assert tagged.feed("[1,1]<stdout>:rn[1,1]<stdout>: apart\n") == [(1, "torn apart")]
    assert tagged.feed("mpirun says\n") == [(None, "mpirun says")]
    tagged.feed("[1,1]<stderr>:never [1,0]<stdout>:x\n")
    assert tagged.rest() == [(1, "never ")]
    assert Tagged(_MPIRUN_5_TAG).feed("[1,12]<stdout>:  two spaces\n") == [(12, " two spaces")]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *[(name, True) for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")],
        *[(name, True) for name in ("PGPASSWORD", "EVENER_RUN", "MYSQL_PWD", "hf_token")],
        *[(name, False) for name in ("TOKENIZERS_PARALLELISM", "PWD", "NCCL_DEBUG", "KEYBOARD")],
        *[(name, False) for name in ("PATH", "SSH_KEY_FILE", "MONKEY_PATCH", "HF_HOME")],
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_secrets_stand_in_no_command_line_and_are_not_shown() -> None:
    secret = "hf_0123456789"
    here = {**HERE, "HF_TOKEN": secret, "WANDB_API_KEY": secret}
    wishes = Wishes(command=("true",), env={"MY_PASSWORD": secret}, forward=("WANDB_API_KEY",))
    hosts = [Host("gpu1", 1), Host("gpu2", 1)]
    (mpi,) = mpirun(hosts, 2, wishes, here, {"gpu1"}, 4, False, "").commands
    assert mpi.env["MY_PASSWORD"] == secret
    for name in ("HF_TOKEN", "MY_PASSWORD", "WANDB_API_KEY"):
        assert mpi.argv[mpi.argv.index(name) - 1] == "-x"
    torch = torchrun(hosts, wishes, here, {"gpu1"}, "").commands
    assert torch[1].env["HF_TOKEN"] == torch[1].env["MY_PASSWORD"] == secret
    for command in (mpi, *torch):
        assert secret not in shlex.join(command.argv)
        line = shell_line(command, wishes, "/data")
        assert secret not in line
        assert "MY_PASSWORD" in line
