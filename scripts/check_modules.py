"""Check that the modules of each crate use each other in no circle.

A module and all below it are one room. Rooms side by side, at every depth, may use each other one
way only, by whatever way round. A module and its own parts are no circle: in Rust a child is a part
of its parent. Tests apart. (Circles of crates cargo refuses by itself.)

    python scripts/check_modules.py
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from check_imports import knots

Module = tuple[str, ...]

NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|b?"(?:\\.|[^"\\])*"', re.DOTALL)
# What stands behind `#[cfg(test)]` and the like, up to its first brace or semicolon.
TEST = re.compile(r"#\[cfg\((?:all\(|any\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*[^{;]*[{;]")
USE = re.compile(r"\buse\s+([^;]+);")
PATH = re.compile(r"\b(?:[A-Za-z_]\w*\s*::\s*)+[A-Za-z_]\w*")


def modules(source: Path) -> dict[Module, Path]:
    """Path in the crate > file; `()` is the crate's root."""
    found = {}
    for file in source.rglob("*.rs"):
        parts = file.relative_to(source).with_suffix("").parts
        name = parts[:-1] if parts[-1] in ("lib", "main", "mod") else parts
        if "tests" not in name:
            found[name] = file
    return found


def code(text: str) -> str:
    """The text without comments, strings and tests."""
    text = NOT_CODE.sub("", text)
    while found := TEST.search(text):
        end = found.end()
        depth = text[end - 1] == "{"
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    return text


def _leaves(tree: str, prefix: Module = ()) -> Iterator[Module]:
    """The paths of what a `use` names: `a::{b, c::d}` > a::b, a::c::d."""
    depth, start = 0, 0
    for at, letter in enumerate(f"{tree},"):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter != "," or depth:
            continue
        head, brace, rest = tree[start:at].partition("{")
        parts = tuple(part.strip() for part in head.split(" as ")[0].split("::") if part.strip())
        if brace:
            yield from _leaves(rest.rpartition("}")[0], prefix + parts)
        elif parts:
            yield prefix + parts
        start = at + 1


def used(module: Module, text: str, known: dict[Module, Path]) -> Iterator[Module]:
    """The modules of the same crate that a file names, in a `use` or by a path."""
    paths = [path for tree in USE.findall(text) for path in _leaves(tree)]
    paths += [tuple(re.split(r"\s*::\s*", path)) for path in PATH.findall(USE.sub("", text))]
    for path in paths:
        at, rest = module, path
        if path[0] == "crate":
            at, rest = (), path[1:]
        elif path[0] in ("self", "super"):
            while rest and rest[0] in ("self", "super"):
                at, rest = at[:-1] if rest[0] == "super" else at, rest[1:]
        elif (*module, path[0]) not in known:
            continue
        full = at + rest
        while full not in known:
            full = full[:-1]
        yield full


def circles(source: Path) -> Iterator[str]:
    """Modules side by side that use each other, each as one way round."""
    known = modules(source)
    graphs: dict[Module, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, file in known.items():
        for target in used(module, code(file.read_text(encoding="utf-8")), known):
            same = 0
            while same < min(len(module), len(target)) and module[same] == target[same]:
                same += 1
            if same < len(module) and same < len(target):  # neither holds the other
                graphs[module[:same]][module[same]].add(target[same])
    for parent, graph in graphs.items():
        for knot in knots(graph):
            yield f"{source.joinpath(*parent)}: modules use each other in a circle: {knot}"


def main() -> int:
    problems = [
        problem for source in sorted(Path("crates").glob("*/src")) for problem in circles(source)
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
