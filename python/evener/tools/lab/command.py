"""`evener lab`: simulated clusters from the command line."""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from evener.base import programs
from evener.base.click import door_options
from evener.door import enter as door
from evener.errors import UsageError
from evener.net.plugin import adopt, has_gpus
from evener.tools.lab import directory, enter, show, wire
from evener.tools.lab.errors import LabError
from evener.tools.lab.faults import Action, Event, Target
from evener.tools.lab.host import Node
from evener.tools.lab.kills import parse_period
from evener.tools.lab.lab import Lab, signal_name
from evener.tools.lab.layout import Layout
from evener.tools.lab.spec import Spec, parse_pairs
from evener.tools.launch import horovod_path

_DEFAULT = Spec()
_PASS_ON = {"allow_interspersed_args": False}  # the first word that is not an option starts COMMAND
_MPI = "install the package openmpi-bin (Debian, Ubuntu) or openmpi (Fedora, Arch)"


@dataclass(frozen=True)
class _Order:
    """The lab that a command line asks for. `given`: whether it says anything about it."""

    spec: Spec
    given: bool
    faults: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    loopback: bool = False
    sshd: bool = False

    @cached_property
    def events(self) -> list[Event]:
        """The faults, checked. Raises UsageError."""
        return [Event.parse(fault, self.spec) for fault in self.faults]

    @contextmanager
    def up(self, command: Sequence[str] = ()) -> Iterator[Lab]:
        """The lab, which SIGTERM and SIGHUP take down as Ctrl-C does.

        Files under /tmp that `command` names are there in the nodes.
        """
        events = self.events
        if command and (said := programs.prefer_own(command, os.environ)):
            _say(said)
        network = adopt(os.environ)  # the nodes inherit it
        named = [word for word in command if len(word) < 4096 and Path(word).exists()]
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            with (
                _logging(),
                Lab(self.spec, keep=[*self.keep, *named], loopback=self.loopback) as built,
            ):
                _say(f"{self.spec} ({built.mode})")
                if has_gpus():
                    _say(network)
                if self.sshd:
                    built.sshd()
                if events:
                    built.schedule(*events)
                yield built
        except KeyboardInterrupt:
            _say("interrupted")
            sys.exit(128 + signal.SIGINT)


def _ordering(*, build: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that say what a lab is made of; the command gets them as `order`.

    `build`: also those that only a lab that is built needs.
    """
    d = _DEFAULT
    options = [
        click.option(
            "--spec",
            "short",
            metavar="SPEC",
            help="All at once: 2x2@25gbit,paths=4; or 2+1@25gbit.",
        ),
        click.option("--nodes", type=int, help=f"Hosts. [{d.nodes}]"),
        click.option("--slots", type=int, help=f"Processes per host. [{d.slots}]"),
        click.option(
            "--link",
            metavar="RATE",
            help=f"A NIC's; 'none': unshaped. [{d.link}]",
        ),
        click.option("--nics", type=int, help=f"NICs per host: eth0, eth1... [{d.nics}]"),
        click.option("--paths", type=int, help=f"That share a NIC's rate. [{d.paths}]"),
        click.option("--flow-cap", metavar="RATE", help="One flow's most. [no cap]"),
        click.option("--queue", metavar="TIME", help=f"Depth of queues. [{d.queue}]"),
        click.option("--delay", metavar="TIME", help="Of a packet, one way. [none]"),
        click.option("--loss", metavar="SHARE", help="Of packets, on each path. [none]"),
        click.option("--mtu", type=int, help=f"Bytes of a packet. [{d.mtu}]"),
        click.option("--congestion", metavar="NAME", help=f"TCP's control. [{d.congestion}]"),
        click.option("--hash-seed", type=int, help=f"Which flow, which path. [{d.hash_seed}]"),
    ]
    if build:
        options += [
            click.option(
                "--fault",
                "faults",
                multiple=True,
                metavar="TIME:WHERE:WHAT",
                help="Like 12s:path1:blackhole. Any number of times.",
            ),
            click.option(
                "--keep",
                multiple=True,
                type=click.Path(exists=True),
                help="A path under /tmp that hosts must see.",
            ),
            click.option("--sshd", is_flag=True, help="A real sshd in each host."),
            click.option(
                "--loopback", is_flag=True, help="Plain loopback where no lab can be built."
            ),
        ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def ordered(*args: Any, short: str | None, **kwargs: Any) -> Any:
            def taken(names: Iterable[str]) -> dict[str, Any]:
                found = {name: kwargs.pop(name) for name in names if name in kwargs}
                return {name: value for name, value in found.items() if value is not None}

            what, how = taken(Spec.__dataclass_fields__), taken(_Order.__dataclass_fields__)
            if short is not None and what:
                option = next(iter(what)).replace("_", "-")
                raise UsageError(
                    f"--spec {short} and --{option} both say what to build",
                    "put all of it into --spec, or leave --spec out",
                )
            if "," in (link := what.get("link", "")):
                what["link"], *pairs = link.split(",")
                more = parse_pairs(pairs, f"--link {link}")
                if twice := more.keys() & what.keys():
                    option = min(twice).replace("_", "-")
                    raise UsageError(
                        f"--{option} and --link {link} both say the same", "give it once"
                    )
                what |= more
            spec = Spec.parse(short) if short is not None else Spec(**what)
            order = _Order(spec, bool(short or what), **how)
            return function(*args, order=order, **kwargs)

        for option in reversed(options):
            option(ordered)
        return ordered

    return decorate


@click.group()
def lab() -> None:
    """Simulated clusters in Linux namespaces: hosts, NICs, rates, paths and faults.

    \b
      evener lab run --nodes 2 --slots 2 --link 25gbit -- python train.py
      evener lab shell node0 --nodes 2 --paths 4
    """


@lab.command(context_settings=_PASS_ON)
@_ordering()
@click.option(
    "--output-dir", type=click.Path(file_okay=False), help="Keep each rank's output there."
)
@click.option("--timeout", type=float, metavar="SECONDS", help="End all of them then, status 124.")
@click.option(
    "--kill",
    metavar="PERIOD",
    help="Kill a host, drawn from the seed, each period; it is back after a third of one.",
)
@click.option("--no-prefix", is_flag=True, help="Lines without [rank@node].")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="For every process.")
@door_options
@click.option("--dry-run", is_flag=True, help="Print what would be built and run.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(
    order: _Order,
    output_dir: str | None,
    timeout: float | None,
    kill: str | None,
    no_prefix: bool,
    env: tuple[str, ...],
    ddp: bool,
    fsdp: bool,
    floor: str | None,
    every: int | str | None,
    overlap: int | None,
    horovod: bool,
    dry_run: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND once a slot, as a launcher would; ends with the first failing status.

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and so on, and its GPU
    where there are enough.
    """
    variables = _variables(env)
    if kill is not None:
        parse_period(kill)
    door.require(ddp, floor, every, overlap)
    if ddp:
        told = {**os.environ, **variables}
        variables.update(door.variables(told, floor or "", every or 0, overlap))
    if fsdp:
        variables.update(door.variables_sharded({**os.environ, **variables}))
    if dry_run:
        click.echo(show.as_text(Layout(order.spec)))
        for event in order.events:
            click.echo(f"  fault     {event}")
        if kill is not None:
            click.echo(f"  kill      a host each {kill}")
        click.echo(f"  command   {shlex.join(command)}  ({order.spec.world_size} times)")
        return
    if horovod:
        _say(horovod_path.put_in_place("")[1])
    with order.up(command) as built:
        result = built.launch(
            command,
            env=variables,
            timeout=timeout,
            kill=kill,
            prefix=not no_prefix,
            output_dir=output_dir,
            horovod=horovod,
        )
    if result.timed_out:
        _say(f"not done after {timeout:g} s")
    elif result.rank is not None:
        _say(f"rank {result.rank} on {result.node} failed first: {signal_name(result.status)}")
    sys.exit(_exit_status(result.status))


@lab.command(context_settings=_PASS_ON)
@_ordering()
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def mpirun(
    order: _Order,
    arguments: tuple[str, ...],
) -> None:
    """Run OpenMPI's own mpirun on node0, with ARGUMENTS as they are.

    \b
      evener lab mpirun --nodes 2 --slots 2 -- -np 4 -H node0:2,node1:2 python train.py

    Where they name no hosts, -H with all of the lab's is added.
    """
    if shutil.which("mpirun") is None:
        raise LabError("mpirun is not installed", _MPI)
    hosts: list[str] = []
    if not {"-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile"} & {*arguments}:
        hosts = ["-H", ",".join(f"node{i}:{size}" for i, size in enumerate(order.spec.sizes))]
    with order.up(arguments) as built:
        if built.mode == "loopback":
            hosts = []
        status = _foreground(built.nodes[0], ["mpirun", *hosts, *arguments])
    sys.exit(_exit_status(status))


def _complete_node(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    names = [f"node{index}" for index in range(ctx.params.get("nodes") or _DEFAULT.nodes)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@lab.command()
@_ordering()
@click.option("--lab", "owner", type=int, metavar="PID", help="Which of several labs that run.")
@click.argument("node", shell_complete=_complete_node)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(
    order: _Order,
    owner: int | None,
    node: str,
    command: tuple[str, ...],
) -> None:
    """A shell (or COMMAND) inside NODE, like node0.

    In the lab that runs, where one does; in a new one where options say what to build, or none
    runs.
    """
    argv = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
    if owner is not None or (not order.given and directory.running()):
        sys.exit(_exit_status(_attach(directory.choose(owner), node, argv)))
    index = _node_index(node, order.spec)
    with order.up(command) as built:
        status = _foreground(built.nodes[index], argv)
    sys.exit(_exit_status(status))


@lab.command()
@_ordering()
def up(order: _Order) -> None:
    """Keep a lab up until Ctrl-C; other terminals use it with `evener lab shell` and `fault`."""
    with order.up() as built:
        click.echo(show.as_text(built.layout))
        click.echo(f"\nup as process {os.getpid()}; Ctrl-C takes it down", err=True)
        threading.Event().wait()


@lab.command()
@click.option("--lab", "owner", type=int, metavar="PID", help="Which of several labs that run.")
@click.argument("target", metavar="WHERE")
@click.argument("action", metavar="WHAT", nargs=-1, required=True)
def fault(owner: int | None, target: str, action: tuple[str, ...]) -> None:
    """Do WHAT to WHERE in the lab that runs, now.

    \b
      evener lab fault path1 blackhole        evener lab fault node0.eth0 rate 1gbit
      evener lab fault path1 heal             evener lab fault path0 loss 1%
    """
    parsed = Action.parse(" ".join(action))
    if parsed.kind == "flap":
        raise UsageError(
            "flap needs a lab that keeps time", "give it to the lab itself: --fault 0s:path1:flap"
        )
    running = directory.choose(owner)
    Target.parse(target, running.spec)
    parsed.require(running.spec)
    running.ask({"do": "fault", "target": target, "action": parsed.to_json()})


@lab.command("list")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_labs(as_json: bool) -> None:
    """Your labs that run on this machine."""
    labs = directory.running()
    if as_json:
        rows = [{"pid": lab.owner, "spec": str(lab.spec), "mode": lab.mode} for lab in labs]
        click.echo(json.dumps(rows, indent=2))
    elif not labs:
        click.echo("no lab runs")
    for running in [] if as_json else labs:
        click.echo(f"{running.owner}  {running.spec}  ({running.mode})")


@lab.command("show")
@_ordering(build=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def show_lab(order: _Order, as_json: bool) -> None:
    """What would be built: nodes, addresses, paths, rates, queues."""
    layout = Layout(order.spec)
    click.echo(json.dumps(show.as_json(layout), indent=2) if as_json else show.as_text(layout))


@contextmanager
def _logging() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lab: %(message)s"))
    logger = logging.getLogger("evener.lab")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _foreground(node: Node, argv: Sequence[str]) -> int:
    """Run `argv` on the terminal, which sends Ctrl-C to it too: how to take it, is its choice."""
    # A handler, not SIG_IGN: programs inherit what is ignored.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    process = node.popen(argv)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _attach(running: directory.Running, name: str, argv: list[str]) -> int:
    index = _node_index(name, running.spec)
    _, fds = running.ask({"do": "about"})
    _say(f"{name} of lab {running.owner}: {running.spec}")
    each = 5
    nodes = len(fds) - each * running.spec.nodes
    inside = [*fds[:nodes], *fds[nodes + index * each :][:each]]
    for fd in inside:
        os.set_inheritable(fd, True)
    wire.close([fd for fd in fds if fd not in inside])
    command = enter.command(inside, str(Path.cwd()), argv)
    os.execve(command[0], command, {**running.inherited, **running.variables[index]})


def _node_index(name: str, spec: Spec) -> int:
    names = [f"node{index}" for index in range(spec.nodes)]
    if name not in names:
        raise UsageError(f"this lab has no host {name!r}", f"it has {', '.join(names)}")
    return names.index(name)


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(
                f"--env {pair!r} is not NAME=VALUE", "write it as --env NCCL_DEBUG=INFO"
            )
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}


def _exit_status(status: int) -> int:
    """As a shell shows it: 128 and the signal's number."""
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    click.echo(f"lab: {text}", err=True)
