"""`evener.toml`: options of `evener launch` that need not be typed again.

    [launch]
    np = 4
    hosts = ["gpu1:2", "gpu2:2"]
    ddp = true
    env = { NCCL_DEBUG = "WARN" }
    command = ["python", "train.py"]

A key is an option's name without its dashes. What is typed wins, also over a key that says the same
thing in another way (`-H` over `hostfile`). Paths are relative to the file. Every key and value is
checked before anything starts: a file that is only half understood starts another job than meant.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from evener.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "evener.toml"
_TABLE = "launch"
_NOT_HERE = {"config", "no_config", "help", "dry_run"}
# Options that say the same thing: where one is typed, the file's are left out.
_RIVALS = (
    {"hosts", "hostfile", "map_file"},
    {"rsh", "ssh_port", "ssh_identity_file"},
    {"hosts", "hostfile", "host_discovery_script"},
)


class Configured(click.Command):
    """A command whose options may stand in `evener.toml` too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [] if ctx.resilient_parsing else self._read(ctx, list(args))
        rest = super().parse_args(ctx, args)
        typed = {
            name
            for name in ctx.params
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        for rivals in _RIVALS:
            if rivals & typed:
                for name in rivals - typed:
                    ctx.params[name] = None
        ctx.params["command"] = ctx.params["command"] or tuple(words)
        if not ctx.params["command"] and not ctx.resilient_parsing:
            raise UsageError(
                "evener launch: missing argument COMMAND: no program was given",
                "end the line with it, as `python train.py`; see `evener launch --help`",
            )
        return rest

    def _read(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the file's options below what is typed; the words of its program."""
        typed, _, _ = self.make_parser(ctx).parse_args(args)
        given = typed.get("config")
        path = Path(given or NAME)
        off = typed.get("no_config") or "help" in typed
        if off or (given is None and not path.is_file()):
            return []
        options, words, keys = read(path, self)
        ctx.default_map = options
        click.echo(f"evener launch: {path} gives {', '.join(keys) or 'nothing'}", err=True)
        return words


def option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options --config and --no-config, which `Configured` looks at."""
    for decorate in (
        click.option(
            "--no-config",
            is_flag=True,
            expose_value=False,
            help=f"Do not read {NAME} of the working folder.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            expose_value=False,
            help=f"Options from this file; what is typed wins. Default: {NAME}, where it is there.",
        ),
    ):
        function = decorate(function)
    return function


def read(path: Path, command: click.Command) -> tuple[dict[str, Any], list[str], list[str]]:
    """Values by the names of `command`'s parameters, the words of the program, and the file's keys.

    Raises UsageError for a key that is not known and a value that cannot be.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "give another file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}", "a line is NAME = VALUE") from None
    _check_names(path, "a table", found, [_TABLE])
    table = found.get(_TABLE, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {_TABLE} is not a table", f"begin it with [{_TABLE}]")
    parameters = {
        key: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_HERE
        for key in _spellings(parameter)
    }
    _check_names(path, f"a key of [{_TABLE}]", table, [*parameters, "command"])
    keys = list(table)
    words = table.pop("command", [])
    if isinstance(words, str):
        words = shlex.split(words)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{path}: command = {words!r}", 'write ["python", "train.py"]')
    options: dict[str, Any] = {}
    for key, value in table.items():
        parameter = parameters[key]
        name = str(parameter.name)
        if name in options:
            raise UsageError(
                f"{path}: {key} and another key say the same thing", "leave one of them out"
            )
        flag = _flag(path, key, parameter, value)
        if parameter.is_flag and flag is None:
            continue
        options[name] = flag if parameter.is_flag else _value(path, key, parameter, value)
    return options, words, keys


def _spellings(parameter: click.Option) -> list[str]:
    """Its names in the file: -np and --num-proc are `np` and `num-proc`; -H alone is none."""
    names = [name.lstrip("-") for name in parameter.opts]
    return [name for name in names if len(name) > 1]


def _check_names(path: Path, what: str, found: Mapping[str, Any], known: list[str]) -> None:
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name.replace("_", "-"), known, 1, 0.5)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise UsageError(f"{path}: {name} is not {what}", fix)


def _flag(path: Path, key: str, parameter: click.Option, value: Any) -> Any:
    """What a flag's true or false stands for; None where false says no more than its default."""
    if not parameter.is_flag:
        return None
    if not isinstance(value, bool):
        raise UsageError(f"{path}: {key} = {value!r}", "true or false")
    if parameter.is_bool_flag:
        return value
    return parameter.flag_value if value else None


def _value(path: Path, key: str, parameter: click.Option, value: Any) -> Any:
    """`value` as click would have it from a command line."""
    if parameter.multiple:
        return _variables(path, key, value)
    if isinstance(value, list) and parameter.nargs == 1:
        if not parameter.metavar or "," not in parameter.metavar:
            raise UsageError(f"{path}: {key} = {value!r}", "one value, without brackets")
        value = ",".join(map(str, value))
    if isinstance(value, bool | dict):
        raise UsageError(f"{path}: {key} = {value!r}", "a number or a string")
    if isinstance(parameter.type, click.Path):
        value = str(path.parent / str(value))
    try:
        return parameter.type_cast_value(
            click.Context(click.Command("launch")),
            [str(part) for part in value] if isinstance(value, list) else str(value),
        )
    except click.BadParameter as error:
        problem = error.message[:1].lower() + error.message[1:]
        raise UsageError(
            f"{path}: {key} = {value!r}: {problem}", "see `evener launch --help`"
        ) from None


def _variables(path: Path, key: str, value: Any) -> list[str]:
    """NAME=VALUE of a table, or as `-x` takes them."""
    if isinstance(value, dict) and all(isinstance(v, str | int | float) for v in value.values()):
        return [f"{name}={_text(v)}" for name, v in value.items()]
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    raise UsageError(f"{path}: {key} = {value!r}", '{ NAME = "VALUE" }, or ["NAME"]')


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
