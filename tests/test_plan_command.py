"""`evener plan`: what it prints follows the model and the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.cli import evener
from evener.comm.profile import BucketProfile, StepProfile


def plan(*arguments: str) -> dict:
    done = CliRunner().invoke(evener, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict = json.loads(done.stdout)
    return found


def row(found: dict, mode: str, nodes: int = 2) -> dict:
    return next(r for r in found["rows"] if r["mode"] == mode and r["nodes"] == nodes)


def test_embeddings_are_taken_apart() -> None:
    """GPT-2's tied embedding: its output's part is there early, the rest is few rows."""
    given = ("--model", "gpt2", "--compute-ms", "65", "--batch-size", "8", "--floor", "int8")
    found = plan(*given, "--nodes", "2x1,16x8", "--network", "25gbit")
    steps = {(row["nodes"], row["mode"]): row for row in found["rows"]}
    whole = len(found["profile"]["buckets"])
    assert len(steps[2, "int8 + overlap"]["choices"]) > whole, "by rows"
    assert len(steps[2, "int8"]["choices"]) == whole, "without overlap nothing is hidden by it"
    assert len(steps[2, "topk + overlap"]["choices"]) == whole, "sparse already"
    assert len(steps[16, "int8 + overlap"]["choices"]) == whole, "too many rows of too many ranks"


def test_a_model_from_its_shapes() -> None:
    found = plan("--model", "vgg-tiny", "--compute-ms", "60", "--batch-size", "8",
                 "--network", "300mbit", "--nodes", "2x1,4x1", "--bucket-mb", "1")  # fmt: skip
    buckets = found["profile"]["buckets"]
    # 1,603,114 parameters in FP32; the last layers are complete first and needed last.
    assert sum(b["numel"] * b["itemsize"] for b in buckets) == 4 * 1_603_114
    assert buckets[0]["ready_ms"] < buckets[-1]["ready_ms"]
    assert buckets[0]["need_ms"] > buckets[-1]["need_ms"] == 0
    exact = row(found, "exact")
    sent_ms = 4 * 1_603_114 * 8 / 300e6 / 0.94 * 1e3  # 2 (N-1)/N = 1 with two nodes
    assert sent_ms < exact["step_ms"] < sent_ms + 60 + 5
    assert row(found, "exact", 4)["step_ms"] > 1.3 * exact["step_ms"]
    assert row(found, "exact + overlap")["step_ms"] < exact["step_ms"]
    auto = row(found, "auto, floor int8")
    assert auto["step_ms"] < row(found, "fp16")["step_ms"] < exact["step_ms"]
    fast = plan("--model", "vgg-tiny", "--compute-ms", "60", "--network", "400gbit")
    assert {c["form"] for c in row(fast, "auto, floor int8")["choices"]} == {"exact"}


def test_the_batch_is_the_models_own_where_none_is_given() -> None:
    given = ("--compute-ms", "65", "--nodes", "2x1", "--network", "25gbit")
    found = plan("--model", "gpt2", *given)
    assert found["given"]["batch_size"] == 8
    assert "gpt2, batch 8," in found["source"]
    assert plan("--model", "mlp-tiny", *given)["given"]["batch_size"] == 128
    assert plan("--model", "gpt2", "--batch-size", "2", *given)["given"]["batch_size"] == 2


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    StepProfile(10, 20, 2, (BucketProfile("w", 1 << 20, 4, 20, 0),)).save(path)
    found = plan("--profile", str(path), "--network", "10gbit")
    assert row(found, "exact")["compute_ms"] == pytest.approx(32)
    scaled = plan("--profile", str(path), "--network", "10gbit", "--compute-ms", "64")
    assert row(scaled, "exact")["compute_ms"] == pytest.approx(64)
    done = CliRunner().invoke(evener, ["plan", "--profile", str(path)])
    assert done.exit_code == 0 and "ms per step expected" in done.stdout
    assert "steps/s" in done.stdout, "its batch is not known"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "2x2"], "either --model or --profile"),
        (["--model", "mlp-tiny", "--nodes", "2y2", "--compute-ms", "1"], "'2y2' is not a cluster"),
        (["--model", "mlp-tiny", "--network", "fast", "--compute-ms", "1"], "not a rate"),
        (["--model", "mlp-tiny", "--network", "25", "--compute-ms", "1"], "'25' has no unit"),
        (["--model", "mlp-tiny", "--network", "25GB", "--compute-ms", "1"], "'25GB' is a size"),
        (["--model", "no-such", "--compute-ms", "1"], "no model 'no-such'"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(evener, ["plan", *arguments])
    assert done.exit_code != 0
    assert said in (done.output + str(done.exception) + getattr(done.exception, "fix", ""))
