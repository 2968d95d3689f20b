"""The peers of zero_gpu.py: the model resident on the GPU, FSDP2 with CPU offload, DeepSpeed ZeRO-3
with CPU offload, and a plain loop with float32 masters for the loss."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from zero_models import Step, batch_of, loss_of, on_meta, timed, value_of

from evener.base import optimizers as _optimizers

HYPER: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A loop without an engine."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@torch.no_grad()
def filled(model: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """The values of `value_of` in a model from the meta device."""
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{module_name}.{name}" if module_name else name
            value = value_of(full, parameter).to(device, dtype)
            setattr(module, name, nn.Parameter(value))
    return model


def resident(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """All on the GPU, all bf16: the speed of a model that fits."""
    model = filled(on_meta(layers, width, True), torch.bfloat16, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return timed(plain(model, optimizer), batch_of(batch), steps)


def _group() -> None:
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("MASTER_PORT", "29511")
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group("cpu:gloo,cuda:nccl")


def fsdp(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """FSDP2 with CPUOffloadPolicy (pinned) and torch's fused CPU AdamW, float32 shards."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _group()
    model = on_meta(layers, width, True)
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = value_of(name, parameter).chunk(ranks)[rank].cpu()
            parameter.to_local().copy_(value)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return timed(plain(model, optimizer), batch_of(batch), steps)


def deepspeed(layers: int, width: int, batch: int, steps: int, pin: bool = True) -> dict[str, Any]:
    """DeepSpeed ZeRO-3, parameters and optimizer on the host (`pin`: in pinned memory), its CPU
    Adam. Weights are drawn on the GPU, a layer at a time, as `zero.Init` takes them."""
    import deepspeed as ds  # type: ignore[import-not-found]

    _group()
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": pin},
            "offload_param": {"device": "cpu", "pin_memory": pin},
        },
        "steps_per_print": 1 << 30,
    }
    from zero_models import Llama

    with ds.zero.Init(config_dict_or_path=config):
        model = Llama(layers, width, recompute=True)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = timed(step, batch_of(batch), steps)
    count = sum(p.ds_numel for p in model.parameters())
    return {**found, "version": ds.__version__, "parameters": count, "pinned": pin}


class Masters:
    """AdamW on float32 masters in separate torch operations, the model in bf16: written from the
    papers and not from the engine."""

    def __init__(self, model: nn.Module, lr: float, decay: float, clip: float) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.first = [torch.zeros_like(m) for m in self.masters]
        self.second = [torch.zeros_like(m) for m in self.masters]
        self.lr, self.decay, self.clip, self.count = lr, decay, clip, 0

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters; gradients are cleared."""
        self.count += 1
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in self.parameters])  # type: ignore[union-attr]
        scale = min(1.0, self.clip / (float(norm) + 1e-6))
        c1, c2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        for p, w, m, v in zip(self.parameters, self.masters, self.first, self.second, strict=True):
            assert p.grad is not None
            g = p.grad.float() * scale
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            w.mul_(1 - self.lr * self.decay)
            w.addcdiv_(m / c1, (v / c2).sqrt_().add_(1e-8), value=-self.lr)
            p.copy_(w)
            p.grad = None


class Exact(Masters):
    """The same AdamW in the order of operations that Evener's kernels document (crates/kernels,
    adam.rs), each rounded once: then every bit must agree."""

    @torch.no_grad()
    def step(self) -> None:
        """As `Masters.step`."""
        self.count += 1
        gradients = [p.grad for p in self.parameters]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # type: ignore[arg-type]
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        scale = (self.clip / (norm + 1e-6)).clamp(max=1.0).item()
        c1, c2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        root = torch.tensor(1 / c2**0.5, dtype=torch.float64).float().item()
        for p, w, m, v in zip(self.parameters, self.masters, self.first, self.second, strict=True):
            assert p.grad is not None
            g = p.grad.float() * scale
            w.mul_(1 - self.lr * self.decay)
            m.mul_(0.9).add_(g * (1 - 0.9))
            v.mul_(0.999).add_((g * g) * (1 - 0.999))
            w.sub_((m / v.sqrt().mul_(root).add_(1e-8)).mul_(self.lr / c1))
            p.copy_(_optimizers.split(w)[0])
            p.grad = None
