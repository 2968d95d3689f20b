"""`horovodrun`, with upstream's options, on top of `evener launch`.

An option becomes an option of `evener launch`, a variable of the job, or a line that says why it
has no effect here; none is dropped in silence, and what would change results is refused. A
configuration file has upstream's sections; an option that is given on the command line wins over
it. `--verbose` prints the `evener launch` command that is run.

The names, meanings and variables are those of upstream's horovod/runner/launch.py and
horovod/runner/common/util/config_parser.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import yaml

from evener.base import click as _click
from evener.errors import UsageError
from evener.horovod import __version__
from evener.horovod.common.util import (
    ccl_built,
    ddl_built,
    extension_available,
    gloo_built,
    mpi_built,
    nccl_built,
)
from evener.horovod.runner.function import FAILED, RunError, call, run
from evener.tools.launch.command import launch


@dataclass(frozen=True)
class Knob:
    """An option that sets a variable of the job.

    config: its section and key in a configuration file. variable: "" where it has no effect, and
    `note` says why. factor: the option's unit in the variable's.
    """

    option: str
    kind: Any
    config: str
    variable: str = ""
    factor: int = 1
    note: str = ""

    @property
    def name(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


_PLANNER = (
    "autotuning is the planner's, which measures a few steps; EVENER_LOG=info shows its choice"
)
KNOBS = (
    Knob(
        "--fusion-threshold-mb",
        click.IntRange(0),
        "params.fusion_threshold_mb",
        "HOROVOD_FUSION_THRESHOLD",
        1 << 20,
    ),
    Knob("--cycle-time-ms", click.FloatRange(0), "params.cycle_time_ms", "HOROVOD_CYCLE_TIME"),
    Knob("--cache-capacity", click.IntRange(0), "params.cache_capacity", "HOROVOD_CACHE_CAPACITY"),
    Knob("--hierarchical-allreduce", bool, "params.hierarchical_allreduce", "LIGHT_2D_ALLREDUCE"),
    Knob("--torus-allreduce", bool, "params.torus_allreduce", "LIGHT_2D_ALLREDUCE"),
    Knob(
        "--hierarchical-allgather",
        bool,
        "params.hierarchical_allgather",
        note="all-gathers go in one level; the result is the same",
    ),
    Knob("--autotune", bool, "autotune.enabled", "HOROVOD_AUTOTUNE"),
    Knob("--autotune-log-file", str, "autotune.log_file", note=_PLANNER),
    Knob("--autotune-warmup-samples", click.IntRange(0), "autotune.warmup_samples", note=_PLANNER),
    Knob(
        "--autotune-steps-per-sample", click.IntRange(0), "autotune.steps_per_sample", note=_PLANNER
    ),
    Knob(
        "--autotune-bayes-opt-max-samples",
        click.IntRange(0),
        "autotune.bayes_opt_max_samples",
        note=_PLANNER,
    ),
    Knob(
        "--autotune-gaussian-process-noise",
        click.FloatRange(0, 1),
        "autotune.gaussian_process_noise",
        note=_PLANNER,
    ),
    Knob("--timeline-filename", str, "timeline.filename", "HOROVOD_TIMELINE"),
    Knob("--timeline-mark-cycles", bool, "timeline.mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES"),
    Knob("--no-stall-check", bool, "", "HOROVOD_STALL_CHECK_DISABLE"),
    Knob(
        "--stall-check-warning-time-seconds",
        click.IntRange(0),
        "stall_check.warning_time_seconds",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
    ),
    Knob(
        "--stall-check-shutdown-time-seconds",
        click.IntRange(0),
        "stall_check.shutdown_time_seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    ),
    Knob(
        "--mpi-threads-disable",
        bool,
        "library_options.mpi_threads_disable",
        "HOROVOD_MPI_THREADS_DISABLE",
    ),
    Knob(
        "--num-nccl-streams",
        click.IntRange(0),
        "library_options.num_nccl_streams",
        note="each stage of a reduction has a stream of its own already",
    ),
    Knob(
        "--thread-affinity",
        click.IntRange(0),
        "library_options.thread_affinity",
        note="Evener does not pin its threads",
    ),
    Knob(
        "--gloo-timeout-seconds",
        click.IntRange(1),
        "library_options.gloo_timeout_seconds",
        "EVENER_TIMEOUT",
    ),
    Knob(
        "--log-with-timestamp",
        bool,
        "logging.with_timestamp",
        note="log lines have no time; --prefix-output-with-timestamp puts it before every line",
    ),
)
# What the negation of a flag is called, where it is not --no-FLAG.
_NEGATION = {"--no-stall-check": "--stall-check", "--log-with-timestamp": "--log-without-timestamp"}
_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "FATAL": "error",
}
# Variables that belong to a host or a terminal, or that nobody else should see. All others are
# passed on, as upstream does (horovod/runner/common/util/env.py), PATH included; which GPUs there
# are is a host's own matter.
STAYS = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|TERM.*|DISPLAY|LS_COLORS"
    r"|.*CUDA_VISIBLE_DEVICES|SSH_.*|XDG_.*|DBUS_.*|TMPDIR|.*SECRET.*|.*TOKEN.*|.*PASSWORD.*"
    r"|HOROVOD_(LOCAL_|CROSS_)?RANK|HOROVOD_(LOCAL_|CROSS_)?SIZE|HOROVOD_HOSTNAME|RANK|WORLD_SIZE|MASTER_.*|EVENER_ELASTIC.*"
)


def _knob_options(command: Any) -> Any:
    for knob in reversed(KNOBS):
        text = f"{knob.variable}." if knob.variable else f"No effect: {knob.note}."
        name = knob.option
        if knob.kind is bool:
            negation = _NEGATION.get(name, f"--no-{name.removeprefix('--')}")
            command = click.option(f"{name}/{negation}", knob.name, default=None, help=text)(
                command
            )
        else:
            command = click.option(name, knob.name, type=knob.kind, help=text)(command)
    return command


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.version_option(__version__, "-v", "--version", prog_name="horovodrun")
@click.option("-np", "--num-proc", type=click.IntRange(1), help="Ranks in all.")
@click.option("-cb", "--check-build", is_flag=True, help="Show what is there, and end.")
@click.option("-H", "--hosts", help="HOST:SLOTS,...")
@click.option("-hostfile", "--hostfile", help="One line per host: `HOST slots=N`.")
@click.option("--host-discovery-script", help="Elastic: prints the hosts that there are now.")
@click.option("--min-np", "--min-num-proc", "min_np", type=click.IntRange(1), help="Elastic.")
@click.option("--max-np", "--max-num-proc", "max_np", type=click.IntRange(1), help="Elastic.")
@click.option("--slots-per-host", type=click.IntRange(1), help="Elastic.")
@click.option("--elastic-timeout", type=click.FloatRange(0, min_open=True), help="Elastic: s.")
@click.option("--reset-limit", type=click.IntRange(0), help="Elastic.")
@click.option("--blacklist-cooldown-range", type=float, nargs=2, help="Elastic: two times in s.")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535))
@click.option("-i", "--ssh-identity-file")
@click.option("--rsh", help="Evener's own: reaches a host instead of ssh.")
@click.option("--network-interfaces", "--network-interface", "nics", multiple=True)
@click.option("--start-timeout", type=click.FloatRange(1), help="Default: HOROVOD_START_TIMEOUT.")
@click.option("--output-filename", help="Also write rank.N/stdout and rank.N/stderr there.")
@click.option("-prefix-timestamp", "--prefix-output-with-timestamp", "timestamps", is_flag=True)
@click.option("--log-level", type=click.Choice(list(_LEVELS), case_sensitive=False))
@click.option("--log-hide-timestamp/--no-log-hide-timestamp", default=None, hidden=True)
@click.option("--disable-cache", is_flag=True, help="As always: hosts are checked at every start.")
@click.option("--config-file", type=click.Path(path_type=Path, dir_okay=False), help="YAML.")
@click.option("--gloo", is_flag=True, help="torchrun starts the ranks (the default).")
@click.option("--mpi", is_flag=True, help="mpirun starts the ranks.")
@click.option("--jsrun", is_flag=True, help="Not supported.")
@click.option("--mpi-args", help="More arguments for mpirun.")
@click.option("--binding-args", help="mpirun's arguments for binding. Default: none is bound.")
@click.option("--tcp", is_flag=True, help="NCCL_IB_DISABLE=1.")
@click.option("--verbose", is_flag=True, help="Show the commands.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@_knob_options
def horovodrun(**given: Any) -> None:
    """Start COMMAND as a Horovod job, with upstream's options.

    \b
        horovodrun -np 4 python train.py
        horovodrun -np 4 -H gpu1:2,gpu2:2 python train.py
        horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python train.py
    """
    if given["check_build"]:
        click.echo(check_build())
        return
    arguments, notes = arguments_for_launch(given, os.environ)
    for note in notes:
        click.echo(f"horovodrun: {note}", err=True)
    if given["verbose"]:
        shown = _shown(arguments, len(given["command"]))
        click.echo(f"horovodrun: evener launch {shown}", err=True)
    launch.main(["--no-config", *arguments], prog_name="evener launch", standalone_mode=False)


def _shown(arguments: list[str], command: int) -> str:
    """The command line, in which the variables that are passed on are counted, not named.

    command: how many of the last arguments are the job's own.
    """
    options = arguments[: len(arguments) - command]
    kept: list[str] = []
    names = 0
    rest = iter(options)
    for word in rest:
        if word != "-x":
            kept.append(shlex.quote(word))
            continue
        value = next(rest)
        if "=" in value:
            kept += ["-x", shlex.quote(value)]
        else:
            names += 1
    if names:
        kept.append(f"[-x of {names} variables of this environment]")
    return " ".join([*kept, *map(shlex.quote, arguments[len(options) :])])


def arguments_for_launch(
    given: dict[str, Any], env: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """(`evener launch`'s arguments, lines to say) from horovodrun's options.

    Raises UsageError for what cannot be honoured.
    """
    if not given["command"]:
        raise UsageError("there is no command", "write horovodrun -np 4 python train.py")
    if given["jsrun"]:
        raise UsageError("--jsrun: Evener does not drive jsrun", "use --gloo or --mpi")
    if given["gloo"] and given["mpi"]:
        raise UsageError("--gloo and --mpi were both given", "give one")
    if given["config_file"] is not None:
        given = with_config(given, given["config_file"])
    variables, notes = _variables(given)
    arguments = ["--horovod"]
    names = {
        "num_proc": "-np",
        "hosts": "-H",
        "hostfile": "--hostfile",
        "host_discovery_script": "--host-discovery-script",
        "min_np": "--min-np",
        "max_np": "--max-np",
        "slots_per_host": "--slots-per-host",
        "elastic_timeout": "--elastic-timeout",
        "reset_limit": "--reset-limit",
        "ssh_port": "-p",
        "ssh_identity_file": "-i",
        "rsh": "--rsh",
        "output_filename": "--output-dir",
    }
    for name, option in names.items():
        if given[name] is not None:
            arguments += [option, str(given[name])]
    if given["blacklist_cooldown_range"]:
        arguments += ["--blacklist-cooldown-range", *map(str, given["blacklist_cooldown_range"])]
    timeout = given["start_timeout"] or env.get("HOROVOD_START_TIMEOUT")
    if timeout is not None:
        arguments += ["--start-timeout", str(timeout)]
    if given["nics"]:
        nics = [nic for text in given["nics"] for nic in text.split(",")]
        arguments += ["--network-interface", ",".join(dict.fromkeys(nics))]
    if given["mpi"]:
        arguments.append("--mpi")
        for name in ("mpi_args", "binding_args"):
            if given[name] is not None:
                arguments.append(f"--{name.replace('_', '-')}={given[name]}")
    else:
        for name in ("mpi_args", "binding_args"):
            if given[name] is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for mpirun, which does not start this job",
                    "add --mpi, or leave it out",
                )
        elastic = ("host_discovery_script", "min_np", "max_np")
        if given["gloo"] and all(given[name] is None for name in elastic):
            arguments.append("--torchrun")
    arguments += ["--timestamps"] * bool(given["timestamps"]) + ["-v"] * bool(given["verbose"])
    for name in sorted(env):
        if name not in variables and not STAYS.fullmatch(name) and name.replace("_", "a").isalnum():
            arguments += ["-x", name]
    for name, value in variables.items():
        arguments += ["-x", f"{name}={value}"]
    return [*arguments, *given["command"]], notes


# What upstream calls an option, where this command calls it otherwise.
_THEIRS = {
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "slots_per_host": "slots",
    "blacklist_cooldown_range": "cooldown_range",
    "gloo": "use_gloo",
    "mpi": "use_mpi",
    "jsrun": "use_jsrun",
    "tcp": "tcp_flag",
    "timestamps": "prefix_output_with_timestamp",
}


def parse_args(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """horovodrun's options as upstream's attributes, from sys.argv by default.

    Raises ValueError for an option that is not known, or a value that cannot be.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        context = horovodrun.make_context("horovodrun", words)
        given = context.params
        if given["config_file"] is not None:
            given = with_config(given, given["config_file"])
    except (click.ClickException, UsageError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise ValueError(text) from error
    found = SimpleNamespace(**{_THEIRS.get(name, name): value for name, value in given.items()})
    found.cooldown_range = list(found.cooldown_range) if found.cooldown_range else None
    found.command, found.nics = list(found.command), set(found.nics) or None
    found.run_func = found.executable = None
    return found


def run_controller(
    use_gloo: bool,
    gloo_run: Callable[[], Any],
    use_mpi: bool,
    mpi_run: Callable[[], Any],
    use_jsrun: bool,
    js_run: Callable[[], Any],
    verbosity: int,
) -> None:
    """Call the one of three launchers that was asked for; gloo_run where none was.

    Raises ValueError where jsrun was asked for and is not installed, or MPI and is not there.
    """
    del verbosity
    if use_gloo:
        gloo_run()
    elif use_mpi:
        mpi_run()
    elif use_jsrun:
        if shutil.which("jsrun") is None:
            raise ValueError("jsrun was asked for, and is not installed")
        js_run()
    else:
        gloo_run()


def _run(args: Any) -> Any:
    """Start the job that `args` describe, as `parse_args` or `horovod.runner._HorovodArgs` has it.

    Returns when it has ended; with `run_func`, what that returned by rank. Raises a RuntimeError
    where it failed.
    """
    given = {
        parameter.name: getattr(args, _THEIRS.get(str(parameter.name), str(parameter.name)), None)
        for parameter in horovodrun.params
    }
    given["nics"] = given["nics"] or ()
    if args.run_func is not None:
        return run(
            args.run_func,
            num_proc=args.num_proc,
            min_num_proc=args.min_num_proc,
            max_num_proc=args.max_num_proc,
            hosts=args.hosts,
            hostfile=args.hostfile,
            host_discovery_script=args.host_discovery_script,
            ssh_port=args.ssh_port,
            ssh_identity_file=args.ssh_identity_file,
            output_filename=args.output_filename,
            verbose=args.verbose,
            use_gloo=args.use_gloo,
            use_mpi=args.use_mpi,
            executable=args.executable,
        )
    arguments, notes = arguments_for_launch(given, os.environ)
    for note in notes:
        click.echo(f"horovodrun: {note}", err=True)
    start_job(arguments, os.environ)
    return None


def start_job(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """`evener launch ARGUMENTS` in a process of its own, as a thread of a program may ask for.

    Raises RunError where the job failed.
    """
    status = call([sys.executable, "-m", "evener", "launch", "--no-config", *arguments], env)
    if status != 0:
        raise RunError(f"{FAILED}: the job ended with status {status}", "see its output above")


def _variables(given: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    variables: dict[str, str] = {}
    notes: list[str] = []
    for knob in KNOBS:
        value = given[knob.name]
        if value is None:
            continue
        if not knob.variable:
            if value is not False:
                notes.append(f"{knob.option} has no effect: {knob.note}")
        elif isinstance(value, bool):
            if value or knob.variable not in variables:
                variables[knob.variable] = str(int(value))
        else:
            variables[knob.variable] = f"{value * knob.factor if knob.factor > 1 else value}"
    mark = variables.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1"
    if mark and "HOROVOD_TIMELINE" not in variables:
        notes.append("--timeline-mark-cycles has no effect without --timeline-filename")
    if given["log_level"]:
        variables["EVENER_LOG"] = _LEVELS[given["log_level"].upper()]
    if given["log_hide_timestamp"] is False:
        notes.append("--no-log-hide-timestamp has no effect: log lines have no time")
    if given["tcp"]:
        variables["NCCL_IB_DISABLE"] = "1"
    return variables, notes


def with_config(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """`given`, with the values of a configuration file where no option was given.

    Raises UsageError for a file that cannot be read, a section or key that is not known, and a
    value of a wrong type.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "give a YAML file") from error
    known = {knob.config: knob for knob in KNOBS if knob.config}
    given = dict(given)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no mapping of sections", "see docs/reference/horovod.md")
    for section, entries in content.items():
        if section == "controller":
            _controller(given, str(entries), path)
            continue
        if not isinstance(entries, dict):
            raise UsageError(
                f"{path}: section {section!r} is no mapping", "see docs/reference/horovod.md"
            )
        for key, value in entries.items():
            place = f"{section}.{key}"
            if place == "stall_check.enabled":
                if given["no_stall_check"] is None:
                    given["no_stall_check"] = not value
            elif place == "logging.level":
                if str(value).upper() not in _LEVELS:
                    raise UsageError(f"{path}: logging.level {value!r}", f"one of {list(_LEVELS)}")
                given["log_level"] = given["log_level"] or str(value)
            elif place == "logging.hide_timestamp":
                if given["log_with_timestamp"] is None:
                    given["log_with_timestamp"] = not value
            elif place in known:
                knob = known[place]
                if given[knob.name] is None and value is not None:
                    given[knob.name] = _checked(knob, value, f"{path}: {place}")
            else:
                names = sorted(name for name in known if name.startswith(f"{section}."))
                raise UsageError(
                    f"{path}: {place} is not known",
                    f"one of {', '.join(names)}" if names else "see docs/reference/horovod.md",
                )
    return given


def _controller(given: dict[str, Any], name: str, path: Path) -> None:
    if name.lower() not in ("gloo", "mpi"):
        raise UsageError(f"{path}: controller {name!r} is not known", "write gloo or mpi")
    if not given["gloo"] and not given["mpi"]:
        given[name.lower()] = True


def _checked(knob: Knob, value: Any, where: str) -> Any:
    if knob.kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} is not true or false", "write true or false")
        return value
    if knob.kind is str:
        return str(value)
    try:
        return knob.kind.convert(value, None, None)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message}", "see `horovodrun --help`") from error


def check_build() -> str:
    """What is there, in upstream's form: `[X] PyTorch`."""
    import torch.distributed as dist

    def box(there: bool, name: str) -> str:
        return f"    [{'X' if there else ' '}] {name}"

    return "\n".join(
        [
            f"Horovod v{__version__}:",
            "",
            "Available Frameworks:",
            box(extension_available("tensorflow"), "TensorFlow"),
            box(True, "PyTorch"),
            box(False, "MXNet"),
            "",
            "Available Controllers:",
            box(False, "MPI"),
            box(True, "Gloo"),
            "",
            "Available Tensor Operations:",
            box(dist.is_nccl_available(), "NCCL"),
            box(False, "DDL"),
            box(False, "CCL"),
            box(False, "MPI"),
            box(True, "Gloo"),
        ]
    )


def run_commandline() -> None:
    """Entry point of the `horovodrun` command."""

    sys.exit(_click.run(lambda: horovodrun.main(prog_name="horovodrun", standalone_mode=False)))


__all__ = [
    "KNOBS",
    "STAYS",
    "Knob",
    "arguments_for_launch",
    "ccl_built",
    "check_build",
    "ddl_built",
    "gloo_built",
    "horovodrun",
    "mpi_built",
    "nccl_built",
    "parse_args",
    "run_commandline",
    "run_controller",
    "with_config",
]
