"""`horovodrun`: what upstream's options become. Jobs that it starts are in test_elastic.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evener.errors import UsageError
from evener.horovod.runner.launch import _shown, arguments_for_launch, check_build, horovodrun


def translated(*arguments: str, env: dict[str, str] | None = None) -> tuple[list[str], list[str]]:
    given: dict[str, Any] = horovodrun.make_context("horovodrun", list(arguments)).params
    return arguments_for_launch(given, env or {})


def variables(arguments: list[str]) -> dict[str, str]:
    places = [place for place, word in enumerate(arguments) if word == "-x"]
    return dict(arguments[place + 1].partition("=")[::2] for place in places)


def test_hosts_and_ssh() -> None:
    arguments, notes = translated(
        *("-np", "4", "-H", "a:2,b:2", "-p", "2222", "-i", "key", "--network-interfaces", "e0,e1"),
        *("--output-filename", "out", "--start-timeout", "90", "--disable-cache", "--gloo"),
        *("python", "train.py", "-np", "7", "--verbose"),
    )
    assert notes == []
    assert arguments == [
        *("--horovod", "-np", "4", "-H", "a:2,b:2", "-p", "2222", "-i", "key"),
        *("--output-dir", "out", "--start-timeout", "90.0", "--network-interface", "e0,e1"),
        *("--torchrun", "python", "train.py", "-np", "7", "--verbose"),
    ]


def test_elastic() -> None:
    arguments, _ = translated(
        *("-np", "4", "--min-np", "2", "--max-num-proc", "8", "--host-discovery-script", "d.sh"),
        *("--slots-per-host", "2", "--elastic-timeout", "60", "--reset-limit", "3", "--gloo"),
        *("--blacklist-cooldown-range", "10", "100", "train"),
    )
    assert arguments == [
        *("--horovod", "-np", "4", "--host-discovery-script", "d.sh", "--min-np", "2"),
        *("--max-np", "8", "--slots-per-host", "2", "--elastic-timeout", "60.0"),
        *("--reset-limit", "3", "--blacklist-cooldown-range", "10.0", "100.0", "train"),
    ]


def test_tuning_becomes_variables() -> None:
    arguments, notes = translated(
        *("-np", "2", "--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5"),
        *("--cache-capacity", "7", "--torus-allreduce", "--timeline-filename", "t.json"),
        *("--timeline-mark-cycles", "--no-stall-check", "--stall-check-warning-time-seconds", "9"),
        *("--stall-check-shutdown-time-seconds", "99", "--gloo-timeout-seconds", "33", "--tcp"),
        *("--log-level", "TRACE", "--mpi-threads-disable", "--log-without-timestamp", "train"),
    )
    assert notes == []
    assert variables(arguments) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "7",
        "LIGHT_2D_ALLREDUCE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "99",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "EVENER_TIMEOUT": "33",
        "EVENER_LOG": "debug",
        "NCCL_IB_DISABLE": "1",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--autotune-warmup-samples", "3"], "has no effect: autotuning is the planner's"),
        (["--hierarchical-allgather"], "--hierarchical-allgather has no effect"),
        (["--num-nccl-streams", "2"], "--num-nccl-streams has no effect"),
        (["--thread-affinity", "1"], "--thread-affinity has no effect"),
        (["--log-with-timestamp"], "--log-with-timestamp has no effect"),
        (["--timeline-mark-cycles"], "without --timeline-filename"),
    ],
)
def test_what_has_no_effect_is_said(options: list[str], says: str) -> None:
    _, notes = translated("-np", "2", *options, "train")
    assert len(notes) == 1 and says in notes[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--jsrun", "train"], "jsrun"),
        (["--gloo", "--mpi", "train"], "both given"),
        (["--mpi-args=--oversubscribe", "train"], "is for mpirun"),
        (["--gloo", "--binding-args=--bind-to core", "train"], "is for mpirun"),
        ([], "no command"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        translated("-np", "2", *options)


def test_arguments_for_mpirun() -> None:
    arguments, _ = translated(
        "-np", "2", "--mpi", "--mpi-args=--oversubscribe", "--binding-args=--bind-to core", "train"
    )
    assert arguments[3:] == [
        *("--mpi", "--mpi-args=--oversubscribe", "--binding-args=--bind-to core", "train")
    ]


def test_the_environment_goes_along_but_for_a_hosts_own_and_secrets() -> None:
    env = {"DATA": "/d", "HOME": "/h", "SSH_AUTH_SOCK": "s", "HOROVOD_RANK": "0", "API_TOKEN": "t"}
    arguments, _ = translated("-np", "2", "train", env=env)
    assert list(variables(arguments)) == ["DATA"]


# --- configuration files -------------------------------------------------------------------------

CONFIG = """
controller: mpi
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, hierarchical_allreduce: true}
autotune: {enabled: true, warmup_samples: 5}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {gloo_timeout_seconds: 60}
logging: {level: INFO, hide_timestamp: true}
"""


def config(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(text)
    return str(folder / "config.yaml")


def test_a_configuration_file(tmp_path: Path) -> None:
    path = config(tmp_path, CONFIG)
    arguments, notes = translated("-np", "2", "--config-file", path, "train")
    assert "--mpi" in arguments
    assert len(notes) == 1 and "autotun" in notes[0]
    assert variables(arguments) == {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "10.0",
        "LIGHT_2D_ALLREDUCE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "EVENER_TIMEOUT": "60",
        "EVENER_LOG": "info",
    }


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, CONFIG)
    arguments, _ = translated(
        *("-np", "2", "--gloo", "--fusion-threshold-mb", "1", "--no-hierarchical-allreduce"),
        *("--stall-check", "--config-file", path, "--log-level", "ERROR", "train"),
    )
    found = variables(arguments)
    assert "--mpi" not in arguments
    assert found["HOROVOD_FUSION_THRESHOLD"] == str(1 << 20)
    assert found["LIGHT_2D_ALLREDUCE"] == "0"
    assert found["HOROVOD_STALL_CHECK_DISABLE"] == "0"
    assert found["EVENER_LOG"] == "error"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("params: {fusion_mb: 3}", "params.fusion_mb is not known"),
        ("parameters: {x: 3}", "parameters.x is not known"),
        ("params: {cycle_time_ms: -1}", "params.cycle_time_ms"),
        ("params: {hierarchical_allreduce: 3}", "not true or false"),
        ("params: 3", "no mapping"),
        ("controller: sun", "'sun' is not known"),
        ("logging: {level: LOUD}", "'LOUD'"),
        ("params: {", "cannot be read"),
    ],
)
def test_a_configuration_file_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        translated("-np", "2", "--config-file", config(tmp_path, text), "train")


def test_check_build() -> None:
    done = CliRunner().invoke(horovodrun, ["--check-build"])
    assert done.exit_code == 0
    assert "[X] PyTorch" in done.output and "[ ] MXNet" in done.output
    assert "[X] Gloo" in check_build()


def test_version() -> None:
    assert "0.28.1" in CliRunner().invoke(horovodrun, ["-v"]).output


def test_verbose_counts_what_is_passed_on() -> None:
    env = {"PATH": "/bin", "WANTED": "1", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}
    words = ("-np", "2", "--cycle-time-ms", "2", "sh", "-c", "a -x b")
    arguments, _ = translated(*words, env=env)
    assert variables(arguments) == {"PATH": "", "WANTED": "", "HOROVOD_CYCLE_TIME": "2.0"}
    assert _shown(arguments, 3) == (
        "--horovod -np 2 -x HOROVOD_CYCLE_TIME=2.0 [-x of 2 variables of this environment] "
        "sh -c 'a -x b'"
    )
