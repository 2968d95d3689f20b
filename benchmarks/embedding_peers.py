"""The dense net of MLPerf's DLRM-DCNv2, and a recommender's step as TorchRec's users write it.

For `embedding_ranks.py`. TorchRec is used where one of its ways is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import evener.ddp
from evener.base.units import parse_rate

try:
    from torchrec.streamable import Pipelineable
except ImportError:  # Evener's ways do without
    Pipelineable = object

Step = Callable[[], Any]


def layers(*widths: int, last: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, and after them unless it is the `last` net."""
    found: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        found += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(found[:-1] if last else found))


class Dense(nn.Module):
    """[batch] of dense inputs [batch, 13] and pooled rows [batch, tables * dim].

    Three cross layers of low rank: x + x0 * (U(V x) + b).
    """

    def __init__(self, shape: Any) -> None:
        super().__init__()
        w, x = shape.width, (len(shape.rows) + 1) * shape.dim
        self.bottom = layers(13, w // 2, w // 4, shape.dim)
        self.down = nn.ModuleList(nn.Linear(x, w // 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(w // 2, x) for _ in range(3))
        self.top = layers(x, w, w, w // 2, w // 4, 1, last=True)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        first = x = torch.cat((self.bottom(dense), pooled), 1)
        for down, up in zip(self.down, self.up, strict=True):
            x = x + first * up(down(x))
        found: torch.Tensor = self.top(x)[:, 0]
        return found


def dense(shape: Any, device: torch.device, name: str) -> DistributedDataParallel:
    """The dense net under DDP, the same at first whoever asks; gradients rounded where asked."""
    torch.manual_seed(1)
    ids = None if device.type == "cpu" else [device]
    found = DistributedDataParallel(Dense(shape).to(device), device_ids=ids)
    if name.endswith("fp16"):
        found.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name.endswith("int8") and dist.get_world_size() > 1:
        found = evener.ddp.accelerate(found, mode="int8")
    return found


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    """What TrainPipelineSparseDist moves ahead."""

    features: Any
    dense: torch.Tensor
    clicks: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.features.to(device, non_blocking),
            self.dense.to(device, non_blocking=non_blocking),
            self.clicks.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        for part in (self.features, self.dense, self.clicks):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


def batch(given: Any) -> Batch:
    """Features as a KeyedJaggedTensor, which knows how many ids each feature has."""
    features = given[0].to_torchrec()
    features.sync()
    return Batch(features, *given[1:])


class Net(nn.Module):
    """Loss and logits, as TorchRec's own DLRM gives them.

    A plan orders columns by where tables lie. With `ordered` they are in the order of tables, as
    Evener's are: so the net learns the same.
    """

    def __init__(self, bags: nn.Module, top: nn.Module, ordered: list[str]) -> None:
        super().__init__()
        self.bags, self.top, self.ordered = bags, top, ordered

    def forward(self, given: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(given.features)
        values = (
            torch.cat([pooled[name] for name in self.ordered], 1)
            if self.ordered
            else pooled.values()
        )
        logits = self.top(given.dense, values)
        return binary_cross_entropy_with_logits(logits, given.clicks), logits


def bags(shape: Any, rate: float, zeros: bool) -> nn.Module:
    """TorchRec's tables, not sharded yet."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    fill: dict[str, Any] = {"init_fn": nn.init.zeros_} if zeros else {}
    configs = [
        EmbeddingBagConfig(
            name=str(t),
            num_embeddings=rows,
            embedding_dim=shape.dim,
            feature_names=[str(t)],
            **fill,
        )
        for t, rows in enumerate(shape.rows)
    ]
    found = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, found.parameters(), {"lr": rate, "eps": 1e-8})
    return found  # type: ignore[no-any-return]


def sharded(model: nn.Module, shape: Any, device: torch.device, name: str, link: str) -> Any:
    """The model under TorchRec's plan for this network."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    registry = None
    kind = {"fp16": CommType.FP16, "int8": CommType.INT8}.get(name.rpartition("-")[2])
    if kind is not None:
        registry = get_qcomm_codecs_registry(QCommsConfig(kind, kind))
    size = dist.get_world_size()
    near = {"local_world_size": 1, "inter_host_bw": parse_rate(link) / 8 / 1e3} if link else {}
    topology = Topology(size, device.type, **{"local_world_size": size, **near})
    # FBGEMM has no backward pass for tables that are replicated on CPUs.
    kinds = None if device.type == "cuda" else ["table_wise", "row_wise", "column_wise"]
    constraints = {
        str(t): ParameterConstraints(sharding_types=kinds, pooling_factors=[float(hot)])
        for t, hot in enumerate(shape.hot)
    }
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=shape.batch, constraints=constraints
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.GroupMember.WORLD), device, plan, sharders
    )


class Both:
    """Optimizers as one, for TorchRec's pipeline."""

    def __init__(self, *of: torch.optim.Optimizer) -> None:
        self.of = of

    def step(self) -> None:
        for each in self.of:
            each.step()

    def zero_grad(self) -> None:
        for each in self.of:
            each.zero_grad()


def optimizer_of(model: nn.Module, rate: float) -> Both:
    """What does not step in the backward pass: the dense net, and tables that a plan replicates."""
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    top = [p for name, p in left.items() if "top." in name]
    rest = [p for name, p in left.items() if "top." not in name]
    found: list[torch.optim.Optimizer] = [torch.optim.Adam(top, 1e-3)] if top else []
    return Both(*found, *([RowWiseAdagrad(rest, lr=rate, eps=1e-8)] if rest else []))


def alone(
    name: str, shape: Any, device: torch.device, turn: Iterator[Any], link: str, rate: float
) -> Step:
    """A step of TorchRec's tables."""
    model = sharded(bags(shape, rate, False), shape, device, name, link)
    optimizer = optimizer_of(model, rate)
    known: dict[int, Batch] = {}
    if name.endswith("pipeline"):
        raise NotImplementedError("with tables alone there is nothing to overlap")

    def step() -> None:
        given = next(turn)
        if id(given) not in known:
            known[id(given)] = batch(given)
        model(known[id(given)].features).values().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def dcn(
    name: str,
    shape: Any,
    device: torch.device,
    turn: Iterator[Any],
    link: str,
    rate: float,
    zeros: bool,
) -> tuple[Step, Callable[[Any], torch.Tensor]]:
    """A step of the whole model, and its logits for a batch."""
    tables = bags(shape, rate, zeros)
    torch.manual_seed(1)
    model = sharded(
        Net(tables, Dense(shape).to(device), [str(t) for t in range(len(shape.rows)) if zeros]),
        shape,
        device,
        name,
        link,
    )
    if name.endswith(("fp16", "int8")):  # torch has no hook for int8
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                part.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = optimizer_of(model, rate)
    known: dict[int, Batch] = {}

    def following() -> Batch:
        given = next(turn)
        if len(known) < 16 and id(given) not in known:
            known[id(given)] = batch(given)
        return known[id(given)] if id(given) in known else batch(given)

    def logits(given: Any) -> torch.Tensor:
        found: torch.Tensor = model(batch(given))[1]
        return found

    if name.endswith("pipeline"):
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        pipeline = TrainPipelineSparseDist(model, optimizer, device)
        source = iter(following, None)
        return lambda: pipeline.progress(source), logits

    def step() -> None:
        optimizer.zero_grad()
        model(following())[0].backward()
        optimizer.step()

    return step, logits
