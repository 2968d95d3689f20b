"""What Evener costs the host where there is nothing to win: small parameters, no network limit.

    python benchmarks/door_overhead.py                    # two Gloo processes on this machine
    python benchmarks/door_overhead.py --device cuda      # two GPUs, NVLink or whatever there is
    python benchmarks/door_overhead.py --models 500 --variants plain,model

Two ranks that count as two nodes train the same model in turn: as plain DDP, with
`accelerate(model)`, with `accelerate(model, optimizer)`, and with a planner (`mode="auto"`), a few
steps each, round after round. Shown is the median over the rounds of the slower rank's step, beside
plain DDP's of the same round; and the processor time of the main thread, which is what hooks and
launches cost. On a CPU each rank has one thread, and the machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

VARIANTS = {
    "plain": "DDP",
    "model": "accelerate(model)",
    "optimizer": "accelerate(model, optimizer)",
    "planned": 'accelerate(model, optimizer, mode="auto")',
    "planned-model": 'accelerate(model, mode="auto")',
}
MODELS = ("500", "10000", "mobilenet")
_SETTLING = 200


def build(name: str) -> tuple[Any, Any]:
    """A model and a batch: this many parameters in linear layers of 16, or MobileNetV3's shape."""
    import torch
    from torch import nn

    class Stack(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + layer(x) * 0.01
            return x

    class Separable(nn.Module):
        """A block of MobileNet's kind: expand, depthwise, squeeze, each with a norm."""

        def __init__(self, width: int, wide: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, wide, 1, bias=False),
                nn.BatchNorm2d(wide),
                nn.Hardswish(),
                nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
                nn.BatchNorm2d(wide),
                nn.Hardswish(),
                nn.Conv2d(wide, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )

        def forward(self, x: Any) -> Any:
            return x + self.body(x)

    if name == "mobilenet":
        layers = [Separable(32, 128) for _ in range(16)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        model = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), *layers, head)
        return model, torch.randn(4, 3, 32, 32)
    return Stack(int(name) // 2), torch.randn(4, 16)


class Trained:
    """One variant of one model."""

    def __init__(self, name: str, variant: str, device: str, optimizer: str) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import evener.ddp

        torch.manual_seed(0)
        module, batch = build(name)
        self.batch = batch.to(device)
        self.model: Any = DistributedDataParallel(module.to(device))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-3)
        if variant == "model":
            evener.ddp.accelerate(self.model)
        elif variant == "optimizer":
            evener.ddp.accelerate(self.model, self.optimizer)
        elif variant == "planned":
            evener.ddp.accelerate(self.model, self.optimizer, mode="auto")
        elif variant == "planned-model":
            evener.ddp.accelerate(self.model, mode="auto")

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Until the layout of buckets, and a planner's choice, are what they will be."""
        planner = getattr(getattr(self.model, "evener_steps", None), "planner", None)
        for done in range(_SETTLING):
            self.step()
            if done > 12 and (planner is None or getattr(planner, "kept", None) is not None):
                return

    def finish(self) -> None:
        steps = getattr(self.model, "evener_steps", None)
        if steps is not None:
            steps.finish("")


def worker(given: argparse.Namespace) -> None:
    """One rank; rank 0 prints the figures of each model."""
    import torch
    import torch.distributed as dist

    gpu = given.device == "cuda"
    rank = int(os.environ["RANK"])
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    control = dist.new_group(backend="gloo")

    def slower(values: list[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=control)
        return [float(value) for value in found.tolist()]

    def timed(trained: Trained, steps: int) -> list[float]:
        """Milliseconds of a step by the clock, and of the main thread's processor."""
        trained.step()
        trained.finish()
        if gpu:
            torch.cuda.synchronize()
        dist.barrier(group=control)
        began, busy = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            trained.step()
        busy = time.thread_time() - busy
        trained.finish()
        if gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        return slower([1e3 * took / steps, 1e3 * busy / steps])

    for name in given.models.split(","):
        made: dict[str, Trained] = {}
        for variant in given.variants.split(","):
            made[variant] = Trained(name, variant, given.device, given.optimizer)
            made[variant].settle()
        first = slower([timed(next(iter(made.values())), 2)[0]])[0]
        steps = max(3, min(100, int(1e3 * given.seconds / first)))
        rounds: dict[str, list[list[float]]] = {variant: [] for variant in made}
        for turn in range(given.rounds):
            for variant in list(made) if turn % 2 == 0 else list(made)[::-1]:
                rounds[variant].append(timed(made[variant], steps))
        if rank == 0:
            reducers = {
                v: len(t.model.evener.buckets)
                for v, t in made.items()
                if hasattr(t.model, "evener")
            }
            print(
                "OVERHEAD "
                + json.dumps(
                    {"model": name, "steps": steps, "rounds": rounds, "buckets": reducers}
                ),
                flush=True,
            )
        del made
    dist.barrier(group=control)
    sys.stdout.flush()
    os._exit(0)


def figures(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By variant: the median step and processor time, and the median ratio to plain's round."""
    plain = [pair[0] for pair in row["rounds"].get("plain", [])]
    found = {}
    for variant, pairs in row["rounds"].items():
        wall = [pair[0] for pair in pairs]
        found[variant] = {
            "step_ms": statistics.median(wall),
            "thread_ms": statistics.median(pair[1] for pair in pairs),
        }
        if plain:
            ratios = [ms / base for ms, base in zip(wall, plain, strict=True)]
            found[variant]["ratio"] = statistics.median(ratios)
    return found


def main() -> int:
    """Two ranks, all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="numbers of parameters, or mobilenet"
    )
    parser.add_argument("--variants", default="plain,model,optimizer", help=", ".join(VARIANTS))
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--seconds", type=float, default=1.0, help="of steps, a variant and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/door-overhead-DEVICE.json"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_HOSTID": f"node{rank}",
            "GLOO_SOCKET_IFNAME": "lo", "EVENER_GUARD_STEPS": "0",
        }  # fmt: skip
        argv = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        ranks.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    rows = []
    out = ranks[0].stdout
    assert out is not None
    for line in out:
        if line.startswith("OVERHEAD "):
            row = json.loads(line.removeprefix("OVERHEAD "))
            row["figures"] = figures(row)
            rows.append(row)
            for variant, one in row["figures"].items():
                print(
                    f"{row['model']:>10} {VARIANTS[variant]:44} {one['step_ms']:8.2f} ms "
                    f"{one.get('ratio', 1):6.3f} x DDP, main thread {one['thread_ms']:7.2f} ms, "
                    f"{row['buckets'].get(variant, '?')} buckets",
                    flush=True,
                )
    status = max(abs(rank.wait(timeout=60)) for rank in ranks)
    import torch

    found: Callable[[int], str] = torch.cuda.get_device_name
    record = {
        "schema": "evener.door-overhead/1",
        "command": " ".join(["python", "benchmarks/door_overhead.py", *sys.argv[1:]]),
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "gpus": [found(i) for i in range(torch.cuda.device_count())],
        },
        "optimizer": given.optimizer,
        "rows": rows,
    }
    path = given.json or Path(f"benchmarks/results/door-overhead-{given.device}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
