"""What the ranks of a job find in their environment: the plug-in of the network, Horovod's package,
Evener under DDP or fully_shard, the watch.

Each is put in by a function of its own, which says on standard error what it has put in.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from evener.base import programs, settings
from evener.door.enter import SITE, require, variables, variables_sharded
from evener.net.plugin import adopt, has_gpus
from evener.tools.launch import guard, horovod_path, placed
from evener.tools.launch.asked import Asked
from evener.tools.launch.job import scratch_name
from evener.tools.launch.plan import Wishes
from evener.tools.launch.where import Where
from evener.tools.why import folder_of


def _say(text: str) -> None:
    click.echo(f"evener launch: {text}", err=True)


class Environment:
    """`here`: this process's, which local ranks have. `wishes`: what the launcher is to do,
    with what is set for all ranks. `notes`: what a map chose."""

    def __init__(self, asked: Asked) -> None:
        """Raises UsageError for a variable that is none."""
        given, forward = asked.variables()
        for line in settings.misspelt(given):
            click.echo(f"warning: -x {line}", err=True)
        self.here = dict(os.environ)
        self.notes: list[str] = []
        self.wishes = Wishes(
            command=asked.command,
            interface=asked.interface,
            start_timeout=asked.start_timeout,
            env=given,
            forward=forward,
            rsh=asked.shell(),
            scratch=scratch_name(),
            mpi_args=tuple(shlex.split(asked.mpi_args or "")),
            binding=None if asked.binding_args is None else tuple(shlex.split(asked.binding_args)),
        )
        self._given = given  # by -x, which stands above all that is put in here
        if said := programs.prefer_own(asked.command, self.here):
            _say(said)

    @property
    def of_ranks(self) -> dict[str, str]:
        """What a local rank finds, but for what is put in here."""
        return {**self.here, **self._given}

    def put_map(self, path: Path, where: Where) -> None:
        """Each host's cards and GPUs, by a map."""
        if where.placement:
            host_env, kept = placed.environments(where.placement, {**os.environ, **self._given})
            self.wishes = replace(self.wishes, host_env=host_env)
            self.notes = [*placed.describe(path, where.placement), *kept]

    def put_network(self, verbose: bool) -> None:
        """NCCL's plug-in, where it is the right one."""
        network = adopt(self.here)
        if verbose or has_gpus():
            _say(network)

    def put_horovod(self, wanted: bool, verbose: bool) -> None:
        """`import horovod`, where it is wanted."""
        if wanted:
            path, note = horovod_path.put_in_place(self.here.get("PYTHONPATH", ""))
            _say(note)
            self.here["PYTHONPATH"] = path
            forward = (*self.wishes.forward, "PYTHONPATH")
            self.wishes = replace(self.wishes, forward=forward, horovod=True)
        elif (note := horovod_path.describe()) and verbose:
            _say(note)

    def put_doors(self, asked: Asked) -> None:
        """Evener under DDP or fully_shard. Raises UsageError for options that lack --ddp."""
        # A variable alone reaches only a Python in which Evener is installed; this way reaches all.
        ddp = asked.ddp or settings.EVENER_DDP.get(self.of_ranks) != "off"
        require(ddp, asked.floor, asked.every, asked.overlap)
        if ddp:
            opened = variables(self.of_ranks, asked.floor or "", asked.every or 0, asked.overlap)
            self._open("--ddp", opened, "every DistributedDataParallel")
        if asked.fsdp:
            opened = variables_sharded(self.of_ranks)
            self._open("--fsdp", opened, "every model that fully_shard shards")

    def put_hub(self, asked: Asked) -> None:
        """Where the hub is, and which of its nodes this is. Asks the hub for a share of the data.

        Raises UsageError where the hub refuses, CommError where it does not answer.
        """
        # With asyncio, which no help or completion needs.
        from evener.comm.hub.client import Place, address, own_name, promise
        from evener.comm.hub.token import Token

        assert asked.join is not None and asked.token_file is not None
        host, port = address(asked.join, "--join")
        name = settings.EVENER_HUB_NODE.get(self.of_ranks) or own_name()
        place = Place(host, port, Token.read(asked.token_file), name, None)
        opened = {
            settings.EVENER_HUB.name: asked.join,
            settings.EVENER_HUB_TOKEN.name: place.token.text,
            settings.EVENER_HUB_NODE.name: name,
        }
        said = ""
        if not asked.dry_run:
            slot, slots = promise(place, asked.start_timeout)
            opened[settings.EVENER_HUB_SLOT.name] = f"{slot}/{slots}"
            said = f", with share {slot} of {slots} of the data"
        _say(f"--join: node {name} of the hub at {asked.join}{said}")
        self.wishes = replace(self.wishes, env={**self.wishes.env, **opened})

    def _open(self, option: str, opened: Mapping[str, str], what: str) -> None:
        opened = dict(opened)
        said = " ".join(f"{name}={opened[name]}" for name in opened if name != "PYTHONPATH")
        _say(f"{option}: {said} under {what}")
        self.here["PYTHONPATH"] = opened["PYTHONPATH"]
        if "PYTHONPATH" not in self._given:  # given by -x, it would hide the environment's
            del opened["PYTHONPATH"]
        self.wishes = replace(
            self.wishes,
            env={**self.wishes.env, **opened},
            forward=(*self.wishes.forward, "PYTHONPATH"),
        )

    def put_log(self, verbose: bool) -> None:
        """Evener's plans in detail, where --verbose asks for them and EVENER_LOG says nothing."""
        if verbose and not settings.EVENER_LOG.is_set(self.of_ranks):
            env = {**self.wishes.env, settings.EVENER_LOG.name: "debug"}
            self.wishes = replace(self.wishes, env=env)

    def put_watch(self) -> str:
        """What makes each rank keep its ring: the rings' folder on each host."""
        folder = folder_of(scratch_name().rpartition("-")[2])
        path = self.wishes.env.get("PYTHONPATH", self.here.get("PYTHONPATH", ""))
        others = [part for part in path.split(os.pathsep) if part and part != str(SITE)]
        path = os.pathsep.join([str(SITE), *others])
        self.here = {**self.here, "PYTHONPATH": path}
        env = {**self.wishes.env, guard.RINGS: folder}
        if "PYTHONPATH" in self.wishes.env:
            env["PYTHONPATH"] = path
        forward = tuple(dict.fromkeys([*self.wishes.forward, "PYTHONPATH"]))
        self.wishes = replace(self.wishes, env=env, forward=forward)
        return folder
