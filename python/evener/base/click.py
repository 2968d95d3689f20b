"""What every verb of the command line shares: lazy groups, one way to print errors."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from evener.errors import EvenerError, UsageError

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class StepsOrAuto(click.ParamType):
    """A number of steps, 1 or more, or "auto"."""

    name = "steps"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "auto":
            return "auto"
        return int(click.IntRange(1).convert(value, param, ctx))


_DOORS = (
    click.option(
        "--horovod",
        is_flag=True,
        help="`import horovod` gives Evener's, even if none is installed.",
    ),
    click.option(
        "--ddp", is_flag=True, help="Evener under every DistributedDataParallel, without a line."
    ),
    click.option("--fsdp", is_flag=True, help="Evener under every fully_shard, without a line."),
    click.option("--floor", metavar="FORM", help="With --ddp: may send less, down to this form."),
    click.option(
        "--every",
        type=StepsOrAuto(),
        metavar="N|auto",
        help="With --ddp: ranks take N steps by themselves, then average their weights' changes.",
    ),
    click.option(
        "--overlap",
        type=click.IntRange(0),
        metavar="STEPS",
        help="With --every: an exchange runs behind this many of the next steps.",
    ),
)


def door_options(command: F) -> F:
    """Options of what starts ranks: Evener comes into their script without a line in it."""
    for option in reversed(_DOORS):
        command = option(command)
    return command


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
            raise TypeError(f"{module}:{attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a fix for a verb that is not there. Raises UsageError."""
        name = args[0]
        # An option that is not there is click's to refuse.
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(name, known, 1, 0.6)
        path = ctx.command_path
        if name == "version":
            raise UsageError(f"{path} has no command 'version'", "write `evener --version`")
        if name == "help":
            words = [*path.split(), *(word for word in args[1:2] if word in known)]
            raise UsageError(f"{path} has no command 'help'", f"write `{' '.join(words)} --help`")
        raise UsageError(
            f"{path} has no command {name!r}",
            f"did you mean `{shlex.join([*path.split(), near[0], *args[1:]])}`?"
            if near
            else f"one of {', '.join(known)}",
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does, without the import of every command for its line of help."""
        before = self.lazy
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in before.items()
            if name.startswith(incomplete)
        ]
        self.lazy = {}
        try:
            return sorted(
                [*found, *super().shell_complete(ctx, incomplete)], key=lambda item: item.value
            )
        finally:
            self.lazy = before

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
    """Run `function`, a command in click's mode that is not standalone.

    An EvenerError, a package that is not installed, and what click says of a command line become
    two lines on stderr and an exit code.
    """
    try:
        return function()
    except EvenerError as error:
        _say(error.problem, error.fix)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "evener").partition(".")[0] == "evener":
            raise
        _say(*_missing(str(error.name).partition(".")[0]))
        sys.exit(UsageError.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _say(*_in_our_words(error))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


def require(package: str) -> None:
    """Raises UsageError where `package` is not installed: for what only other processes import."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(*_missing(package))


def _missing(package: str) -> tuple[str, str]:
    """(problem, fix) of a package that Evener itself does not bring."""
    fix = f"pip install {package}"
    if package == "torch":
        fix = "pip install 'evener[torch]', or the build of torch for your GPU"
    return f"this needs {package}, which {sys.executable} does not have", fix


def _say(problem: str, fix: str) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(problem, err=True)
    if fix:
        click.secho("  fix: ", fg="green", bold=True, nl=False, err=True)
        click.echo(fix, err=True)


def _in_our_words(error: click.ClickException) -> tuple[str, str]:
    """(problem, fix) of what click says."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "evener"
    if isinstance(error, click.NoSuchOption):
        near = sorted(error.possibilities or [])
        if context and not near:
            near = _near_options(context.command, error.option_name)
        fix = f"did you mean {' or '.join(near)}?" if near else f"see `{path} --help`"
        return f"{path} has no option {error.option_name}", fix
    message = error.format_message()
    if others := getattr(error, "possibilities", None):  # a command, in newer versions of click
        message = message.partition(" Did you mean")[0]
        return f"{path}: {message[:1].lower()}{message[1:]}", f"did you mean {' or '.join(others)}?"
    fix = f"see `{path} --help`" if isinstance(error, click.UsageError) else ""
    return f"{path}: {message[:1].lower()}{message[1:]}", fix


def _near_options(command: click.Command, name: str) -> list[str]:
    known = [
        option
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for option in [*parameter.opts, *parameter.secondary_opts]
    ]
    return difflib.get_close_matches(name, known, 2, 0.6)
