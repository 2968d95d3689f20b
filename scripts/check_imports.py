"""Check how the rooms of `evener` use each other: one way, by their faces, and in no circle.

A **room** is a package or module directly under `evener`. Each package of `tools` is one too, and
so are the two parts of `horovod` that start jobs. docs/architecture.md says what each is for.
Checked for every import, also one inside a function or for type checkers alone:

- levels: cli > tools > doors > pillars > base > native. A room imports the levels below its own.
  Rooms of one level import each other only where USES says so, and USES has no circle.
- faces: from outside a room you import what its `__init__.py` lists in `__all__`, names or modules.
  Modules of `base` are faces themselves.
- circles: no two files import each other, by whatever way round.

    python scripts/check_imports.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path("python/evener")

LEVELS = [
    ("main", {"__main__"}),
    ("cli", {"cli"}),
    (
        "tool",
        {
            "tools.launch", "tools.bench", "tools.lab", "tools.analyze", "tools.doctor",
            "tools.place", "tools.plan", "tools.stats", "tools.fabric", "tools.about", "tools.why",
            "tools.quickstart", "tools.completion", "tools.hub",
            "horovod.runner",  # `horovodrun`: inside horovod, where upstream has it
            "horovod.ray",  # starts jobs too, on a Ray cluster
        },
    ),
    ("door", {"ddp", "fsdp", "horovod", "door"}),
    (
        "pillar",
        {
            "comm", "zero", "net", "embedding", "pipeline", "moe", "precision", "compile", "watch",
        },
    ),
    ("base", {"base", "errors"}),
    ("native", {"_native"}),
]  # fmt: skip

# Rooms that stand on others of their level: said here, so that it is chosen.
USES = {
    ("embedding", "comm"),  # a table over ranks: groups, hosts
    ("zero", "comm"),  # which ranks share a host; forms between nodes
    ("pipeline", "comm"),  # what every rank hears of; gradients between replicas
    ("moe", "comm"),  # which ranks share a host
    ("door", "ddp"),  # the door calls accelerate()
    ("door", "fsdp"),
    ("tools.analyze", "tools.fabric"),  # the map of the fabric
    ("tools.place", "tools.fabric"),
    ("tools.launch", "tools.place"),  # --map
    ("tools.launch", "tools.fabric"),
    ("tools.launch", "tools.why"),  # it watches the job that it started
    ("tools.why", "tools.analyze"),  # one verdict, live and from files
    ("tools.lab", "tools.launch"),  # --horovod: the folder of its package, each rank's variables
    ("tools.bench", "tools.lab"),  # a bench may run in a lab
    ("tools.plan", "tools.bench"),  # the models and the clock of the bench
    ("horovod.runner", "tools.launch"),  # horovodrun is launch with other options
    ("horovod.ray", "tools.launch"),  # an elastic job there is launch's, with other workers
    ("horovod.ray", "horovod.runner"),  # upstream's settings and host discovery
}

# Modules that may be entered although no `__all__` names them: `import *` must not load them.
OPEN = {
    "evener.zero.named",  # a Llama by a few words, for `evener plan` too
    "evener.zero.shapes",
    "evener.zero.command",  # what `evener plan-memory` does; tools.plan has its options
    "evener.embedding.planning",  # the same for tables
    "evener.pipeline.command",
    "evener.embedding.tensorflow._library",  # where TensorFlow's operations lie
    "evener.embedding.tensorflow._variable",  # Horovod gives ranks the rows of its tables
}

KNOWN = {
    ("horovod", "horovod.runner"): "upstream's interface has `horovod.run`, which starts a job",
}


def level(room: str) -> int | None:
    """0 is the top; None for what belongs to no level (evener itself)."""
    return next((at for at, (_, rooms) in enumerate(LEVELS) if room in rooms), None)


def room_of(module: str) -> str:
    """`evener.comm.wires.base` > `comm`; `evener` > ``. The longest name with a level counts."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 1, -1):
        if level(".".join(parts[:length])) is not None:
            return ".".join(parts[:length])
    return parts[0] if parts else ""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name > file, of all of the package."""
    found = {}
    for path in root.rglob("*.py"):
        if "projects" in path.parts:
            continue  # users' programs, which `evener quickstart` writes
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    every = ast.walk(_tree(path))
    return tuple(node for node in every if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of what a file imports of evener; name: "" for the module itself."""
    for node in _statements(path):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            base = node.module or ""
            found = [
                (inner, "") if (inner := f"{base}.{alias.name}") in known else (base, alias.name)
                for alias in node.names
            ]
        yield from ((node.lineno, *each) for each in found if each[0].split(".")[0] == "evener")


def without_level(known: dict[str, Path]) -> Iterator[str]:
    """Rooms that nobody has given a level."""
    rooms = {room_of(module): path for module, path in sorted(known.items())}
    for room, path in rooms.items():
        if room and room != "tools" and level(room) is None:
            yield f"{path}: {room} has no level: add it to LEVELS in scripts/check_imports.py"


def directions(known: dict[str, Path]) -> Iterator[str]:
    """Imports that go up, or across without being named in USES."""
    met = set()
    for module, path in sorted(known.items()):
        for line, target, _ in imports(path, known):
            ours, theirs = room_of(module), room_of(target)
            here, there = level(ours), level(theirs)
            if ours == theirs or here is None or there is None:
                continue
            met.add((ours, theirs))
            down = there > here or LEVELS[here][0] == "base"
            if not (down or (ours, theirs) in USES or (ours, theirs) in KNOWN):
                what = f"{LEVELS[here][0]} {ours} imports {LEVELS[there][0]} {theirs}"
                yield f"{path}:{line}: {what}: move what both need down, or pass it in"
    for name, pairs in (("USES", USES), ("KNOWN", KNOWN)):
        for ours, theirs in sorted(set(pairs) - met):
            yield f"{ours} does not import {theirs} any more: take it out of {name}"
    rooms = {ours: {b for a, b in USES if a == ours} for ours, _ in USES}
    yield from (f"rooms use each other in a circle: {knot}" for knot in knots(rooms))


def faces(known: dict[str, Path]) -> Iterator[str]:
    """Imports of what a room does not list in its `__all__`."""
    for module, path in sorted(known.items()):
        for line, target, name in imports(path, known):
            ours, theirs = room_of(module), room_of(target)
            if theirs in ("", "base", "errors", "_native", ours) or ours.startswith(f"{theirs}."):
                continue
            if target in OPEN:
                continue
            inner = target.removeprefix(f"evener.{theirs}").split(".")[1:]
            inner += [name] if name else []
            package = f"evener.{theirs}"
            for part in inner:
                if known[package].name != "__init__.py":
                    break  # a name of a module that may be entered
                if part not in _listed(known[package]):
                    yield (
                        f"{path}:{line}: {module} enters {theirs} past its face: "
                        f"{part} is not in __all__ of {package}"
                    )
                    break
                package = f"{package}.{part}"
                if package not in known:
                    break


@cache
def _listed(path: Path) -> frozenset[str]:
    """`__all__` of a package; the parts of it that are plain lists of strings."""
    for node in _tree(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            strings = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            return frozenset(text for text in strings if isinstance(text, str))
    return frozenset()


def circles(known: dict[str, Path]) -> Iterator[str]:
    """Files that import each other, directly or by way of others."""
    graph = {
        module: {t for _, t, _ in imports(path, known) if t in known and t != module}
        for module, path in known.items()
    }
    yield from (f"modules import each other in a circle: {knot}" for knot in knots(graph))


def knots(graph: dict[str, set[str]]) -> Iterator[str]:
    """One circle through each set of nodes that reach each other (Tarjan, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in number:
                yield from visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], number[target])
        if low[node] == number[node]:
            knot = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(knot) > 1:
                yield knot

    for node in sorted(graph):
        if node not in number:
            for knot in visit(node):
                yield " > ".join(_round(graph, set(knot)))


def _round(graph: dict[str, set[str]], knot: set[str]) -> Iterable[str]:
    """A shortest way from the first of a knot back to itself."""
    start = min(knot)
    ways = [[start]]
    seen = set()
    while ways:
        way = ways.pop(0)
        for target in sorted(graph[way[-1]] & knot):
            if target == start:
                return [*way, start]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return sorted(knot)


def main() -> int:
    sys.setrecursionlimit(10_000)
    known = modules()
    problems = [*without_level(known), *directions(known), *faces(known), *circles(known)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
