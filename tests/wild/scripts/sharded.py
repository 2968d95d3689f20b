"""Models that FSDP2 shards over all ranks, in the ways of several frameworks. No door is named."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.wild import harness as wild

WORDS = 64


def by_hand(net: nn.Module, blocks: Iterable[nn.Module], loss: Callable[[int], Any]) -> None:
    """A public script's loop: units are blocks and the root, clipping, two micro-batches."""
    wild.watch(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(wild.STEPS):
        for part in range(2):
            net.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            found = loss(2 * step + part) / 2
            found.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wild.step(found)


def llama_config(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    return {**sizes, **heads, "max_position_embeddings": 64, **more}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**llama_config()))


def checkpointed() -> None:
    """transformers' Llama with its blocks recomputed and the head tied to the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(**llama_config(tie_word_embeddings=True)))
    net.gradient_checkpointing_enable({"use_reentrant": False})
    net.train()

    def loss(step: int) -> Any:
        ids = wild.tokens(step, WORDS, 4, 16)
        return net(input_ids=ids, labels=ids).loss

    by_hand(net, net.model.layers, loss)


def mixtral() -> None:
    """A mixture of experts: which of them a batch uses differs from step to step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    net = MixtralForCausalLM(MixtralConfig(**llama_config(num_local_experts=4)))

    def loss(step: int) -> Any:
        ids = wild.tokens(step, WORDS, 4, 16)
        return net(input_ids=ids, labels=ids).loss

    by_hand(net, net.model.layers, loss)


def dit() -> None:
    """A diffusion transformer of diffusers, by noise prediction."""
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip

    def loss(step: int) -> Any:
        clean = wild.data(step, 4, 4, 8, 8)
        noise = wild.data(step + 10_000, 4, 4, 8, 8)
        at, kind = wild.tokens(step, 1000, 4), wild.tokens(step, 10, 4)
        mixed = clean * (1 - at.view(-1, 1, 1, 1) / 1000) + noise * at.view(-1, 1, 1, 1) / 1000
        found = net(mixed, timestep=at, class_labels=kind).sample
        return nn.functional.mse_loss(found[:, :4].float(), noise)

    by_hand(net, net.transformer_blocks, loss)


def titan() -> None:
    """torchtitan's Llama and its own way to apply FSDP2."""
    from torchtitan.models.llama3 import infra, model  # noqa: F401
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    net = Transformer(TransformerModelArgs(dim=32, n_layers=3, n_heads=4, vocab_size=WORDS))
    net.init_weights()
    wild.watch(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_fsdp(net, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=False)
    for step in range(wild.STEPS):
        ids = wild.tokens(step, WORDS, 4, 17)
        logits = net(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wild.step(loss)


def accelerate() -> None:
    """Accelerate with FSDP2, accumulation and clipping."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin, mixed_precision="bf16"
    )
    net = llama()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer = accelerator.prepare(net, optimizer)
    wild.watch(net)
    done = 0
    for batch in range(2 * wild.STEPS):
        with accelerator.accumulate(net):
            ids = wild.tokens(batch, WORDS, 4, 16)
            loss = net(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            wild.step(loss)
            done += 1
            if done == wild.STEPS // 2:
                accelerator.save_state(str(wild.OUT / "state"))
                accelerator.wait_for_everyone()
                accelerator.load_state(str(wild.OUT / "state"))


def trainer() -> None:
    """transformers' Trainer with its FSDP2."""
    import transformers

    class Told(transformers.Trainer):
        def training_step(self, model: Any, *given: Any, **more: Any) -> Any:
            if not watched:
                watched.append(model)
                wild.watch(model)
            return super().training_step(model, *given, **more)

    watched: list[Any] = []

    class After(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                wild.step(logs["loss"])

    ids = [
        torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(i)) for i in range(999)
    ]
    data = [{"input_ids": each, "labels": each} for each in ids]
    wraps = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = transformers.TrainingArguments(
        output_dir=str(wild.SCRATCH), use_cpu=True, max_steps=wild.STEPS, report_to=[],
        per_device_train_batch_size=4, logging_steps=1, save_strategy="no", bf16=True,
        fsdp="full_shard auto_wrap", fsdp_config=wraps, disable_tqdm=True,
    )  # fmt: skip
    Told(model=llama(), args=args, train_dataset=data, callbacks=[After()]).train()


def lightning() -> None:
    """Lightning's ModelParallelStrategy."""
    import lightning as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(4)]
            )

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.net:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> Any:
            if index == 0:
                wild.watch(self.net)
            return (self.net(batch[0]) - batch[0]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            wild.step(outputs["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    made = torch.Generator().manual_seed(wild.RANK)
    data = torch.utils.data.TensorDataset(torch.randn(8 * wild.STEPS, 32, generator=made))
    size = dist.get_world_size() if dist.is_initialized() else 2
    strategy = ModelParallelStrategy(
        data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo"
    )
    strategy.cluster_environment = TorchElasticEnvironment()
    pl.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=wild.STEPS, logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=8))  # fmt: skip


KINDS = {
    each.__name__: each
    for each in (checkpointed, mixtral, dit, titan, accelerate, trainer, lightning)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    wild.begin(group=kind in ("checkpointed", "mixtral", "dit", "titan"))
    KINDS[kind]()
    wild.end()


if __name__ == "__main__":
    main()
