"""Models of text, and what encoding and decoding take of a step."""

from __future__ import annotations

import json

import pytest
import torch

from evener.tools.bench.train import coding, models, table
from evener.tools.bench.train.results import Results
from tests.bench.test_train_figures import FIXED, made
from tests.bench.test_train_run import evener


@pytest.mark.parametrize("name", [*models.TEXT])
def test_sizes_are_what_the_listing_says(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
    assert sum(p.numel() for p in model.parameters()) == models.TEXT[name].parameters


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_every_parameter_gets_a_gradient_and_the_loss_falls(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name)
    inputs, targets = models.data(name, 4, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = models.criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert losses[-1] < losses[0] - 0.1


def test_gpt_does_not_see_what_it_shall_guess() -> None:
    torch.manual_seed(0)
    model = models.build("gpt-tiny")
    symbols, _ = models.data("gpt-tiny", 1, "cpu")
    changed = symbols.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 96
    before, after = model(symbols), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_bert_guesses_masked_symbols_only() -> None:
    torch.manual_seed(0)
    symbols, targets = models.data("bert-tiny", 32, "cpu")
    wanted = targets != -100
    assert 0.1 < wanted.float().mean() < 0.2
    assert wanted.any(1).all()
    assert (symbols[wanted] == 0).all()


def test_text_is_counted_in_sequences_and_tokens() -> None:
    """In a compressed form: embeddings and ties are what images do not have."""
    shown = evener(
        "--device", "cpu", "--model", "gpt-tiny", "--batch-size", "2", "--steps", "3", "--warmup",
        "1", "--repeats", "1", "--processes", "2", "--rows", "node", "--columns", "int8",
        "--json", "-",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(shown.stdout))
    assert taken.complete
    assert taken.settings["trace"] == "", "no trace was asked for"
    assert taken.settings["gradient_bytes"] == 4 * models.TEXT["gpt-tiny"].parameters
    drawn = table.grid(taken)
    assert drawn.unit == "sequences/s per process"
    labels = [label for label, _ in drawn.extras]
    assert "sequences/s in total" in labels and "tokens/s in total" in labels
    assert "sequences/s per process" in shown.stderr
    assert "sequences_per_second_per_rank" in json.loads(shown.stdout)["cells"][0]


def test_text_takes_no_options_of_images() -> None:
    shown = evener("--device", "cpu", "--model", "gpt-tiny", "--image-size", "32")
    assert shown.returncode == 2
    assert "--image-size" in shown.stderr


def test_coding_is_counted_by_kernels_and_by_what_clears_memory_beside_them() -> None:
    names = coding.kernels()
    assert {"_accumulate", "_select", "_add_entries"} <= names
    ran = [
        ("_accumulate", 20, 200.0),
        ("Memset (Device)", 20, 50.0),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", 20, 30.0),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", 7, 1000.0),
        ("ncclDevKernel_AllGather_RING_LL", 20, 5000.0),
        ("sm90_xmma_gemm", 7, 9000.0),
        ("_add_entries", 20, 60.0),
    ]
    assert coding.milliseconds(ran, names) == pytest.approx(0.34)
    assert coding.milliseconds([("sm90_xmma_gemm", 7, 9000.0)], names) == 0


def test_the_share_stands_below_the_table() -> None:
    found = made(FIXED, change={"topk": {"coding_ms": 0.2}})
    assert found.rows[-1].ranks > 1
    cell = found.cell(found.rows[-1], "topk")
    assert cell is not None and cell.rate is not None
    assert cell.coding_share == pytest.approx(0.2 / (8000 / cell.rate.median), rel=0.05)
    notes = " ".join(table.grid(found).notes)
    assert "Encoding and decoding" in notes and "topk 2." in notes
