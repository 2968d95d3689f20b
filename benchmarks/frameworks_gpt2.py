"""GPT-2 small under Trainer, Accelerate and Lightning by the door alone, beside a bare loop.

    python benchmarks/frameworks_gpt2.py                  # two GPUs, 25 Gb/s, about two minutes
    python benchmarks/frameworks_gpt2.py --columns bare,accelerate --rate 10gbit
    python benchmarks/frameworks_gpt2.py --tiny --rate 300mbit    # on CPUs, with a small model

Two simulated nodes of one GPU (`evener lab`). All columns train the same model on the same loader,
with AdamW, bf16 and clipping to a norm of 1; one job trains a column after another. `bare` is a
loop with `evener.ddp.accelerate(model, optimizer, mode="auto", floor="int8")`. The others know
nothing of Evener: EVENER_DDP=auto and EVENER_FLOOR=int8 are all. A column is measured for `--steps`
steps once the planner has decided, between two moments at which the device has done everything; the
slower rank counts. Trained weights must be equal on both ranks, bit for bit.

A framework that is not installed is left out, and said. Needs transformers, for the model.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

COLUMNS = ("bare", "trainer", "accelerate", "lightning")
PACKAGES = {"trainer": "accelerate", "accelerate": "accelerate", "lightning": "lightning"}
_MARK = "COLUMN "
_LEAST, _MOST = 12, 400  # steps before a column is measured
_GOAL = 0.97


class Meter:
    """Says when a column has trained enough, and how long its steps took."""

    def __init__(self, steps: int, gpu: bool) -> None:
        self.steps, self.gpu = steps, gpu
        self.done = 0
        self.began: float | None = None
        self.left = 0
        self.ms = 0.0
        self.plan: dict[str, Any] = {}

    def planner(self) -> Any:
        """Of the model that is trained now."""
        from evener.accelerated import _LIVE

        found = [model.evener_steps.planner for model in _LIVE]
        return found[0] if found else None

    def step(self) -> bool:
        """A step is over; whether to stop. Equal on all ranks: they decide in the same step."""
        import torch

        self.done += 1
        if self.began is None:
            planner = self.planner()
            decided = planner is not None and planner.kept is not None
            if (decided and self.done >= _LEAST) or self.done == _MOST:
                self._wait(torch)
                self.began, self.left = time.perf_counter(), self.steps
            return False
        self.left -= 1
        if self.left:
            return False
        self._wait(torch)
        self.ms = 1e3 * (time.perf_counter() - self.began) / self.steps
        if (planner := self.planner()) is not None and planner.kept is not None:
            self.plan = {
                "kept": planner.kept.name,
                "expected_ms": round(planner.decision.step_ms, 1),
                "compute_ms": round(planner.decision.compute_ms, 1),
                "tried": {name: round(ms, 1) for name, (_, ms) in planner.tried.items()},
                "looked_at": planner.looked_at,
            }
        return True

    def _wait(self, torch: Any) -> None:
        if self.gpu:
            torch.cuda.synchronize()


# --- in the nodes ---


def worker(given: argparse.Namespace) -> None:
    """One rank: all columns."""
    rank = int(os.environ["RANK"])
    if not given.tiny:  # the lab's nodes share the GPUs of one machine; each is to see its own
        seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[rank % len(seen)]
    os.environ |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "frameworks",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "EVENER_GUARD_STEPS": "0",  # one check in so few steps would count
    }
    import torch
    import torch.distributed as dist

    gpu = not given.tiny
    if gpu:
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    control = dist.new_group(backend="gloo")
    for name in given.columns.split(","):
        meter = Meter(given.steps, gpu)
        torch.manual_seed(0)
        problem = ""
        try:
            model = globals()[f"_{name}"](given, meter)
            digest = _digest(model)
            del model
        except Exception as error:  # noqa: BLE001 - the other columns go on
            problem, digest = f"{type(error).__name__}: {error}"[:400], ""
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (problem, digest, meter.ms), group=control)
        problems = [why for why, _, _ in told if why]
        cell = {"column": name, "step_ms": max(ms for _, _, ms in told), "plan": meter.plan}
        cell |= {"steps_before": meter.done - given.steps}
        if problems or told[0][1] != told[1][1]:
            cell["error"] = problems[0] if problems else "the ranks' weights differ"
        if rank == 0:
            print(_MARK + json.dumps(cell), flush=True)
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    from evener.door.models import _at_end

    _at_end(os.getpid())  # the door's last lines
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # groups of NCCL's take seconds to end, and nothing is left to say


def _digest(model: Any) -> str:
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(raw.cpu().numpy().data)
    return digest.hexdigest()


def _model(given: argparse.Namespace) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512} if given.tiny else {}
    return GPT2LMHeadModel(GPT2Config(**small, use_cache=False))


def _data(given: argparse.Namespace) -> Any:
    import torch

    length, most = (32, 512) if given.tiny else (512, 50_000)

    class Tokens(torch.utils.data.Dataset):
        """Random ones, by number."""

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            seeded = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, most, (length,), generator=seeded)
            return {"input_ids": tokens, "labels": tokens}

    return Tokens()


def _loader(given: argparse.Namespace, sharded: bool) -> Any:
    """`sharded`: by this loader itself, and not by a framework."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    data = _data(given)
    return DataLoader(
        data,
        batch_size=given.batch,
        sampler=DistributedSampler(data, shuffle=False) if sharded else None,
        num_workers=2,
        pin_memory=not given.tiny,
    )


def _moved(loader: Iterable[Any], device: str) -> Iterable[Any]:
    for batch in loader:
        yield {name: part.to(device, non_blocking=True) for name, part in batch.items()}


def _bare(given: argparse.Namespace, meter: Meter) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import evener.ddp

    device = "cpu" if given.tiny else "cuda"
    net = _model(given).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    model = DistributedDataParallel(net)
    model = evener.ddp.accelerate(model, optimizer, mode="auto", floor="int8")
    for batch in _moved(_loader(given, True), device):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if meter.step():
            break
    model.evener_steps.finish("")
    return net


def _trainer(given: argparse.Namespace, meter: Meter) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = meter.step()

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=given.batch,
        max_steps=_MOST + given.steps + 1,
        bf16=True,
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2,
        use_cpu=given.tiny,
    )
    net = _model(given)
    Trainer(net, arguments, train_dataset=_data(given), callbacks=[Stops()]).train()
    return net


def _accelerate(given: argparse.Namespace, meter: Meter) -> Any:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # Trainer's, of the column before
    accelerator = Accelerator(mixed_precision="bf16", cpu=given.tiny)
    net = _model(given)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(net, optimizer, _loader(given, False))
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if meter.step():
            break
    return net


def _lightning(given: argparse.Namespace, meter: Meter) -> Any:
    import lightning
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model(given)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.trainer.should_stop = meter.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu" if given.tiny else "gpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=_MOST + given.steps + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, _loader(given, False))
    return module


# --- outside of them ---


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--rate", default="25gbit", help="of a node's link")
    parser.add_argument("--steps", type=int, default=40, help="that are measured")
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank")
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPUs")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(argparse.Namespace(**json.loads(given.worker)))
        return 0
    if importlib.util.find_spec("transformers") is None:
        print("error: transformers is not installed\nfix: pip install transformers accelerate")
        return 2
    columns = []
    for name in given.columns.split(","):
        package = PACKAGES.get(name, "transformers")
        if name not in COLUMNS:
            print(f"error: there is no {name}\nfix: choose from {', '.join(COLUMNS)}")
            return 2
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, because {package} is not installed")
        else:
            columns.append(name)
    given.columns = ",".join(columns)
    cells = _run(given)
    print(_table(cells))
    if given.json:
        given.json.write_text(json.dumps(_record(given, cells), indent=1) + "\n", encoding="utf-8")
    return 0


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    from evener.lab import Lab, Spec

    cells: list[dict[str, Any]] = []

    def on_line(rank: int, node: str, _: str, line: str) -> None:
        if line.startswith(_MARK):
            cells.append(json.loads(line.removeprefix(_MARK)))
            print(f"  {cells[-1]}"[:300], flush=True)
        elif "plan: kept" in line or "EVENER_DDP" in line or "Error" in line:
            print(f"    [{rank}@{node}] {line.rstrip()[:300]}", flush=True)

    told = {k: v for k, v in vars(given).items() if k not in ("json", "worker")}
    argv = [sys.executable, __file__, "--worker", json.dumps(told)]
    from evener.door.enter import SITE

    path = os.pathsep.join(p for p in (str(SITE), os.environ.get("PYTHONPATH", "")) if p)
    env = {
        "EVENER_DDP": "auto",
        "EVENER_FLOOR": "int8",
        "EVENER_LOG": "info",
        "NCCL_DEBUG": "WARN",
        "PYTHONPATH": path,
    }
    with Lab(Spec.parse(f"2x1@{given.rate}")) as lab:
        lab.launch(argv, env=env, timeout=given.timeout, on_line=on_line)
    return cells


def _table(cells: list[dict[str, Any]]) -> str:
    bare = next((c["step_ms"] for c in cells if c["column"] == "bare" and "error" not in c), None)
    lines = ["| column | ms per step | of the bare loop's speed | kept |", "|---|---:|---:|---|"]
    for cell in cells:
        if "error" in cell:
            lines.append(f"| {cell['column']} | failed: {cell['error']} | | |")
            continue
        ratio = f"{bare / cell['step_ms']:.3f}" if bare else ""
        kept = cell["plan"].get("kept", "not decided")
        lines.append(f"| {cell['column']} | {cell['step_ms']:.1f} | {ratio} | {kept} |")
    return "\n".join([*lines, f"the goal is {_GOAL} in each row"])


def _record(given: argparse.Namespace, cells: list[dict[str, Any]]) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "transformers", "accelerate", "lightning"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    told = {k: v for k, v in vars(given).items() if k not in ("json", "worker")}
    return {"schema": "evener.frameworks/1", "asked": told, "versions": versions, "rows": cells}


if __name__ == "__main__":
    sys.exit(main())
