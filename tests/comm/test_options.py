"""Arguments over variables over defaults, and what is refused."""

import pytest

from evener.base.settings import SettingError
from evener.comm.options import Options
from evener.errors import UsageError


def test_the_default_is_lossless() -> None:
    options = Options.resolve(env={})
    assert (options.algorithm, options.wire) == ("auto", "exact")
    assert (options.topk_min_bytes, options.two_level_max_bytes) == (1 << 20, 1 << 30)


def test_a_variable_wins_over_an_argument_and_an_argument_over_the_default() -> None:
    env = {"LIGHT_2D_ALLREDUCE": "0", "LIGHT_TOPK_ALLREDUCE": "1", "LIGHT_TOPK_RATIO": "0.1"}
    found = Options.resolve(env=env, algorithm="2d", wire="fp16", ratio=0.5)
    assert (found.algorithm, found.wire, found.ratio) == ("flat", "topk", 0.1)
    found = Options.resolve(env={}, algorithm="2d", wire="fp16", ratio=0.5)
    assert (found.algorithm, found.wire, found.ratio) == ("2d", "fp16", 0.5)
    assert Options.resolve(env={}, default_algorithm="flat").algorithm == "flat"


@pytest.mark.parametrize(
    ("value", "asked", "becomes"),
    [
        ("1", "topk-chunk", "topk-chunk"),  # both top-k forms are what the variable asks for
        ("1", None, "topk"),
        ("0", "topk", "exact"),
        ("0", "topk-chunk", "exact"),
        ("0", "int8", "int8"),
    ],
)
def test_light_topk_allreduce_turns_top_k_on_and_off(
    value: str, asked: str | None, becomes: str
) -> None:
    assert Options.resolve(env={"LIGHT_TOPK_ALLREDUCE": value}, wire=asked).wire == becomes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHT_TOPK_RATIO", "7"),
        ("EVENER_GUARD_COSINE", "2"),
        ("LIGHT_INTRA_SIZE", "0"),
        ("EVENER_TIMEOUT", "x"),
    ],
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
        {"momentum": 1.0},
        {"warmup_steps": -1},
        {"bucket_bytes": -1},
        {"predivide": 2.0, "average": False},
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]


def test_what_carries_the_exchange() -> None:
    assert Options.resolve(env={}).outer == "auto"
    assert Options.resolve(env={"EVENER_OUTER": "Staged"}).outer == "staged"
    with pytest.raises(UsageError, match="auto or nccl or staged"):
        Options.resolve(env={"EVENER_OUTER": "rdma"})
    with pytest.raises(UsageError, match="outer='rdma' cannot be"):
        Options(outer="rdma")
