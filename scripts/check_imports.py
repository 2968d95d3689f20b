"""Check that imports go one way: cli > verbs > doors > pillars > base > native, and in no circle.

docs/architecture.md says which package is what. What is not so yet is in KNOWN, each with what
would mend it; a line there that no import needs any more is an error too, so the list only shrinks.
Imports under TYPE_CHECKING count for circles no more than they do when Python runs.

    python scripts/check_imports.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("python/evener")

# Each package and module of `evener` has a level. A package may import all levels below its own,
# and packages of its own level only where USES says so; base modules may import each other.
LEVELS = [
    ("cli", {"cli", "about", "__main__"}),
    (
        "verb",
        {
            "launch", "bench", "lab", "analyze", "doctor", "place", "plan", "stats",
            "horovod.runner",  # `horovodrun`: inside horovod, where upstream has it
            "horovod.ray",  # starts jobs too, on a Ray cluster
        },
    ),
    ("door", {"ddp", "fsdp", "horovod", "door", "accelerated", "own", "integrations"}),
    (
        "pillar",
        {"comm", "zero", "net", "fabric", "embedding", "pipeline", "moe", "precision", "compile"},
    ),
    (
        "base",
        {
            "settings", "errors", "log", "interfaces", "units", "records", "programs", "ssh",
            "page", "_click", "_kernels", "_optimizers",
        },
    ),
    ("native", {"_native"}),
]  # fmt: skip

# Packages that stand on others of their level: said here, so that it is chosen.
USES = {
    ("bench", "lab"),  # a bench may run in a lab
    ("embedding", "comm"),  # a table over ranks: groups, hosts
    ("zero", "comm"),  # which ranks share a host
    ("pipeline", "comm"),  # what every rank hears of: comm.watch
    ("moe", "comm"),  # the same, and which ranks share a host
    ("plan", "bench"),  # the models and the clock of the bench
    ("launch", "place"),  # --map
    ("lab", "launch"),  # --horovod: the door's folder, and the variables of each rank
    ("horovod.runner", "launch"),  # horovodrun is launch with other options
    ("horovod.ray", "launch"),  # an elastic job there is launch's, with other workers
    ("horovod.ray", "horovod.runner"),  # upstream's settings and host discovery
    ("ddp", "accelerated"),  # the class that accelerate() gives a model
    ("accelerated", "own"),  # DDP's own reducer, where it is the fastest
    ("door", "ddp"),  # the door calls accelerate()
    ("door", "integrations"),  # it adds the callbacks
    ("integrations", "accelerated"),  # whose residuals they keep
}

KNOWN = {
    ("horovod", "horovod.runner"): "upstream's interface has `horovod.run`, which starts a job",
}


def level(package: str) -> int | None:
    """0 is the top; None for what belongs to no level (evener itself)."""
    return next((at for at, (_, names) in enumerate(LEVELS) if package in names), None)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name > file, of all of the package."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def runs(tree: ast.AST, *, top: bool) -> Iterator[ast.stmt]:
    """The import statements of a module; with `top` only those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not (top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from runs(node, top=top)


def imports(path: Path, known: dict[str, Path], *, top: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of what a file imports of evener."""
    for node in runs(ast.parse(path.read_text(encoding="utf-8")), top=top):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            base = node.module or ""
            names = [
                inner if (inner := f"{base}.{alias.name}") in known else base
                for alias in node.names
            ]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "evener")


def package_of(module: str) -> str:
    """`evener.comm.wires.base` > `comm`; `evener` > ``. The longest name with a level counts."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 1, -1):
        if level(".".join(parts[:length])) is not None:
            return ".".join(parts[:length])
    return parts[0] if parts else ""


def without_level(known: dict[str, Path]) -> Iterator[str]:
    """Packages that nobody has given a level."""
    packages = {package_of(module): path for module, path in sorted(known.items())}
    for package, path in packages.items():
        if package and level(package) is None:
            yield f"{path}: {package} has no level: add it to LEVELS in scripts/check_imports.py"


def directions(known: dict[str, Path]) -> Iterator[str]:
    """Imports that go up, or across without being named in USES."""
    met = set()
    for module, path in sorted(known.items()):
        for line, target in imports(path, known, top=False):
            ours, theirs = package_of(module), package_of(target)
            if ours == theirs or level(ours) is None or level(theirs) is None:
                continue
            here, there = level(ours), level(theirs)
            assert here is not None and there is not None
            across = here == there and LEVELS[here][0] in ("verb", "door")
            if there > here or (here == there and not across) or (ours, theirs) in USES:
                continue
            met.add((ours, theirs))
            if (ours, theirs) not in KNOWN:
                what = f"{LEVELS[here][0]} {ours} imports {LEVELS[there][0]} {theirs}"
                yield f"{path}:{line}: {what}: move what both need down, or pass it in"
    for ours, theirs in sorted(set(KNOWN) - met):
        yield f"{ours} does not import {theirs} any more: take it out of KNOWN"


def circles(known: dict[str, Path]) -> Iterator[str]:
    """Modules that import each other when they are imported: one circle of each knot."""
    graph = {
        module: {t for _, t in imports(path, known, top=True) if t in known and t != module}
        for module, path in known.items()
    }
    # Importing a module imports its packages first; a package's face that imports its own modules
    # is how packages are made, so only circles of files that are no face are looked for.
    faces = {module for module, path in known.items() if path.name == "__init__.py"}
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(module: str) -> Iterator[str]:
        state[module] = 1
        trail.append(module)
        for target in sorted(graph[module] - faces):
            if state.get(target) == 1:
                yield " > ".join([*trail[trail.index(target) :], target])
            elif target not in state:
                yield from visit(target)
        trail.pop()
        state[module] = 2

    for module in sorted(set(graph) - faces):
        if module not in state:
            for circle in visit(module):
                yield f"modules import each other in a circle: {circle}"


def main() -> int:
    known = modules()
    problems = [*without_level(known), *directions(known), *circles(known)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if "--known" in sys.argv:
        for (ours, theirs), mend in sorted(KNOWN.items()):
            print(f"{ours} imports {theirs}: {mend}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
