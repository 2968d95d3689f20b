"""Arguments over variables over defaults, and what is refused."""

import pytest

from evener.comm.options import Options
from evener.errors import UsageError
from evener.settings import SettingError


def test_the_default_is_lossless() -> None:
    options = Options.resolve(env={})
    assert (options.algorithm, options.wire) == ("auto", "exact")
    assert (options.topk_min_bytes, options.two_level_max_bytes) == (1 << 20, 1 << 30)


def test_an_argument_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    env = {"LIGHT_2D_ALLREDUCE": "0", "LIGHT_TOPK_ALLREDUCE": "1", "LIGHT_TOPK_RATIO": "0.1"}
    found = Options.resolve(env=env)
    assert (found.algorithm, found.wire, found.ratio) == ("flat", "topk", 0.1)
    found = Options.resolve(env=env, algorithm="2d", wire="fp16", ratio=0.5)
    assert (found.algorithm, found.wire, found.ratio) == ("2d", "fp16", 0.5)
    assert Options.resolve(env={}, default_algorithm="flat").algorithm == "flat"


@pytest.mark.parametrize(
    ("name", "value"),
    [("LIGHT_TOPK_RATIO", "7"), ("LIGHT_INTRA_SIZE", "0"), ("EVENER_TIMEOUT", "x")],
)
def test_a_variable_that_cannot_be_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"{name}='{value}'"):
        Options.resolve(env={name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"algorithm": "3d"},
        {"wire": "fp12"},
        {"ratio": 0.0},
        {"bucket_bytes": -1},
        {"predivide": 2.0, "average": False},
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]
