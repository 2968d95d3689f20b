"""`Node`: one host of a lab, in which programs are started by way of `enter`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.errors import UsageError
from evener.tools.lab import enter, environment
from evener.tools.lab.errors import LabError
from evener.tools.lab.layout import NodeLayout

Argument = str | os.PathLike[str]


class Node:
    """One host of a lab. Made by `Lab`."""

    def __init__(
        self, layout: NodeLayout, fds: Sequence[int] | None, variables: Mapping[str, str]
    ) -> None:
        self.index = layout.index
        self.name = layout.name
        self.addresses = layout.addresses if fds is not None else ("127.0.0.1",)
        self.variables = dict(variables)
        self._fds = fds

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.addresses[0]}>"

    def environment(self) -> dict[str, str]:
        """What a process finds in its environment here."""
        return environment.merged(environment.inherited(), self.variables)

    def popen(
        self,
        argv: Sequence[Argument],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Argument | None = None,
        **popen_kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Start `argv` inside the node; `subprocess.Popen`'s other arguments work as there.

        `env` is laid over what a process of this node has (`variables`, and this process's own
        environment without its rank variables); a value of None takes a variable out. `cwd`:
        default this process's. `/tmp` and `/dev/shm` are the node's own; see `Lab`'s `keep`.
        Signals sent to the process reach the program; its end is the program's end.
        """
        command = [os.fspath(argument) for argument in argv]
        if not command:
            raise UsageError("there is no program to run", "give one, like [sys.executable, ...]")
        full = environment.merged(self.environment(), env)
        directory = str(Path(cwd).absolute() if cwd is not None else Path.cwd())
        if self._fds is None:
            return subprocess.Popen(command, env=full, cwd=directory, **popen_kwargs)
        if not self._fds:
            raise LabError(f"{self.name}'s lab is closed", "use it inside its `with` block")
        popen_kwargs["pass_fds"] = (*popen_kwargs.get("pass_fds", ()), *self._fds)
        inside = enter.command(self._fds, directory, command)
        return subprocess.Popen(inside, env=full, **popen_kwargs)

    def run(
        self,
        argv: Sequence[Argument],
        *,
        timeout: float | None = None,
        check: bool = False,
        input: str | None = None,
        **popen_kwargs: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run `argv` inside the node to its end, as `subprocess.run` does.

        Output is captured as text unless `stdout`, `stderr` or `text` say otherwise. Raises
        subprocess.TimeoutExpired after `timeout` seconds, and CalledProcessError with `check`.
        """
        for stream in ("stdout", "stderr"):
            popen_kwargs.setdefault(stream, subprocess.PIPE)
        popen_kwargs.setdefault("text", True)
        popen_kwargs.setdefault("stdin", subprocess.DEVNULL if input is None else subprocess.PIPE)
        with self.popen(argv, **popen_kwargs) as process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check:
            done.check_returncode()
        return done
