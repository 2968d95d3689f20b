"""sentence-transformers' trainer on a small BERT: two towers of one model, in-batch negatives."""

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

from tests.wild import harness as wild

WORDS = [f"w{i}" for i in range(100)]


def base() -> str:
    """A folder with a BERT and its tokenizer, as a hub would give it."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = str(wild.SCRATCH / "base")
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    ).save_pretrained(folder)
    BertModel(
        BertConfig(
            vocab_size=len(names),
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=32,
        )
    ).save_pretrained(folder)
    return folder


class Follow(TrainerCallback):
    trainer: SentenceTransformerTrainer

    def on_train_begin(self, args, state, control, **given):
        wild.line(self.trainer.model_wrapped, given["optimizer"])

    def on_log(self, args, state, control, logs=None, **given):
        if logs and "loss" in logs:
            wild.step(logs["loss"])


def main() -> None:
    wild.begin()
    body = Transformer(base())
    model = SentenceTransformer(modules=[body, Pooling(48)], device="cpu")
    wild.watch(model)
    one = [" ".join(WORDS[(i + j * 3) % 100] for j in range(6)) for i in range(400)]
    two = [" ".join(WORDS[(i + j * 3) % 100] for j in range(5, -1, -1)) for i in range(400)]
    follow = Follow()
    follow.trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            output_dir=str(wild.OUT / "sentences"),
            max_steps=wild.STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": one, "positive": two}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[follow],
    )
    follow.trainer.train()
    wild.end()


if __name__ == "__main__":
    main()
