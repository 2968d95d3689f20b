"""A recommender's step on several ranks: tables alone, and in a DLRM-DCNv2, beside TorchRec.

    python benchmarks/embedding_ranks.py --steps 7 --warmup 2     # Evener's ways, on this machine
    python benchmarks/embedding_ranks.py --shape mlperf --networks 2x1@25gbit,nvlink \
        --ways one-by-one,evener,torchrec,torchrec-pipeline,evener-fp16,torchrec-fp16 --dcn
    python benchmarks/embedding_ranks.py --shape criteo --networks 4x1@1gbit --ways ...

Each rank looks up a batch in each of 26 tables, pools, and steps all rows by row-wise Adagrad. Ways
take turns in one job for each network: a number of ranks of this machine (Gloo or, on GPUs, NCCL in
pretended nodes), `nvlink` (two GPUs of one host), or a lab.

    one-by-one  a DynamicEmbeddingBag per table, called one after another
    together    an EmbeddingBagCollection whose rows are in host memory
    evener      the same with resident=True: rows lie on the device
    evener-plain  in torch's operations, without the kernels that it has for GPUs
    torchrec    an EmbeddingBagCollection of TorchRec on FBGEMM's kernels, planned by TorchRec's
                planner, which is told the rate of the link
    *-pipeline  in TrainPipelineSparseDist, which sends ids ahead (`evener` does, by prefetch)
    *-fp16      what crosses is rounded, forward and backward, by both; DDP's gradients too
    *-int8      the same in int8; dense gradients by evener.ddp, TorchRec's by torch's hook for fp16

`--dcn`: MLPerf's DLRM-DCNv2 around them, with DDP for the dense part. `--auc N`: on the last
network that trains all ways N steps on clicks of a teacher, from rows of zeros, for their AUC.

Collectives are the calls of torch.distributed in a step, counted on rank 0. A step's processor time
(rank 0, all threads) says what its wall clock does not where other programs run.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import embedding_peers as peers
import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from evener.embedding import Options, RowWiseAdagrad
from evener.embedding.torch import (
    DynamicEmbeddingBag,
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
    kernels,
)

_CALLS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather", "broadcast")
RATE = 0.02
# MLPerf's rows and ids of a sample (mlcommons/training, recommendation_v2).
ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282,
        10, 2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108,
        36]  # fmt: skip
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@dataclass(frozen=True)
class Shape:
    """Rows and ids per sample of each table; `width`: of the dense net's layers."""

    rows: list[int]
    hot: list[int]
    dim: int
    batch: int
    width: int


def cut(most: int) -> list[int]:
    return [min(rows, most) for rows in ROWS]


SHAPES = {
    "small": Shape([100_000] * 26, [1] * 26, 16, 1024, 64),
    "mlperf": Shape(cut(1_000_000), HOT, 128, 8192, 1024),
    "criteo": Shape(cut(100_000), [1] * 26, 64, 512, 64),
    "tiny": Shape(cut(2_000), [min(hot, 10) for hot in HOT], 16, 128, 32),
}


def zipf(
    rows: int, size: tuple[int, ...], device: torch.device, draw: torch.Generator
) -> torch.Tensor:
    """int64: Zipf of exponent 1.05, from the inverse of its continuous distribution."""
    u = torch.rand(size, device=device, generator=draw, dtype=torch.float64)
    power = 1 - 1.05
    found = (((rows + 1) ** power - 1) * u + 1) ** (1 / power) - 1
    return found.long().clamp_(0, rows - 1)


def batch_of(
    shape: Shape, seed: int, device: torch.device
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Features, dense inputs and clicks of one rank."""
    draw = torch.Generator(device).manual_seed(seed)
    ids, score = [], torch.zeros(shape.batch, device=device)
    for t, (rows, hot) in enumerate(zip(shape.rows, shape.hot, strict=True)):
        own = zipf(rows, (shape.batch, hot), device, draw)
        ids.append(own.flatten())
        score += torch.sin(own.double() * 12.9898 + t).float().mean(1)
    lengths = torch.tensor(shape.hot, device=device).repeat_interleave(shape.batch)
    dense = torch.rand(shape.batch, 13, device=device, generator=draw)
    clicks = torch.rand(shape.batch, device=device, generator=draw) < (score - 0.5).sigmoid()
    names = [str(t) for t in range(len(ids))]
    return Jagged(names, torch.cat(ids), lengths=lengths), dense, clicks.float()


class Counted:
    """How many collectives this rank has begun."""

    def __init__(self) -> None:
        self.n = 0
        for name in _CALLS:
            setattr(dist, name, self._counts(getattr(dist, name)))

    def _counts(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.n += 1
            return call(*args, **kwargs)

        return counted


class OneByOne(nn.Module):
    """A module per table."""

    def __init__(self, shape: Shape, device: torch.device, prefix: str) -> None:
        super().__init__()
        options = Options(shape.dim, optimizer=RowWiseAdagrad(lr=RATE))
        self.bags = nn.ModuleList(
            DynamicEmbeddingBag(options, f"{prefix}{t}", mode="sum", device=device)
            for t in range(len(shape.rows))
        )

    def forward(self, features: Jagged) -> torch.Tensor:
        """[samples, tables * dim]."""
        found = features.to_dict().values()
        return torch.cat(
            [
                bag(each.values(), each.offsets()[:-1])
                for bag, each in zip(self.bags, found, strict=True)
            ],
            1,
        )


class Together(nn.Module):
    """One module for all tables."""

    def __init__(
        self, shape: Shape, device: torch.device, prefix: str, zeros: bool = False, **how: Any
    ) -> None:
        super().__init__()
        ends = {"weight_init_min": 0.0, "weight_init_max": 0.0} if zeros else {}
        configs = [
            EmbeddingBagConfig(rows, shape.dim, str(t), feature_names=[str(t)], **ends)
            for t, rows in enumerate(shape.rows)
        ]
        self.bags = EmbeddingBagCollection(
            configs,
            device=device,
            optimizer=RowWiseAdagrad(lr=RATE, eps=1e-8),
            prefix=prefix,
            **how,
        )

    def forward(self, features: Jagged) -> torch.Tensor:
        """As OneByOne."""
        found: torch.Tensor = self.bags(features).values()
        return found


_NUMBERS = itertools.count()
Step = Callable[[], Any]
FORMS = ("fp16", "int8")


def tables(name: str, shape: Shape, device: torch.device, zeros: bool = False) -> nn.Module:
    """Evener's ways."""
    prefix = f"{name}-{next(_NUMBERS)}-"
    if name == "one-by-one":
        return OneByOne(shape, device, prefix)
    how: dict[str, Any] = {"resident": name != "together"}
    if (form := name.rpartition("-")[2]) in FORMS:
        how |= {"wire": form, "gradient_wire": form}
    return Together(shape, device, prefix, zeros, **how)


def alone(name: str, shape: Shape, device: torch.device, turn: Iterator[Any], args: Any) -> Step:
    """A step of the tables."""
    if name.startswith("torchrec"):
        return peers.alone(name, shape, device, turn, args.link, RATE)
    model = tables(name, shape, device)
    optimizer = DynamicOptimizer(model)

    def step() -> None:
        model(next(turn)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_plain_torch(act: Step) -> Step:
    """A step without Triton's kernels."""

    def step() -> None:
        with mock.patch.object(kernels, "on", lambda _: False):
            act()

    return step


class Whole(nn.Module):
    """Tables and the dense net, for DynamicOptimizer to find both."""

    def __init__(self, bags: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.bags, self.dense = bags, dense


def dcn(
    name: str,
    shape: Shape,
    device: torch.device,
    turn: Iterator[Any],
    args: Any,
    zeros: bool = False,
) -> tuple[Step, Callable[[Any], torch.Tensor]]:
    """A step of the whole model, and its logits for a batch."""
    if name.startswith("torchrec"):
        return peers.dcn(name, shape, device, turn, args.link, RATE, zeros)
    model = Whole(tables(name, shape, device, zeros), peers.dense(shape, device, name))
    optimizer = DynamicOptimizer(model.bags, torch.optim.Adam(model.dense.parameters(), 1e-3))
    following = [next(turn)]
    collection = getattr(model.bags, "bags", None)

    def step() -> None:
        features, dense, clicks = following.pop()
        logits = model.dense(dense, model.bags(features))
        following.append(next(turn))
        if isinstance(collection, EmbeddingBagCollection):
            collection.prefetch(following[0][0])
        binary_cross_entropy_with_logits(logits, clicks).backward()
        optimizer.step()
        optimizer.zero_grad()

    def logits(batch: Any) -> torch.Tensor:
        found: torch.Tensor = model.dense.module(batch[1], model.bags(batch[0]))
        return found

    return step, logits


def measured(given: Any, shape: Shape, device: torch.device, counted: Counted, whole: bool) -> Any:
    """Median step of each way, its collectives and its processor time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [batch_of(shape, 100 * i + rank, device) for i in range(given.batches)]
    ways: dict[str, Step] = {}
    calls: dict[str, list[tuple[int, float]]] = {}
    failed: dict[str, Any] = {}
    for name in given.ways.split(","):
        turn = itertools.cycle(batches)
        try:
            if whole and name in ("one-by-one", "together"):
                continue
            act = (
                dcn(name, shape, device, turn, given)[0]
                if whole
                else alone(name, shape, device, turn, given)
            )
            if name.startswith("evener-plain"):
                act = in_plain_torch(act)
            act()
        except Exception as error:  # noqa: BLE001 - a peer that cannot run must not end the rest
            failed[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        calls[name] = []

        def step(act: Step = act, own: list[tuple[int, float]] = calls[name]) -> None:
            before, began = counted.n, time.process_time()
            act()
            own.append((counted.n - before, time.process_time() - began))

        ways[name] = step

    def settle() -> None:
        harness.settle()
        dist.barrier()

    took = harness.turns(ways, given.steps, warmup=given.warmup, settle=settle)
    found = {
        name: {
            "collectives": statistics.median(n for n, _ in calls[name]),
            "cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in calls[name]), 2),
            "ms": round(1e3 * statistics.median(seconds), 2),
            "samples_per_s": round(size * shape.batch / statistics.median(seconds)),
            "steps_ms": [round(1e3 * each, 2) for each in seconds],
        }
        for name, seconds in took.items()
    }
    return found | failed


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    order = torch.empty_like(scores, dtype=torch.float64)
    order[scores.argsort()] = torch.arange(
        1, len(scores) + 1, dtype=torch.float64, device=scores.device
    )
    good = clicks > 0
    n, m = int(good.sum()), int((~good).sum())
    return (float(order[good].sum()) - n * (n + 1) / 2) / (n * m)


def trained(given: Any, shape: Shape, device: torch.device) -> dict[str, Any]:
    """AUC of each way after the same steps, on batches that none has seen."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for name in given.ways.split(","):
        if name in ("one-by-one", "together") or name.endswith("pipeline"):
            continue
        turn = (batch_of(shape, 1000 + size * i + rank, device) for i in itertools.count())
        try:
            step, logits = dcn(name, shape, device, turn, given, zeros=True)
            for _ in range(given.auc):
                step()
        except Exception as error:  # noqa: BLE001 - as above
            found[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        scores, clicks = [], []
        with torch.no_grad():
            for i in range(8):
                batch = batch_of(shape, 10 + i, device)
                scores.append(logits(batch))
                clicks.append(batch[2])
        found[name] = auc(torch.cat(scores), torch.cat(clicks))
    return found


def worker(given: Any) -> None:
    """One rank."""
    device = harness.join()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    counted, shape = Counted(), SHAPES[given.shape]
    found = {"tables": measured(given, shape, device, counted, False)}
    if given.dcn:
        found["dcn"] = measured(given, shape, device, counted, True)
    if given.auc:
        found["auc"] = trained(given, shape, device)
    if dist.get_rank() == 0:
        harness.say(ways=found)
    dist.destroy_process_group()


def job(given: Any, network: str) -> harness.Job:
    """The worker on this network."""
    names = ["shape", "ways", "steps", "warmup", "batches", "dcn"]
    names += ["auc"] if network == given.networks.split(",")[-1] else []
    words = ["--worker", *harness.arguments_of(given, *names)]
    env = {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none"}
    if network == "nvlink":
        return harness.ranks(*words, env={**env, "NCCL_HOSTID": "one"}, limit=given.limit)
    if network.isdigit():
        return harness.ranks(*words, count=int(network), env=env, limit=given.limit)
    rate = network.partition("@")[2].split(",")[0]
    argv = [sys.executable, __file__, *words, "--link", rate]
    return harness.in_lab(network, argv, env=env, limit=given.limit)


def main() -> None:
    """All networks."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--networks", default="2,4")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--ways", default="one-by-one,together,evener")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--dcn", action="store_true")
    parser.add_argument("--auc", type=int, default=0, metavar="STEPS")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a job")
    parser.add_argument("--link", default="", help="of a worker: the rate that a planner is told")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker(given)
        return
    results: dict[str, Any] = {}
    for network in given.networks.split(","):
        done = job(given, network)
        found = results[network] = done.row.get(
            "ways", {"failed": [*done.errors[-5:], done.failed]}
        )
        for what in ("tables", "dcn"):
            keys = ("ms", "samples_per_s", "collectives", "cpu_ms", "failed")
            rows = ([name, *map(each.get, keys)] for name, each in found.get(what, {}).items())
            head = [f"{network}, {what}", "ms", "samples/s", "collectives", "CPU ms, rank 0", ""]
            print(harness.show(head, rows), flush=True)
        print({key: found[key] for key in ("auc", "failed") if key in found}, flush=True)
        harness.keep(
            given, ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"),
            what=f"26 tables, shape {given.shape}: {SHAPES[given.shape]}", results=results,
        )  # fmt: skip


if __name__ == "__main__":
    main()
