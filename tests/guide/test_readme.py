"""Every figure of the README beside the record that it comes from, and how far that spreads."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

from tests.guide.blocks import ROOT

RESULTS = ROOT / "benchmarks/results"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows(head: str) -> dict[str, list[float | None]]:
    """The numbers of a table, by the first cell of each row; None for an empty cell."""
    found = re.search(rf"(?m)^\| {re.escape(head)} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", TEXT)
    assert found, f"no table {head!r}"
    table = {}
    for line in found[1].splitlines():
        name, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        table[name.strip()] = [
            float(cell.split()[0].replace(",", "")) if cell else None for cell in cells
        ]
    return table


def rate(cell: dict[str, Any]) -> Any:
    """Median, low and high of samples per second and GPU."""
    return next(v for k, v in cell.items() if k.endswith("_per_second_per_rank"))


def cells(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(cell["row"], cell["column"]): cell for cell in record(name)["cells"]}


COLUMNS = ("ddp", "ddp-ring", "ddp-fp16", "exact", "fp16", "topk")


def test_the_table_of_two_nodes_of_two() -> None:
    found = cells("vgg16-2x2-25gbit")
    shown = rows("images/s per GPU")
    percents = re.findall(r"\((\d+)%\)", TEXT[TEXT.index("| one node: 2 GPUs") :])[:12]
    alone = rate(found["one", "plain"])
    assert alone and shown["1 GPU"][0] == round(alone["median"])
    spread = {"ddp": 0.0, "evener": 0.0}
    for at, (row, title) in enumerate((("node", "one node: 2 GPUs"), ("all", "2 nodes x 2 GPUs"))):
        for column, value, percent in zip(
            COLUMNS, shown[title], percents[6 * at : 6 * at + 6], strict=True
        ):
            it = rate(found[row, column])
            assert it and it["count"] == 3 and value == round(it["median"]), (row, column)
            assert int(percent) == round(100 * it["median"] / alone["median"]), (row, column)
            away = max(it["high"] - it["median"], it["median"] - it["low"]) / it["median"]
            kind = "ddp" if column.startswith("ddp") else "evener"
            spread[kind] = max(spread[kind], away)
    sent = [round(found["all", column]["sent_bytes_per_step"] / 1e6) for column in COLUMNS]
    assert shown["MB per node and step"] == sent
    said = re.search(r"within (\d+)% of them for Evener and (\d+)% for DDP", TEXT)
    assert said and spread["evener"] <= int(said[1]) / 100 and spread["ddp"] <= int(said[2]) / 100


# Row > the record of each column, in the table's order.
PLANNED = {
    "VGG16, TF32": ("vgg16-nvlink", *["vgg16-2x1-25gbit"] * 4),
    "ResNet-50": (None, *["resnet50-2x1-25gbit"] * 4),
    "ViT-B/16": (None, *["vit_b_16-2x1-25gbit"] * 4),
    "GPT-2 small": (None, *["gpt2-2x1-25gbit-whole"] * 3, "gpt2-2x1-25gbit"),
    "BERT-base": (None, *["bert-base-2x1-25gbit"] * 4),
}


def test_the_table_of_what_is_planned() -> None:
    shown = rows("samples/s per GPU")
    assert shown.keys() == PLANNED.keys()
    names = ("ddp", "ddp", "ddp-fp16", "ddp-powersgd", "auto-int8")
    widest, steps = 0.0, set()
    for title, sources in PLANNED.items():
        for name, source, value in zip(names, sources, shown[title], strict=True):
            if source is None:
                assert value is None
                continue
            row = "node" if source.endswith("nvlink") else "all"
            it = rate(cells(source)[row, name])
            assert it and value == round(it["median"]), (title, name, it)
            for run in record(source)["runs"]:
                if (run["row"], run["column"]) == (row, name):
                    for rank in run["ranks"]:
                        low, middle, high = statistics.quantiles(rank["step_ms"], n=4)
                        widest = max(widest, (high - low) / 2 / middle)
                        steps.add(rank["steps"])
    said = re.search(r"One run of (\d+) steps a cell \(VGG16: (\d+)\).* within (\d+)%", TEXT)
    assert said and steps == {int(said[1]), int(said[2])}
    assert widest <= int(said[3]) / 100


def test_single_figures() -> None:
    trainer = record("trainer-gpt2-2x1-25gbit")
    took, ddp = trainer["evener"]["step_ms"], trainer["ddp"]["step_ms"]
    assert f"[{took:.0f} ms per step instead of DDP's {ddp:.0f}]" in TEXT
    medians = f"medians of {trainer['evener']['median_of']} and {trainer['ddp']['median_of']} steps"
    assert medians in TEXT

    tests = record("upstream-horovod-cpu")["tests"]
    passed = sum(test["status"] == "pass" for test in tests)
    assert f"[{passed} of upstream's {len(tests)} tests pass]" in TEXT

    def share(name: str, row: str) -> tuple[float, int]:
        rows = record(name)["rows"]
        (one, base) = (rows[key]["passes"]["1"] for key in (row, "nvlink"))
        return one["tokens_per_second"] / base["tokens_per_second"], len(one["step_ms"])

    exact, int4 = (share("fsdp-ethernet", row) for row in ("exact:gpu", "int4:gpu"))
    plain = share("fsdp-ethernet-sockets", "sockets")
    said = f"[{exact[0]:.2f} of NVLink's speed over 25 Gb/s, {int4[0]:.2f} with gradients in INT4"
    assert f"{said}, where FSDP2 alone has {plain[0]:.2f}]" in TEXT
    assert exact[1] == int4[1] and f"medians of {int4[1]} and {plain[1]} steps |" in TEXT

    beside = {**record("zero-beside-x4")["rows"], **record("zero-beside-14b")["rows"]}

    def times(ours: str, theirs: str) -> float:
        rates = [beside[row]["tokens_per_second"] for row in (ours, theirs)]
        return float(rates[0] / rates[1])

    large = times("14B, evener", "14B, DeepSpeed, all bf16")
    small = times("8B, evener", "8B, DeepSpeed, FP32 states")
    said = f"[{large:.1f} and {small:.1f} times the tokens of DeepSpeed's offload at 14B and 8B, "
    largest = next(r for k, r in record("zero-largest-h200")["rows"].items() if "40.3B" in k)
    plan = largest["plan"]
    said += f"{plan['parameters'] // 10**9}B parameters in {plan['gpu_planned'] // 10**9} GB of an "
    said += f"H200 and {plan['host_planned'] / 1e9:.0f} GB of host memory]"
    assert said in TEXT

    ratios = []
    for case in record("moe-layer")["cases"]:
        took = case["layer_ms"]
        ratios.append(min(v for k, v in took.items() if k != "ours") / took["ours"])
    assert f"[{min(ratios):.1f} to {max(ratios):.1f} x the speed of the best other layer]" in TEXT

    size = next(
        cell["sizes"][str(256 << 20)]
        for cell in record("net-gpu")["cells"]
        if cell["name"] == "one-path" and cell["variant"] == "evener"
    )
    # 25 Gb/s less the headers of Ethernet, IP and TCP at an MTU of 1500.
    assert f"[{size['algbw_GBps']:.2f} of 2.99 GB/s over 25 Gb/s]" in TEXT
    away = max(abs(s / size["median_s"] - 1) for s in size["samples_s"])
    assert f"{len(size['samples_s'])} samples within {100 * away:.0f}%" in TEXT


def test_every_figure_is_in_one_of_these_tests() -> None:
    """A number with a unit, a comma or a decimal point that no test above knows is a new one."""
    text = re.sub(r"(?ms)^```.*?^```$", "", TEXT)
    text = re.sub(r"(?m)^\|.*\n", lambda m: "" if m[0].count("|") > 5 else m[0], text)
    left = re.findall(r"\b\d[\d,.]*(?: ms| MB| GB/s| tokens/s| x)\b", re.sub(r"\[.*?\]", "", text))
    assert not left, left
