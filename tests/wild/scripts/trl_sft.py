"""trl's SFTTrainer on a small Llama, with a tokenizer that is made on the spot."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.wild import harness as wild

WORDS = [f"w{i}" for i in range(100)]


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Follow(TrainerCallback):
    trainer: SFTTrainer

    def on_train_begin(self, args, state, control, **given):
        wild.line(self.trainer.model_wrapped, given["optimizer"])

    def on_log(self, args, state, control, logs=None, **given):
        if logs and "loss" in logs:
            wild.step(logs["loss"])


def main() -> None:
    wild.begin()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=103,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    wild.watch(model)
    texts = [" ".join(WORDS[(i * 7 + j * j) % 100] for j in range(8 + i % 16)) for i in range(400)]
    follow = Follow()
    follow.trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(wild.OUT / "trl"),
            max_steps=wild.STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
            max_length=32,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[follow],
    )
    follow.trainer.train()
    wild.end()


if __name__ == "__main__":
    main()
