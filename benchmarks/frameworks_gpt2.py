"""GPT-2 small under Trainer, Accelerate and Lightning by the door alone, beside a bare loop.

    python benchmarks/frameworks_gpt2.py                  # two GPUs, 25 Gb/s, about four minutes
    python benchmarks/frameworks_gpt2.py --columns bare,accelerate --rate 10gbit
    python benchmarks/frameworks_gpt2.py --tiny --rate 300mbit    # on CPUs, with a small model

Two simulated nodes of one GPU (`evener lab`). All columns train the same model on the same loader,
with AdamW, bf16 and clipping to a norm of 1. Each column is a process of its own on each node, with
its own process group, and they take turns: one after the other trains until the planner has
decided, and then all take a few steps at a time, in `--rounds` rounds, while the others stand
still. So what the machine does meanwhile falls on all. A turn is timed between two moments at which
the device has done everything, after one step that does not count; the slower rank counts.

    bare    a loop with `evener.ddp.accelerate(model, optimizer, mode="auto", floor="int8")`
    waits   that loop with what transformers' Trainer does besides, whatever reduces gradients:
            a batch that is copied while the host waits, a gather of the number of symbols, a look
            at the loss before clipping
    others  know nothing of Evener: EVENER_DDP=auto and EVENER_FLOOR=int8 are all

Where `--timeout` is near, no column begins any more, and no round. The table has what there is: of
a column that decided and had no turn, the step that its planner measured.

Trained weights must be equal on both ranks, bit for bit. A framework that is not installed is left
out, and said. Needs transformers, for the model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

COLUMNS = ("bare", "waits", "trainer", "accelerate", "lightning")
PACKAGES = {"trainer": "accelerate", "accelerate": "accelerate", "lightning": "lightning"}
_MARK, _TOLD = "COLUMN ", "TOLD "
_LEAST, _MOST = 12, 700  # steps before a column is measured
_ALL = 10_000  # more than are ever taken
_GOAL = 0.97


class Meter:
    """Meters one column in its process: trains until the planner has decided, then as told."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.done = 0
        self.steps = self.left = 0  # of the turn that is under way; 0: the planner decides
        self.began = 0.0

    def planner(self) -> Any:
        """The planner of the model that is being trained."""
        from evener.ddp.model import _LIVE

        found = [model.evener_steps.planner for model in _LIVE]
        return found[0] if found else None

    def step(self) -> bool:
        """A step is over; whether to stop. Equal on all ranks: they decide in the same step."""
        self.done += 1
        if not self.steps:
            planner = self.planner()
            decided = planner is not None and planner.kept is not None
            if not (decided and self.done >= _LEAST) and self.done < _MOST:
                return False
            self._wait()
            self.tell(steps_before=self.done, plan=self._plan() if decided else {})
            return self._next()
        self.left -= 1
        if self.left == self.steps:
            self._wait()
            self.began = time.perf_counter()
        if self.left:
            return False
        self._wait()
        self.tell(ms=1e3 * (time.perf_counter() - self.began) / self.steps)
        return self._next()

    def tell(self, **what: Any) -> None:
        """To who gives turns."""
        print(_TOLD + json.dumps(what), flush=True)

    def _next(self) -> bool:
        """Stand still until it is this column's turn; whether there is none any more."""
        self.steps = int(sys.stdin.readline() or 0)
        self.left = self.steps + 1  # the first does not count
        return not self.steps

    def _plan(self) -> dict[str, Any]:
        planner = self.planner()
        return {
            "kept": planner.kept.name,
            "expected_ms": round(planner.decision.step_ms, 1),
            "compute_ms": round(planner.decision.compute_ms, 1),
            "tried": {name: round(ms, 1) for name, (_, ms) in planner.tried.items()},
            "looked_at": re.sub(r"/\S*site-packages/", "", planner.looked_at),
        }

    def _wait(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()


# --- in the nodes ---


class Process:
    """A column's, on this node."""

    def __init__(self, name: str, given: argparse.Namespace, port: int) -> None:
        self.name = name
        env = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps({**vars(given), "column": name})],
            env={**env, "MASTER_PORT": str(port)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def give(self, steps: int) -> None:
        """This many steps; 0: the end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `told` will see

    def told(self) -> dict[str, Any]:
        """What it says next; everything else that it prints is printed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_TOLD):
                return dict(json.loads(line.removeprefix(_TOLD)))
            print(f"{self.name}: {line}", end="", flush=True)
        return {"error": f"ended with status {self.process.wait()}"}

    def close(self) -> None:
        """It is over."""
        self.process.kill()
        self.process.wait()


def worker(given: argparse.Namespace) -> None:
    """One node: all columns, in turn."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    cells: dict[str, dict[str, Any]] = {}
    processes: dict[str, Process] = {}

    def everyone(mine: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """What the column says on all ranks; it is dropped where it failed on one."""
        told: list[Any] = [None, None]
        dist.all_gather_object(told, mine)
        problems = [one["error"] for one in told if "error" in one]
        if problems:
            cells[name]["error"] = problems[0]
            processes.pop(name).close()
        return told

    def late(needed: float) -> bool:
        """Whether this many seconds are not left. The same on all ranks."""
        box = [time.time() + needed > given.until]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    longest = 0.0
    for name in given.columns.split(","):
        if late(longest + 10.0):
            print(f"{name}: left out, because --timeout is near", flush=True)
            continue
        began = time.time()
        box = [_port() if rank == 0 else 0]
        dist.broadcast_object_list(box, src=0)
        cells[name] = {"column": name, "turns_ms": []}
        processes[name] = Process(name, given, box[0])
        told = everyone(processes[name].told(), name)
        cells[name] |= {k: v for k, v in told[0].items() if k != "error"}
        longest = max(longest, time.time() - began)
    longest = 0.0
    for turn in range(given.rounds):
        if late(longest + 8.0):
            break
        began = time.time()
        for name in list(processes)[:: -1 if turn % 2 else 1]:
            processes[name].give(given.steps)
            told = everyone(processes[name].told(), name)
            if name in processes:
                cells[name]["turns_ms"].append(round(max(one["ms"] for one in told), 2))
        longest = max(longest, time.time() - began)
    for name in list(processes):
        processes[name].give(0)
        told = everyone(processes[name].told(), name)
        if name in processes:
            if told[0] != told[1]:
                cells[name]["error"] = "the ranks' weights differ"
            processes.pop(name).process.wait(60)
    for cell in cells.values():
        if "error" not in cell:
            turns = cell["turns_ms"] or [cell["plan"].get("expected_ms", 0.0)]
            cell["step_ms"] = round(statistics.median(turns), 2)
        if rank == 0:
            print(_MARK + json.dumps(cell), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def column(given: argparse.Namespace) -> None:
    """One column on one node, in a process of its own."""
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
    meter = Meter(gpu)
    torch.manual_seed(0)
    try:
        meter.tell(digest=_digest(globals()[f"_{given.column}"](given, meter)))
    except Exception as error:  # noqa: BLE001 - the other columns go on
        meter.tell(error=f"{type(error).__name__}: {error}"[:400])
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


def _moved(loader: Iterable[Any], device: str, waits: bool) -> Iterable[Any]:
    for batch in loader:
        yield {name: part.to(device, non_blocking=not waits) for name, part in batch.items()}


def _bare(given: argparse.Namespace, meter: Meter, waits: bool = False) -> Any:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import evener.ddp

    device = "cpu" if given.tiny else "cuda"
    net = _model(given).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    model = DistributedDataParallel(net)
    model = evener.ddp.accelerate(model, optimizer, mode="auto", floor="int8")
    counts = torch.empty(2, dtype=torch.int64, device=device)
    for batch in _moved(_loader(given, True), device, waits):
        if waits:
            mine = batch["labels"][:, 1:].ne(-100).sum()
            dist.all_gather_into_tensor(counts, mine.view(1))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        if waits and not bool(torch.isfinite(loss)):
            raise RuntimeError("the loss is not finite")
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if meter.step():
            break
    model.evener_steps.finish("")
    return net


def _waits(given: argparse.Namespace, meter: Meter) -> Any:
    return _bare(given, meter, waits=True)


def _trainer(given: argparse.Namespace, meter: Meter) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = meter.step()

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=given.batch,
        max_steps=_ALL,
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
        max_steps=_ALL,
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
    parser.add_argument("--steps", type=int, default=8, help="in a turn")
    parser.add_argument("--rounds", type=int, default=8, help="in which each column has its turn")
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank")
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPUs")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        told = argparse.Namespace(**json.loads(given.worker))
        column(told) if hasattr(told, "column") else worker(told)
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
    from evener.tools.lab import Lab, Spec

    cells: list[dict[str, Any]] = []

    def on_line(rank: int, node: str, _: str, line: str) -> None:
        if line.startswith(_MARK):
            cells.append(json.loads(line.removeprefix(_MARK)))
            print(f"  {cells[-1]}"[:600], flush=True)
        elif "plan: kept" in line or "EVENER_DDP" in line or "Error" in line:
            print(f"    [{rank}@{node}] {line.rstrip()[:300]}", flush=True)

    told = {k: v for k, v in vars(given).items() if k not in ("json", "worker")}
    told["until"] = time.time() + given.timeout - 5.0
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
    found = {cell["column"]: cell for cell in cells}

    def of(cell: dict[str, Any], name: str) -> str:
        """How fast, in the middle of the rounds, beside column `name` of the same round."""
        base = found.get(name, {})
        if "error" in base or not base:
            return ""
        if not (base["turns_ms"] and cell["turns_ms"]):
            return f"{base['step_ms'] / cell['step_ms']:.3f} (not in turns)"
        pairs = zip(base["turns_ms"], cell["turns_ms"], strict=True)
        return f"{statistics.median(one / other for one, other in pairs):.3f}"

    lines = [
        "| column | ms per step | of the bare loop's speed | of the loop that waits too | kept |",
        "|---|---:|---:|---:|---|",
    ]
    for cell in cells:
        if "error" in cell:
            lines.append(f"| {cell['column']} | failed: {cell['error']} | | | |")
            continue
        kept = cell["plan"].get("kept", "not decided")
        ratios = f"{of(cell, 'bare')} | {of(cell, 'waits')}"
        lines.append(f"| {cell['column']} | {cell['step_ms']:.1f} | {ratios} | {kept} |")
    return "\n".join([*lines, f"the goal is {_GOAL} of the bare loop in each row"])


def _record(given: argparse.Namespace, cells: list[dict[str, Any]]) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "transformers", "accelerate", "lightning"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    told = {k: v for k, v in vars(given).items() if k not in ("json", "worker")}
    return {"schema": "evener.frameworks/2", "asked": told, "versions": versions, "rows": cells}


if __name__ == "__main__":
    sys.exit(main())
