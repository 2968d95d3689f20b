"""The benchmark on GPUs: NCCL's choices are read, CUDA's clock runs, the guard holds under TF32."""

import json

import pytest

from evener.tools.bench.train import clusters
from evener.tools.bench.train.results import Results
from tests.bench.test_train_run import evener

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(clusters.count_gpus({}) < 2, reason="needs two GPUs"),
]


def test_two_gpus_measure_and_say_what_nccl_chose() -> None:
    shown = evener(
        "--model", "resnet18", "--batch-size", "32", "--steps", "5", "--warmup", "3",
        "--repeats", "1", "--processes", "2", "--columns", "ddp,ring,exact,fp16,topk,ddp-powersgd",
        "--json", "-",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(shown.stdout))
    assert taken.complete
    assert taken.settings["device"] == "cuda"
    assert {"torch", "nccl", "cuda", "gpu"} <= set(taken.versions)
    for run in taken.runs:
        assert run.equal
        assert all(len(rank["step_ms"]) == 5 for rank in run.ranks)
    ring = next(run for run in taken.runs if run.column == "ddp-ring")
    large = [entry for entry in ring.nccl["tuned"] if entry["bytes"] > 1 << 20]
    assert large and {entry["algorithm"] for entry in large} == {"RING"}
    assert not ring.nccl["unread_lines"]
