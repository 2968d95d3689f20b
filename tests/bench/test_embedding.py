"""`evener bench embedding`: figures for what is installed, words for what is not."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from evener.tools.bench.embedding import peers
from evener.tools.bench.embedding.command import draw, embedding


def test_peers_that_are_there_and_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rows: int, dim: int) -> peers.Made:
        raise RuntimeError("no such kernel")

    some = (*peers.PEERS[:2], peers.Peer("gone", "no_such_module", broken))
    some = (*some, peers.Peer("broken", "torch", broken))
    monkeypatch.setattr("evener.tools.bench.embedding.command.PEERS", some)
    small = ["--rows", "2000", "--batch", "256", "--seconds", "0"]
    done = CliRunner().invoke(embedding, [*small, "--json"], catch_exceptions=False)
    found = {each["peer"]: each for each in json.loads(done.output)["results"]}
    for name in ("evener", "nn.Embedding(sparse)"):
        assert found[name]["lookup"] > 0 and found[name]["step"] > 0
    assert found["gone"]["skipped"] == "no_such_module is not installed"
    assert found["broken"]["skipped"] == "RuntimeError: no such kernel"
    shown = CliRunner().invoke(embedding, small, catch_exceptions=False).output
    assert "left out: gone: no_such_module is not installed" in shown
    assert "1.00 x" in shown


@pytest.mark.parametrize("zipf", [0.0, 1.05])
def test_ids_are_in_range_and_skewed_where_asked(zipf: float) -> None:
    (ids,) = draw(1000, 50_000, zipf, 1)
    assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < 1000
    most = np.bincount(ids).max() / len(ids)
    assert most > 0.1 if zipf else most < 0.003
