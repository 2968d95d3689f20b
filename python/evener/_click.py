"""What every verb of the command line shares: lazy groups, one way to print errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from evener.errors import EvenerError

R = TypeVar("R")


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called.

    `evener --help` and tab completion must not wait for torch: `lazy` maps a command's name to
    (`package.module:attribute`, one line of help), and only the command that runs is imported.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.lazy:
                rows.append((name, self.lazy[name][1]))
            elif command := super().get_command(ctx, name):
                rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def run(function: Callable[[], R]) -> R:
    """Run `function`; an EvenerError becomes two lines on stderr and its exit code."""
    try:
        return function()
    except EvenerError as error:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(error.problem, err=True)
        if error.fix:
            click.secho("  fix: ", fg="green", bold=True, nl=False, err=True)
            click.echo(error.fix, err=True)
        sys.exit(error.exit_code)
