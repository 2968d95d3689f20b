"""FSDP2 by Accelerate, in its own loop and as transformers' Trainer uses it.

Accelerate shards on GPUs alone: on CPUs it would go on with DistributedDataParallel. Here it is
told that its two processes have GPUs, and given CPUs: all that it then does to a model is FSDP2's.
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn

from tests.wild import harness as wild


def small() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def on_cpus() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def loop(checkpointing: bool) -> None:
    on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=checkpointing,
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    assert accelerator.is_fsdp2
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, wild.STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    wild.watch(model)
    for step in range(2 * wild.STEPS):
        ids = wild.tokens(step, 128, 4, 32)
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            wild.step(loss)
        if step == wild.STEPS:
            accelerator.save_state(str(wild.OUT / "state"))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(wild.OUT / "state"))
    wild.end()


def trainer() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tests.wild.scripts.trainer import Tokens

    class Follow(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **given):
            wild.watch(model)

        def on_log(self, args, state, control, logs=None, **given):
            if logs and "loss" in logs:
                wild.step(logs["loss"])

    given = TrainingArguments(
        output_dir=str(wild.OUT / "trainer"),
        max_steps=wild.STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(wild.STEPS // 2, 1),
        save_strategy="steps",
        save_steps=max(wild.STEPS // 2, 1),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    assert given.device.type == "cpu"
    on_cpus()
    evaluated = torch.utils.data.Subset(Tokens(), range(16))
    made = Trainer(
        small(), given, train_dataset=Tokens(), eval_dataset=evaluated, callbacks=[Follow()]
    )
    assert made.accelerator.is_fsdp2
    made.train()
    wild.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    wild.begin()
    if args.trainer:
        trainer()
    else:
        loop(args.checkpointing)


if __name__ == "__main__":
    main()
