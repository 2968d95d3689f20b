"""What all twins share: one search from one seed, shrunk to the shortest program that fails.

A program is JSON: lists, dicts, numbers, strings. So it can be printed, kept in `kept/` as a test,
and sent to the processes of a world. hypothesis generates and shrinks it; nothing else is random.
Data that a program needs (gradients, keys) comes from a seed inside the program.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.strategies import SearchStrategy

Program = Any
KEPT = Path(__file__).parent / "kept"
TRACED = "Traceback (most recent call last):\n"
# What Python raises where a patch does not fit the code around it any more.
UNFIT = re.compile(
    r"^(?:\w+\.)*(?:Type|Attribute|Name|UnboundLocal|Import|ModuleNotFound)Error\b", re.MULTILINE
)


@dataclass(frozen=True)
class Twin:
    """One pillar's generator, comparison and faults.

    `check` runs a program by Evener and by the plain reference and raises AssertionError (or lets
    an error out that the reference does not raise) where they differ. Each of `faults` is a
    context manager factory that breaks Evener in one way while it is open, for processes that
    `check` starts too; `ends` has those that something else than the comparison is meant to notice,
    with a pattern of its error's text. A round has `programs_per_round` where nobody says how many;
    a program that takes longer than `limit` seconds is ended and named (see `_alone.py`). `needs`:
    packages that development does without; where one is not installed, the twin is skipped.
    """

    name: str
    programs: SearchStrategy[Program]
    check: Callable[[Program], None]
    faults: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    programs_per_round: int = 100
    limit: float = 300.0
    needs: tuple[str, ...] = ()

    @property
    def skipped(self) -> str:
        """Why it cannot run here, or ""."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if not missing:
            return ""
        return f"{missing[0]} is not installed (pip install {' '.join(self.needs)})"


@dataclass(frozen=True)
class Result:
    """What a search found: `program` is the shortest that failed, or None.

    Of a fault: `without` is how its program failed without it as well, and `broken` a traceback, or
    what else shows that the fault itself is broken.
    """

    twin: str
    seed: int
    programs: int
    seconds: float
    program: Program = None
    error: str = ""
    trace: str = ""
    without: str = ""
    broken: str = ""


def twin(name: str) -> Twin:
    """Import `tests.twins.NAME` and return its TWIN."""
    found: Twin = importlib.import_module(f"tests.twins.{name}").TWIN
    return found


def names() -> list[str]:
    """List the pillars that have a twin here: each module that is no part of the harness."""
    other = {"__init__", "__main__", "harness"}
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in other and not path.stem.startswith(("test_", "_"))
    )


def search(
    tested: Twin,
    seed: int,
    count: int,
    begins: Callable[[Program], None] = lambda _: None,
    *,
    shrink: bool = True,
) -> Result:
    """Run `count` programs from `seed`; stop at the first that fails, and `shrink` it.

    `begins` is called with each program before it runs.
    """
    began, ran = time.monotonic(), 0
    failing: tuple[Program, str, str] = (None, "", "")
    passed: set[str] = set()

    def body(program: Program) -> None:
        nonlocal ran, failing
        text = json.dumps(program, sort_keys=True)
        if text in passed:  # hypothesis draws some again
            return
        ran += 1
        begins(program)
        try:
            tested.check(program)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            failing = (json.loads(text), f"{type(error).__name__}: {error}", trace)
            raise
        passed.add(text)

    run = hypothesis.seed(seed)(
        hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )(hypothesis.given(tested.programs)(body))
    )
    # Each program is drawn anew: hypothesis would make five of six from the one before, by copying
    # one part of it over another, and so leave out much of what can be drawn.
    drawn = mock.patch.object(ConjectureRunner, "generate_mutations_from", lambda *_: None)
    with drawn, contextlib.suppress(Exception):  # `failing` holds it, shrunk
        run()
    return Result(tested.name, seed, ran, time.monotonic() - began, *failing)


def find(
    tested: Twin,
    fault: str,
    seed: int,
    count: int,
    begins: Callable[[Program], None] = lambda _: None,
) -> Result:
    """Put `fault` in and run `count` programs at most; stop at the first that fails.

    It is found if this program is right without the fault, and if what failed is the comparison
    (AssertionError) or what the twin's `ends` says. All else is an error of the fault: mostly its
    patch no longer fits what it patches. It is not shrunk: of a hang that takes minutes.
    """
    try:
        with tested.faults[fault]():
            result = search(tested, seed, count, begins, shrink=False)
    except Exception:  # noqa: BLE001 - it cannot be put in
        return Result(tested.name, seed, 0, 0.0, broken=traceback.format_exc())
    if not result.error:
        return result
    try:
        tested.check(result.program)
    except Exception as error:  # noqa: BLE001 - whatever a search takes for a difference
        said = f"fails without the fault too: {type(error).__name__}: {error}"
        return replace(result, error="", without=said)
    differs = ended(result.trace) == "AssertionError" and not UNFIT.search(result.trace)
    noticed = fault in tested.ends and re.search(tested.ends[fault], result.trace) is not None
    return result if differs or noticed else replace(result, broken=result.trace)


def ended(trace: str) -> str:
    """The class of the error that a traceback ends in, or the last of those in its text.

    A process of a twin sends its traceback as the text of an error.
    """
    lines = trace.rpartition(TRACED)[2].splitlines()
    named = next((line for line in lines if not line.startswith(" ")), "")
    return named.partition(":")[0].rpartition(".")[2]


def often(*of: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """One of these; what is given several times comes as often. `st.one_of` drops repeats."""
    return strategies.sampled_from(of).flatmap(lambda one: one)


def keep(result: Result) -> Path:
    """Write the program that failed to `kept/`, where tests/twins/test_kept.py runs it."""
    text = json.dumps(result.program, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = KEPT / result.twin / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def kept(name: str) -> Iterator[tuple[Path, Program]]:
    """Yield the programs of a pillar that failed once."""
    for path in sorted((KEPT / name).glob("*.json")):
        yield path, json.loads(path.read_text(encoding="utf-8"))
