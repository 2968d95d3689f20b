"""The training programs of the doors' twin: a small model, and steps between which anything may
happen that users do. Chance alone puts some of it together too seldom: those are habits.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.twins.harness import Program

ROWS = 4
FORMS = ("int8", "int4", "topk", "topk-chunk", "lowrank1", "auto")


_ACTS = st.one_of(
    st.sampled_from(
        [
            ["freeze", 0],
            ["freeze", 1],
            ["thaw", 0],
            ["thaw", 1],
            ["restart"],
            ["edit state"],
            ["replace state"],
            ["keep state"],
            ["scale kept state"],
            ["keep grads"],
            ["keep flat grads"],
            ["zero kept grads"],
            ["sum kept grads"],
            ["drop kept grads"],
            *[["keep data"], ["sum kept data"]] * 3,
            ["read grad"],
            ["around", 0],
            ["around", 1],
            ["around", 2],
            ["input gradient"],
            ["weight gradient"],
            ["backward to inputs"],
            ["raise in backward"],
            ["evaluate", 0],
            ["evaluate", 2],
            ["evaluate with gradients", 0],
            ["evaluate with gradients", 2],
            ["save"],
            ["roll back"],
            ["copy"],
            ["vector"],
            ["raise in forward"],
            ["raise in loss"],
            ["lr", 2],
            ["add to weights"],
            ["ema"],
        ]
    ),
)
_STEP = st.fixed_dictionaries(
    {
        "zero": st.sampled_from(
            ["none", "none", "none", "zeros", "by hand", "model", "late", "not"]
        ),
        "use": st.sampled_from([[1, 1], [1, 1], [1, 1], [0, 0], [1, 0], [0, 1]]),
        "accumulate": st.sampled_from([0, 0, 0, 1, 2]),
        "clip": st.sampled_from([False] * 7 + [True]),
        "between": st.one_of(st.just([]), st.just([]), st.just([]), st.lists(_ACTS, max_size=1)),
        "after": st.lists(_ACTS, max_size=3),
        "inner": st.sampled_from([""] * 9 + ["vjp", "functional call", "penalty"]),
        "rows": st.sampled_from([ROWS] * 5 + [ROWS - 1]),
        "skip": st.sampled_from([False] * 9 + [True]),
    }
)
# Nothing is deferred in the first steps, which are measured: most programs begin with some of them.
WARM: dict[str, Any] = {
    "zero": "none", "use": [1, 1], "accumulate": 0, "clip": False, "between": [], "after": [],
    "skip": False,
}  # fmt: skip
_ANY = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 16),
        "model": st.sampled_from(["layers", "branches", "norm", "attention", "embedding"]),
        "models": st.sampled_from([1, 1, 1, 2]),
        "optimizer": st.sampled_from(
            ["SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "two", "NAdam"]
        ),
        "unused": st.sampled_from([True, True, False]),
        "views": st.sampled_from([False, False, False, True]),
        "bucket_bytes": st.sampled_from([0, 600, 1 << 20]),
        "frozen": st.sampled_from([None, None, 0, 1]),
        "begin": st.sampled_from([0, 0, 2]),
        "ways": st.sampled_from([["both"], ["both"], ["line"], ["both"], ["door"]]),
        "mode": st.sampled_from([None, None, "exact"]),
        "own": st.sampled_from([None, None, None, 5]),
        "form": st.sampled_from([None] * 5 + [*FORMS]),
        "rank 0 wraps": st.sampled_from([False] * 7 + [True]),
        "compile": st.integers(0, 199).map(lambda number: number == 57),  # takes seconds
        "warm": st.sampled_from([5, 5, 5, 0]),
        "steps": st.lists(_STEP, min_size=3, max_size=8),
    }
)

# With these, steps are deferred.
_DEFERRED: dict[str, Any] = {
    "begin": 0, "warm": 5, "ways": ["both"], "optimizer": "Adam", "form": None,
}  # fmt: skip
# What users do step after step, which chance alone puts together too seldom: parts of the program,
# and of its steps in turns.
HABITS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "thaw later": ({"frozen": 1, "unused": True, "form": None}, []),
    "look at gradients on one rank": (
        {"unused": False, "form": None},
        [{"after": [["around", 0]]}],
    ),
    "restart moments": (
        _DEFERRED,
        [{"after": [["edit state"]], "skip": False}],
    ),
    "torch.func": (
        {**_DEFERRED, "bucket_bytes": 0},
        [{"inner": "vjp", "after": []}, {"inner": "", "after": [], "skip": False}],
    ),
    "keep gradients": (
        {**_DEFERRED, "views": False},
        [
            {"after": [["keep grads"]], "zero": "none"},
            {"after": [["sum kept grads"]], "zero": "not"},
        ],
    ),
    "look at inputs": (
        {"unused": True, "views": False, "form": None},
        [
            {"after": [["keep grads"]], "zero": "none", "use": [0, 0]},
            {"after": [["input gradient"]], "zero": "zeros"},
            {"after": [["sum kept grads"]], "zero": "none"},
        ],
    ),
    "keep weights": (
        _DEFERRED,
        [{"after": [["keep data"]]}, {"after": [["sum kept data"]], "skip": False}],
    ),
    "a branch at times": ({"form": "topk"}, [{"use": [1, 1]}, {"use": [0, 0]}]),
    "a bad batch": ({"form": "auto"}, []),
    "compile": (
        {**_DEFERRED, "compile": True, "models": 1, "bucket_bytes": 0},
        [{**WARM, "rows": rows} for rows in (ROWS, ROWS - 1)],
    ),
    "evaluate on one rank": (
        {"warm": 0, "form": None},
        [{"after": [["evaluate with gradients", 0]]}],
    ),
    "wrap a step on one rank": ({"rank 0 wraps": True, "ways": ["both"], "form": None}, []),
}
_NO_HABIT = [""] * 40
_SELDOM = ("compile",)


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program, of which a third has a habit."""
    program = draw(_ANY)
    often = [name for name in sorted(HABITS) if name not in _SELDOM]
    habit = draw(st.sampled_from([*_NO_HABIT, *often * 2, *_SELDOM]))
    if habit:
        parts, turns = HABITS[habit]
        while len(program["steps"]) < 5:
            program["steps"].append(WARM)
        if turns:
            program["steps"] = [
                {**step, **turns[number % len(turns)]}
                for number, step in enumerate(program["steps"])
            ]
        program.update(parts)
    return program
