"""The peers of the memory engine: the model resident on the GPU, FSDP2 with CPU offload, DeepSpeed
ZeRO-3 with CPU offload, MegaTrain.

The peers are tuned: pinned memory, communication and copies that overlap, blocks recomputed,
DeepSpeed's own CPU Adam, torch's fused CPU AdamW.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from zero_models import HYPER, VOCABULARY, batch_of, place, timed, value_of


@dataclass(frozen=True)
class Task:
    """What every system trains. `empty`: the model without memory, its buffers apart; `make`: with
    weights, which `drawn` replaces by `value`s."""

    empty: Callable[[], nn.Module]
    make: Callable[[], nn.Module]
    value: Callable[[str, torch.Tensor], torch.Tensor]
    loss: Callable[[Any], torch.Tensor]
    tokens: int
    rows: int
    recompute: Callable[[Any], None] = lambda _: None
    drawn: bool = True


def plain(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], torch.Tensor]:
    """A step of a loop without an engine."""

    def step() -> torch.Tensor:
        loss = task.loss(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@torch.no_grad()
def filled(
    model: nn.Module, value: Callable[..., torch.Tensor], dtype: torch.dtype, device: str
) -> nn.Module:
    """A model from the meta device with its values."""
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{module_name}.{name}" if module_name else name
            setattr(module, name, nn.Parameter(value(full, parameter).to(device, dtype)))
    return model


def resident(task: Task, steps: int) -> dict[str, Any]:
    """All on the GPU, all bf16: the speed of a model that fits."""
    model = filled(task.empty(), task.value, torch.bfloat16, place())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return timed(plain(task, model, optimizer), task.tokens, steps)


def group() -> None:
    """A default group of one process, where torchrun made none."""
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("cpu:gloo,cuda:nccl" if place() == "cuda" else "gloo")


def blocks_of(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of blocks: those that are in no other list."""
    found: list[nn.ModuleList] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def fsdp(task: Task, steps: int, prefetch: bool) -> dict[str, Any]:
    """FSDP2 with CPUOffloadPolicy (pinned) and torch's fused CPU AdamW, float32 shards.

    `prefetch`: each block's neighbour is fetched ahead by name.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    group()
    model: Any = task.empty()
    task.recompute(model)
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if place() == "cuda":
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    else:
        how["mesh"] = dist.device_mesh.init_device_mesh("cpu", (1,))
    for blocks in blocks_of(model):
        for block in blocks:
            fully_shard(block, **how)
        for block, after in zip(blocks, list(blocks)[1:], strict=False) if prefetch else ():
            block.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
            after.set_modules_to_backward_prefetch([block])  # type: ignore[operator]
    fully_shard(model, **how)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(task.value(name, parameter).chunk(ranks)[rank].cpu())
        for name, buffer in buffers.items():
            module, _, last = name.rpartition(".")
            model.get_submodule(module)._buffers[last] = buffer.to(place())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return timed(plain(task, model, optimizer), task.tokens, steps)


SUPER = {"overlap_comm": False, "reduce_bucket_size": 400_000_000, "sub_group_size": 400_000_000}
ZENFLOW = {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True}
"""As the tutorials at deepspeed.ai have them."""


def deepspeed(
    task: Task,
    steps: int,
    pin: bool = True,
    half: bool = False,
    way: str = "",
    lr: float = HYPER["lr"],
) -> dict[str, Any]:
    """DeepSpeed ZeRO-3, parameters and optimizer on the host (`pin`: in pinned memory), its CPU
    Adam. Weights are drawn on the GPU, a layer at a time, as `zero.Init` takes them. `half`: the
    exact copy and the moments in BF16. `way`: "superoffload", or "zenflow" at stage 2: both
    have the parameters on the GPU."""
    import deepspeed as ds  # type: ignore[import-not-found]

    group()
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": pin}
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": optimizer,
        "offload_param": {"device": "cpu", "pin_memory": pin},
    }
    if way == "superoffload":
        optimizer |= {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9}
        zero |= SUPER
    elif way == "zenflow":
        zero |= {"stage": 2, "zenflow": ZENFLOW}
    if way:
        del zero["offload_param"]
    smaller = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {
        "train_micro_batch_size_per_gpu": task.rows,
        "bf16": {"enabled": True, **(smaller if half else {})},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER | {"lr": lr}},
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    if zero["stage"] == 3:
        with ds.zero.Init(config_dict_or_path=config):
            model = task.make()
        for name, parameter in model.named_parameters() if task.drawn else ():
            with ds.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(task.value(name, parameter))
    else:
        model = filled(task.empty(), task.value, torch.bfloat16, place())
    task.recompute(model)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        loss = task.loss(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = timed(step, task.tokens, steps)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    how = {"pinned": pin, "half": half, "way": way}
    return {**found, "version": ds.__version__, "parameters": count, **how}


def compile_adam() -> None:
    """DeepSpeed's CPU Adam, compiled once and kept in torch's cache of extensions."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # type: ignore[import-not-found]

    CPUAdamBuilder().load(verbose=False)


class NoMask:
    """Tokens that are all there. MegaTrain takes a mask to the GPU and gives it to each layer;
    without one, attention takes torch's causal kernel."""

    def to(self, _device: torch.device) -> None:
        """No tensor."""


def megatrain(layers: int, width: int, rows: int, steps: int, length: int = 1024) -> dict[str, Any]:
    """MegaTrain, whose checkout is on PYTHONPATH, at its defaults: weights and gradients in BF16,
    FP32 moments on the host, DeepSpeed's CPU Adam, every fourth layer's input kept. Its models are
    those of transformers, so this is a Llama of the own one's size."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    from infinity import CPUMasterConfig, CPUMasterModel  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=-(-8 * width // 3 // 256) * 256,
        num_hidden_layers=layers, num_attention_heads=width // 128, head_dim=128,
        num_key_value_heads=width // 128, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(shape).bfloat16()
    model.model.rotary_emb = type(model.model.rotary_emb)(shape)
    filled(model, value_of, torch.bfloat16, "cpu")
    own = {"attn_implementation": "sdpa", "dataset_path": "none", "enable_timing": False}
    master = CPUMasterModel(model, CPUMasterConfig(max_seq_len=length, batch_size=rows, **own))
    del model
    parameters = master.get_parameters()
    optimizer = DeepSpeedCPUAdam(parameters, lr=1e-6, weight_decay=HYPER["weight_decay"])
    tokens = batch_of(rows, length).cpu()

    def step() -> torch.Tensor:
        loss, _, _ = master.forward_and_backward(tokens, NoMask(), tokens)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        master._sync_params_to_gpu()
        master.zero_grad()
        optimizer.zero_grad()
        return torch.tensor(loss)

    found = timed(step, tokens.numel(), steps)
    master.cleanup()
    return {**found, "parameters": sum(p.numel() for p in parameters)}
