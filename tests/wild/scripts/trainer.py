"""transformers' Trainer on a small GPT-2: clipping as it is by default, evaluation, checkpoints.

Also on a mixture of experts, and with LoRA under checkpointing.
"""

import argparse

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.wild import harness as wild


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(128, (32,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Follow(TrainerCallback):
    trainer: Trainer

    def on_train_begin(self, args, state, control, **given):
        wild.line(self.trainer.model_wrapped, given["optimizer"])

    def on_log(self, args, state, control, logs=None, **given):
        if logs and "loss" in logs:
            wild.step(logs["loss"])


def made(kind: str) -> torch.nn.Module:
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=128, n_positions=32, n_embd=48, n_layer=3, n_head=4)
        )
    base = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            max_position_embeddings=32,
            output_router_logits=True,
        )
    )
    if kind == "mixtral":
        return base
    from peft import LoraConfig, get_peft_model

    base.enable_input_require_grads()
    return get_peft_model(
        base,
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--reentrant", action="store_true", help="checkpointing in two backwards")
    parser.add_argument("--model", choices=("gpt2", "mixtral", "lora"), default="gpt2")
    parser.add_argument("--again", action="store_true", help="a second Trainer goes on")
    args = parser.parse_args()
    wild.begin()
    model = made(args.model)
    wild.watch(model)
    given = TrainingArguments(
        output_dir=str(wild.OUT / "trainer"),
        max_steps=wild.STEPS // 2 if args.again else wild.STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 if args.accumulate else 1,
        gradient_checkpointing=args.accumulate or args.reentrant or args.model == "lora",
        gradient_checkpointing_kwargs={"use_reentrant": args.reentrant},
        bf16=args.bf16,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(wild.STEPS // 2, 1),
        save_strategy="steps",
        save_steps=max(wild.STEPS // 2, 1),
        ddp_find_unused_parameters=True if args.model == "lora" else None,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    evaluated = torch.utils.data.Subset(Tokens(), range(16))
    kept = []
    for _ in range(2 if args.again else 1):
        follow = Follow()
        follow.trainer = Trainer(
            model, given, train_dataset=Tokens(), eval_dataset=evaluated, callbacks=[follow]
        )
        follow.trainer.train()
        kept.append(follow)  # as a notebook does: the first wrapper lives on
    wild.end()


if __name__ == "__main__":
    main()
