"""The trial of the coder's kernels finds one that gives other bits."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from evener.comm.codecs import checks, differences, trial


def try_on_cpu() -> None:
    for dtype in trial.EXPONENT:
        trial._try(torch.device("cpu"), *trial._weights(dtype))


def test_right_kernels_pass() -> None:
    try_on_cpu()
    assert trial.differences_are_right(torch.device("cpu"))


def _second(right: Any, spoil: Any) -> Any:
    """`right` the first time, which is the CPU's; spoilt the second time."""
    calls = []

    def called(*given: Any) -> Any:
        found = right(*given)
        calls.append(found)
        return spoil(found, *given) if len(calls) == 2 else found

    return called


def _bit(found: torch.Tensor, *_: Any) -> torch.Tensor:
    found = found.clone()
    found.view(-1)[-1] ^= 1
    return found


def _word(_: Any, new: Any, old: Any, headers: Any, first: Any, out: torch.Tensor) -> None:
    out[-1] ^= 1


@pytest.mark.parametrize(
    ("module", "name", "spoil", "what"),
    [
        (differences, "plan", _bit, "headers"),
        (differences, "places", _bit, "places"),
        (differences, "write", _word, "words"),
        (checks, "checksum", _bit, "checksums"),
    ],
)
def test_a_wrong_bit_is_found(module: Any, name: str, spoil: Any, what: str) -> None:
    with (
        mock.patch.object(module, name, _second(getattr(module, name), spoil)),
        pytest.raises(ValueError, match=f"1 of .* {what} differ"),
    ):
        try_on_cpu()


def test_a_weight_that_is_read_wrong_is_found() -> None:
    read = differences.read

    def wrong(message: torch.Tensor, weights: torch.Tensor) -> None:
        read(message, weights)
        weights.view(torch.int16)[7] ^= 1

    with (
        mock.patch.object(differences, "read", wrong),
        pytest.raises(ValueError, match="weights differ"),
    ):
        try_on_cpu()


def test_kernels_that_do_not_work_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """No such device: as where a compiler fails."""
    with caplog.at_level(logging.WARNING, "evener.fsdp"):
        assert not trial.differences_are_right(torch.device("meta"))
    assert "do not work on meta" in caplog.text and "weights travel whole" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_of_this_gpu_are_right() -> None:
    assert trial.differences_are_right(torch.device("cuda", 0))
