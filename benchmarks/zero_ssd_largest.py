"""The largest Llama shape without and with an SSD, found by plan and then trained.

    python benchmarks/zero_ssd_largest.py FOLDER [--gpu 4GB --host 14GB --ssd 36GB] [--json FILE]

For each of the two: the machine is measured, the most layers of width 2560 that fit are searched
by plan, one layer more must be refused, and the largest is trained for --steps steps of 1 x 1024
tokens with float32 masters and moments, clipping and blocks recomputed as the plan says. Reported:
peaks of GPU and host against the plan; bytes that were read and written per step against the plan;
seconds per step against the bound backward + max(forward, bytes / the file's measured rate of both
at once). Each runs in a process of its own, so that the host's peak is its own. GB are 1e9 bytes.

--tiny: the same code on a CPU, with limits of megabytes. It checks itself, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from zero_models import VOCABULARY, host_peak, loss_of, on_meta, ran
from zero_ssd import GB, value_of

from evener import zero
from evener.zero import ssd

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}


class Case:
    """One of the two searches; `limits`: the budget."""

    def __init__(self, width: int, limits: dict[str, str]) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        self.width = width
        self.length = 1024 if cuda else 64
        self.budget: dict[str, str | int] = dict(limits)
        own = {"checkpointing": "auto", "loss": "chunked", "rehearse": False}
        self.config = {
            **CONFIG,
            "evener": {**own, "device": "cuda" if cuda else "simulated", "budget": self.budget},
        }
        self.machine = zero.probe(self.device).machine
        self.rates: ssd.Rates | None = None
        if "ssd" in limits:
            folder = limits["ssd"].rpartition(":")[0]
            self.rates = ssd.measure(folder, 4 * GB if cuda else 64 << 20, 3.0 if cuda else 0.2)
            self.machine = replace(self.machine, ssd=self.rates.both)

    def plan(self, layers: int) -> zero.Plan:
        """That of a model of this many layers."""
        return zero.plan(
            on_meta(layers, self.width), config=self.config, budget=self.budget,
            batch=(1, self.length), machine=self.machine,
        )  # fmt: skip

    def search(self, top: int) -> int:
        """The most layers that fit."""
        low, high = 0, top + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.plan(middle).fits else (low, middle)
        if not 0 < low < top:
            sys.exit(f"error: {low} layers fit of 1 to {top}\n  fix: change the limits or --layers")
        return low

    def engine(self, layers: int) -> zero.Engine:
        """Ready to train. Raises NoFitError."""
        return zero.initialize(
            model=on_meta(layers, self.width), config=self.config, weights=value_of,
            batch=(1, self.length), machine=self.machine,
        )[0]  # fmt: skip

    def idle(self, engine: zero.Engine) -> None:
        """Nothing is under way."""
        engine.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self, layers: int, steps: int) -> dict[str, Any]:
        """Losses, bytes and seconds of each step, and peaks."""
        begun = time.perf_counter()
        engine = self.engine(layers)
        took = time.perf_counter() - begun
        plan = engine.plan
        assert plan is not None
        generator = torch.Generator(self.device).manual_seed(0)
        tokens = torch.randint(
            0, VOCABULARY, (1, self.length), device=self.device, generator=generator
        )
        try:
            rows = []
            for _ in range(steps):
                before = engine.memory()
                self.idle(engine)
                start = time.perf_counter()
                loss = loss_of(engine, tokens)
                self.idle(engine)
                forward = time.perf_counter()
                engine.backward(loss)
                self.idle(engine)
                backward = time.perf_counter()
                engine.step()
                self.idle(engine)
                end = time.perf_counter()
                after = engine.memory()
                rows.append({
                    "loss": loss.item(),
                    "forward": forward - start,
                    "backward": backward - forward,
                    "optimizer": end - backward,
                    "seconds": end - start,
                    "read": after["ssd read"] - before["ssd read"],
                    "written": after["ssd written"] - before["ssd written"],
                })  # fmt: skip
            peaks = engine.memory()
        finally:
            engine.close()
        return {
            "layers": layers,
            "parameters": sum(place.numel for place in plan.places),
            "prepared_s": took,
            "steps": rows,
            "gpu": {
                "budget": plan.budget.gpu,
                "planned": plan.gpu_bytes,
                "peak": peaks["gpu peak"],
            },
            "host": {"planned": plan.host_bytes, "peak": host_peak()},
            "file": plan.ssd_bytes,
            "again": peaks["passes run again"],
        }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    limits = {"gpu": given.gpu, "host": given.host}
    if given.case == "with":
        limits["ssd"] = f"{given.folder}:{given.ssd}"
    case = Case(given.width, limits)
    begun = time.perf_counter()
    layers = case.search(given.layers)
    found: dict[str, Any] = {"searched_s": time.perf_counter() - begun}
    try:
        case.engine(layers + 1).close()
        found["refused"] = ""
    except zero.NoFitError as error:
        found["refused"] = str(error)
    found |= case.train(layers, given.steps)
    if case.rates is not None:
        found["rates"] = vars(case.rates)
    return found


def show(name: str, found: dict[str, Any]) -> list[str]:
    """Print a case; what is not as it must be."""
    wrong = []
    gpu, host = found["gpu"], found["host"]
    print(
        f"{name} an SSD: {found['layers']} layers, {found['parameters'] / 1e9:.2f} B parameters "
        f"(searched {found['searched_s']:.0f} s, ready in {found['prepared_s']:.0f} s)\n"
        f"  one layer more: {found['refused'].splitlines()[0] if found['refused'] else 'TRAINS'}\n"
        f"  GPU {gpu['peak'] / GB:.2f} GB of {gpu['planned'] / GB:.2f} planned, host "
        f"{host['peak'] / GB:.2f} of {host['planned'] / GB:.2f}; passes run again {found['again']}"
    )
    for number, row in enumerate(found["steps"], 1):
        moved = row["read"] + row["written"]
        said = ""
        if moved:
            bound = row["backward"] + max(row["forward"], moved / found["rates"]["both"])
            row["bound"] = bound
            said = (
                f"; {row['read'] / GB:.3f} GB read and {row['written'] / GB:.3f} written, plan "
                f"{found['file'] / GB:.3f} each; {moved / row['optimizer'] / GB:.2f} GB/s of "
                f"{found['rates']['both'] / GB:.2f}; bound {bound:.2f} s: "
                f"{row['seconds'] / bound:.2f} x"
            )
        print(f"  step {number}: loss {row['loss']:.4f}, {row['seconds']:.2f} s{said}", flush=True)
        if not math.isfinite(row["loss"]):
            wrong.append(f"{name}: the loss is {row['loss']}")
        if not row["read"] <= found["file"] or not row["written"] <= found["file"]:
            wrong.append(f"{name}: more bytes than planned")
    if not found["refused"]:
        wrong.append(f"{name}: one layer more was not refused")
    if gpu["peak"] > gpu["budget"]:
        wrong.append(f"{name}: GPU over the budget")
    return wrong


def main() -> int:
    """Measure and print; 1 where something is not as planned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="4GB")
    parser.add_argument("--host", default="14GB")
    parser.add_argument("--ssd", default="36GB")
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=80, help="where the search ends")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", choices=("without", "with"), help="in this process")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.folder.is_dir():
        sys.exit(f"error: {given.folder} is no folder\n  fix: give one on the SSD")
    if given.tiny:
        given.gpu, given.host, given.ssd = "170MB", "520MB", "600MB"
        given.width, given.layers = 256, 60
    elif not torch.cuda.is_available():
        sys.exit("error: there is no GPU here\n  fix: --tiny checks the program on a CPU")
    if given.case:
        print("found:" + json.dumps(run(given)))
        return 0
    record = ran()
    record["limits"] = {n: getattr(given, n) for n in ("gpu", "host", "ssd")}
    wrong: list[str] = []
    for case in ("without", "with"):
        done = subprocess.run(
            [
                sys.executable, __file__, str(given.folder), "--case", case, "--gpu", given.gpu,
                "--host", given.host, "--ssd", given.ssd, "--width", str(given.width),
                "--layers", str(given.layers), "--steps", str(given.steps),
                *(["--tiny"] if given.tiny else []),
            ],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode or not last.startswith("found:"):
            print(f"{case} an SSD: failed (exit status {done.returncode})")
            return 1
        record[case] = json.loads(last.removeprefix("found:"))
        wrong += show(case, record[case])
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    ratio = record["with"]["parameters"] / record["without"]["parameters"]
    print(f"with an SSD {ratio:.2f} x as large")
    for text in wrong:
        print(f"NOT as planned: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
