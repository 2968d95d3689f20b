"""Write the pages that are made from the code, or with --check say which ones are out of date.

--check also checks all pages as an outside reader meets them (scripts/check_docs.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import check_docs
import click

from evener.base import settings
from evener.cli import evener
from evener.tools.analyze import findings
from evener.tools.bench.train import columns

REFERENCE = Path("docs/reference")

# What a user's own script may import. A page each; the public face of a package is its __all__, but
# for what has a page of its own.
FACES: dict[str, tuple[str, list[str] | None]] = {
    "ddp": ("evener.ddp", ["accelerate", "data_shard", "restore"]),
    "fsdp": ("evener.fsdp", ["accelerate", "release"]),
    "zero": ("evener.zero", None),
    "zero-frameworks": ("evener.zero", ["accelerate", "MuonAdamW", "trainer"]),
    "pipeline": ("evener.pipeline", None),
    "moe": ("evener.moe", None),
    "lab": ("evener.tools.lab", None),
    "forms": (
        "evener.comm.wires",
        [
            "candidates",
            "choose",
            "get",
            "ladder",
            "Limits",
            "milder",
            "names",
            "Paper",
            "papers",
            "register",
            "suitable",
            "Wire",
        ],
    ),
    "horovod": ("evener.horovod.torch", None),
    "fabric": ("evener.tools.fabric", None),
}
# Another project's interface: its own documentation explains it, here is what there is of it.
BRIEF = {"horovod"}


def verbs(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below `group`, with its full name, in alphabetical order."""
    context = click.Context(group, info_name=name)
    for key in group.list_commands(context):
        command = group.get_command(context, key)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from verbs(command, f"{name} {key}")
        else:
            yield f"{name} {key}", command


def option_row(option: click.Option) -> str:
    """One row of a command's table: names, default, meaning."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    shown = option.default if option.show_default else ""
    if isinstance(shown, bool):
        shown = ([*option.opts] if shown else [*option.secondary_opts, ""])[0]
    if shown is None or callable(shown) or "Sentinel" in repr(shown):
        shown = ""
    choices = ""
    if isinstance(option.type, click.Choice):
        choices = f" One of {', '.join(map(str, option.type.choices))}."
    text = " ".join((option.help or "").split()) + choices
    return f"| `{names}` | {shown} | {text} |".replace("  ", " ")


def options(title: str, wanted: Callable[[str], bool]) -> str:
    """A page of docs/reference: every option of the commands whose name is `wanted`."""
    lines = [f"# {title}", "", "Made from the code by `make docs`."]
    seen: dict[str, str] = {}  # what a table says > the command that has it already
    for name, command in verbs(evener, "evener"):
        if not wanted(name):
            continue
        rows = [
            option_row(parameter)
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.hidden
        ]
        arguments = " ".join(
            parameter.make_metavar(click.Context(command))
            for parameter in command.params
            if isinstance(parameter, click.Argument)
        )
        lines += ["", f"## {name}", ""]
        summary = inspect.cleandoc(command.help or "").split("\n\n")[0]
        lines += [" ".join(summary.split()).replace("\b", "").strip()]
        if arguments:
            lines += ["", f"Arguments: `{arguments}`"]
        table = "\n".join(rows)
        if table in seen and len(rows) > 3:
            lines += ["", f"Options: those of `{seen[table]}`."]
        elif rows:
            seen[table] = name
            lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
        if name == "evener bench train":
            lines += ["", "| column | what it does |", "|---|---|"]
            lines += [f"| `{column}` | {what} |" for column, what in columns.listing()]
    return "\n".join(lines) + "\n"


def signature(value: Callable[..., object], *, types: bool = True) -> str:
    """How it is called; a default that is an object is shown as `...`."""
    try:
        called = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    if not types:
        bare = [p.replace(annotation=p.empty) for p in called.parameters.values()]
        called = called.replace(parameters=bare, return_annotation=called.empty)
    return re.sub(r"<(?:[^<>]|<[^<>]*>)+>", "...", str(called)).replace("'", "")


def members(kind: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """Public methods that the class itself defines and says something about."""
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, function


def api(page_name: str) -> Callable[[], str]:
    """A page of docs/reference/api: what a module's names say about themselves."""
    module_name, names = FACES[page_name]
    brief = page_name in BRIEF

    def page() -> str:
        module = importlib.import_module(module_name)
        others = [own or [] for name, own in FACES.values() if name == module_name]
        about = ": ".join([module_name, *page_name.split("-")[1:]])
        lines = [f"# {about}", "", "Made from the docstrings by `make docs`.", ""]
        lines += ["```text", inspect.cleandoc(module.__doc__ or ""), "```"]
        chosen = names or sorted(module.__all__, key=str.lower)
        if not names:
            chosen = [name for name in chosen if not any(name in own for own in others)]
        if brief:
            calls = [name for name in chosen if inspect.isfunction(getattr(module, name))]
            others = ", ".join(f"`{name}`" for name in chosen if name not in calls)
            shown = [name + signature(getattr(module, name), types=False) for name in calls]
            lines += ["", f"Classes and constants: {others}.", "", "```python", *shown, "```"]
            return "\n".join(lines) + "\n"
        for name in chosen:
            value = getattr(module, name)
            lines += ["", f"## {name}"]
            own = "" if inspect.isclass(value) and issubclass(value, BaseException) else None
            shown = signature(value) if own is None and callable(value) else ""
            said = callable(value) or inspect.ismodule(value)
            text = inspect.cleandoc(value.__doc__ or "") if said else repr(value)
            if inspect.isclass(value) and text.startswith(f"{name}("):
                text = ""  # a dataclass that says nothing: its signature again
            lines += ["", "```text", f"{name}{shown}", *(["", text] if text else [])]
            for method, function in members(value) if inspect.isclass(value) else ():
                summary = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
                lines += ["", f".{method}{signature(function)}"]
                lines += ["    " + line for line in summary.splitlines()]
            lines.append("```")
        return "\n".join(lines) + "\n"

    return page


def listed(path: Path, name: str, make: Callable[[], str]) -> Callable[[], str]:
    """A page by hand with one part made from the code, between two comments that name it."""

    def page() -> str:
        start, end = (
            f"<!-- {name}: made from the code by `make docs` -->",
            f"<!-- end of {name} -->",
        )
        before, _, rest = path.read_text(encoding="utf-8").partition(start)
        return f"{before}{start}\n\n{make()}\n{end}{rest.partition(end)[2]}"

    return page


# Verbs with a page of their own; the others share one. A page has 400 lines at most.
OWN_PAGE = {"bench": ("bench",), "launch": ("launch", "horovodrun"), "lab": ("lab",)}


def is_on(page: str, name: str) -> bool:
    """Whether the command `name` (`evener lab run`) belongs to `page`; "": to none of OWN_PAGE."""
    verb = name.split()[1]
    owner = next((own for own, names in OWN_PAGE.items() if verb in names), "")
    return owner == page


PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "settings.md": settings.markdown,
    REFERENCE / "options.md": lambda: options(
        "Commands and their options", functools.partial(is_on, "")
    ),
    **{
        REFERENCE / f"options-{page}.md": functools.partial(
            options, f"Options of `evener {page}`", functools.partial(is_on, page)
        )
        for page in OWN_PAGE
    },
    Path("crates/engine/src/settings_generated.rs"): settings.rust,
    REFERENCE / "analyze.md": listed(REFERENCE / "analyze.md", "findings", findings.markdown),
    **{REFERENCE / "api" / f"{page}.md": api(page) for page in FACES},
}


def main() -> int:
    stale = []
    for path, make in PAGES.items():
        text = make()
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is out of date: run `make docs`", file=sys.stderr)
    unreadable = check_docs.main() if "--check" in sys.argv else 0
    return 1 if stale else unreadable


if __name__ == "__main__":
    sys.exit(main())
