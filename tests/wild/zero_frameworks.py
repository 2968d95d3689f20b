"""Programs of transformers, Accelerate, Lightning, peft, trl and bitsandbytes with evener.zero,
beside the same program without it: `python -m tests.wild.zero_frameworks`.

It runs in the wild environment (`make wild` makes it), on one CPU process. Each program says what
it saw: losses, evaluations, what it generated. Under the engine all blocks but the first are on the
host. The numbers must be the plain program's to rounding, and a program that is stopped and resumed
by its own calls must see what it saw without a stop.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evener import zero
from evener.zero import api

WORDS, STEPS, APART = 100, 6, 1e-3
Seen = list[float]


class _Found:
    machine = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)


def settings(gpu: str = "900KB") -> dict[str, Any]:
    return {
        "zero_optimization": {"stage3_param_persistence_threshold": 100},
        "evener": {"device": "cpu", "budget": {"gpu": gpu, "host": "2GB"}},
    }


def llama(width: int = 32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
            num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip


def lora(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    names = ["q_proj", "v_proj", "up_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))


def qlora() -> Any:
    """A Llama in 4 bits (bitsandbytes, scales quantized too) with an adapter. trl rounds such an
    adapter to bf16, and plain training then rounds each step; the engine's steps are exact, so here
    both train in float32. bitsandbytes has one more product for evaluation on some CPUs: not used,
    as it computes in bf16."""
    import bitsandbytes
    import peft
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        llama(width=64).save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantized, device_map={"": "cpu"}
        )
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return lora(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))


def rows(count: int = 48, length: int = 16) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(3, WORDS, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(folder: Path, kind: Any = None, **changes: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "output_dir": str(folder), "max_steps": STEPS, "save_steps": 3, "logging_steps": 1,
        "use_cpu": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "report_to": [], "disable_tqdm": True, "eval_strategy": "steps",
        "eval_steps": 2,
    }  # fmt: skip
    return (kind or TrainingArguments)(**{**given, **changes})


def history(trainer: Any) -> Seen:
    keys = ("loss", "grad_norm", "eval_loss", "eval_longest")
    return [float(e[k]) for e in trainer.state.log_history for k in keys if k in e]


def run_trainer(base: Any, under: bool, folder: Path, resume: bool, **given: Any) -> Any:
    kind = zero.trainer(base, settings(), batch=(2, 16)) if under else base
    trainer = kind(**given)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # trl makes the adapters of a 4-bit model bf16: see `qlora`
            parameter.data = parameter.data.float()
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def end(trainer: Any, under: bool) -> None:
    if under:
        trainer.accelerator.evener.close()


def trainer_lora(under: bool, folder: Path, resume: bool) -> Seen:
    """peft in Trainer: accumulation, evaluation in between, two checkpoints kept at most."""
    from transformers import Trainer

    args = arguments(folder, gradient_accumulation_steps=2, save_total_limit=1, weight_decay=0.1)
    data = rows()
    trainer = run_trainer(Trainer, under, folder, resume, model=lora(llama()), args=args,
                          train_dataset=data, eval_dataset=data[:4])  # fmt: skip
    kept = [path.name for path in folder.glob("checkpoint-*")]
    assert kept == [f"checkpoint-{STEPS}"], kept
    end(trainer, under)
    return history(trainer)


def trainer_best(under: bool, folder: Path, resume: bool) -> Seen:
    """The best checkpoint is loaded at the end; rows of all lengths are padded."""
    from transformers import Trainer

    def collate(given: list[Any]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([g["input_ids"] for g in given], batch_first=True)
        return {
            "input_ids": tokens, "attention_mask": (tokens > 0).long(),
            "labels": tokens.masked_fill(tokens == 0, -100),
        }  # fmt: skip

    data = [{"input_ids": r["input_ids"][: 6 + n % 10]} for n, r in enumerate(rows())]
    args = arguments(
        folder, save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        lr_scheduler_type="cosine", warmup_steps=2, remove_unused_columns=False,
    )  # fmt: skip
    trainer = run_trainer(
        Trainer, under, folder, resume, model=llama(), args=args, train_dataset=data,
        eval_dataset=data[:6], data_collator=collate,
    )  # fmt: skip
    seen = [*history(trainer), trainer.evaluate()["eval_loss"]]
    predicted = trainer.predict(data[:4]).predictions
    end(trainer, under)
    return [*seen, float(abs(predicted).mean())]


def trainer_generates(under: bool, folder: Path, resume: bool) -> Seen:
    """T5 in Seq2SeqTrainer, which generates in each evaluation."""
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                 decoder_start_token_id=0, dropout_rate=0.0)
    )  # fmt: skip
    args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True,
                     generation_max_length=8)  # fmt: skip
    data = rows()
    trainer = run_trainer(
        Seq2SeqTrainer, under, folder, resume, model=model, args=args, train_dataset=data,
        eval_dataset=data[:4],
        compute_metrics=lambda given: {"longest": float((given.predictions > 0).sum())},
    )  # fmt: skip
    end(trainer, under)
    return history(trainer)


def words() -> Any:
    """A tokenizer of `WORDS` words, w0 ... (trl's trainers want one)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    names = {f"w{n}": n for n in range(WORDS)}
    found = Tokenizer(WordLevel(names, unk_token="w3"))
    found.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="w0", eos_token="w2")


def run_sft(model: Any, under: bool, folder: Path, resume: bool, **changes: Any) -> Seen:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": r["input_ids"].tolist()} for r in rows()])
    args = arguments(folder, SFTConfig, gradient_checkpointing=False, bf16=False, **changes)
    trainer = run_trainer(SFTTrainer, under, folder, resume, model=model, args=args,
                          train_dataset=data, eval_dataset=data.select(range(4)),
                          processing_class=words())  # fmt: skip
    end(trainer, under)
    return history(trainer)


def trl_sft(under: bool, folder: Path, resume: bool) -> Seen:
    """trl's SFTTrainer on tokens."""
    return run_sft(llama(), under, folder, resume)


def trl_sft_lora(under: bool, folder: Path, resume: bool) -> Seen:
    """The same with peft, and label smoothing, for which it asks the model for its logits."""
    return run_sft(lora(llama()), under, folder, resume, label_smoothing_factor=0.1)


def qlora_sft(under: bool, folder: Path, resume: bool) -> Seen:
    """trl's SFTTrainer on a model in 4 bits."""
    return run_sft(qlora(), under, folder, resume)


def run_dpo(model: Any, under: bool, folder: Path, resume: bool, **given: Any) -> Seen:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def text(numbers: torch.Tensor) -> str:
        return " ".join(f"w{int(n)}" for n in numbers)

    pairs = [
        {"prompt": text(r["input_ids"][:4]) + " ", "chosen": text(r["input_ids"][4:10]),
         "rejected": text(r["input_ids"][10:])} for r in rows()
    ]  # fmt: skip
    args = arguments(folder, DPOConfig, gradient_checkpointing=False, bf16=False)
    data = Dataset.from_list(pairs)
    trainer = run_trainer(DPOTrainer, under, folder, resume, model=model, args=args,
                          train_dataset=data, eval_dataset=data.select(range(4)),
                          processing_class=words(), **given)  # fmt: skip
    end(trainer, under)
    return history(trainer)


def trl_dpo(under: bool, folder: Path, resume: bool) -> Seen:
    """trl's DPOTrainer with a reference model of its own."""
    return run_dpo(llama(), under, folder, resume, ref_model=llama())


def trl_dpo_lora(under: bool, folder: Path, resume: bool) -> Seen:
    """trl's DPOTrainer with peft: the reference is the model without its adapters."""
    return run_dpo(lora(llama()), under, folder, resume)


def qlora_dpo(under: bool, folder: Path, resume: bool) -> Seen:
    """trl's DPOTrainer on a model in 4 bits."""
    return run_dpo(qlora(), under, folder, resume)


def accelerate_lora(under: bool, folder: Path, resume: bool) -> Seen:
    """peft in an Accelerate loop that generates between steps and writes the adapter."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if under:
        zero.accelerate(accelerator, settings(), batch=(2, 16))
    model = lora(llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if resume:
        accelerator.load_state(str(folder / "state"))
        first = 3
    seen: Seen = []
    data = rows()
    for step in range(first, STEPS):
        for part in range(2):
            batch = torch.stack([r["input_ids"] for r in data[4 * step + 2 * part :][:2]])
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(float(loss.detach()))
        with torch.no_grad():
            made = accelerator.unwrap_model(model).generate(
                input_ids=batch[:, :4], max_new_tokens=4, do_sample=False
            )
        seen.append(float(made.float().sum()))
        if step == 2 and not resume:
            accelerator.save_state(str(folder / "state"))
    accelerator.unwrap_model(model).save_pretrained(
        folder / "adapter", state_dict=accelerator.get_state_dict(model)
    )
    from safetensors.torch import load_file

    kept = load_file(folder / "adapter" / "adapter_model.safetensors")
    seen += [float(value.abs().sum()) for _, value in sorted(kept.items())]
    if under:
        accelerator.evener.close()
    return seen


def lightning_accumulates(under: bool, folder: Path, resume: bool) -> Seen:
    """Lightning: accumulation, validation within an epoch, and a test at the end."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from evener.zero.frameworks.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.seen: Seen = []

        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return self.step(tokens)

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.seen.append(float(outputs["loss"].detach()))

        def validation_step(self, tokens: torch.Tensor, _: int) -> None:
            self.log("val", self.step(tokens))

        def test_step(self, tokens: torch.Tensor, _: int) -> None:
            self.log("test", self.step(tokens))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    tokens = torch.stack([r["input_ids"] for r in rows(24)]).view(12, 2, 16)
    loader = torch.utils.data.DataLoader(list(tokens), batch_size=None)
    module = Module()
    strategy = ZeroStrategy(settings(), example=(tokens[0], 0)) if under else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2, val_check_interval=6, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val",
                                   save_on_train_epoch_end=True)],
    )  # fmt: skip
    path = str(folder / "epoch=0.ckpt") if resume else None
    trainer.fit(module, loader, loader, ckpt_path=path)
    seen = [*module.seen, float(trainer.callback_metrics["val"])]
    if not under:
        seen.append(trainer.test(module, loader, verbose=False)[0]["test"])
        return seen
    with torch.no_grad():  # the engine is gone: the module has its values again
        module.eval()
        return [*seen, float(torch.stack([module.step(each) for each in tokens]).mean())]


PROGRAMS: dict[str, Callable[[bool, Path, bool], Seen]] = {
    "trainer-lora": trainer_lora,
    "trainer-best": trainer_best,
    "trainer-generates": trainer_generates,
    "trl-sft": trl_sft,
    "trl-sft-lora": trl_sft_lora,
    "trl-dpo": trl_dpo,
    "trl-dpo-lora": trl_dpo_lora,
    "qlora-sft": qlora_sft,
    "qlora-dpo": qlora_dpo,
    "accelerate-lora": accelerate_lora,
    "lightning-accumulates": lightning_accumulates,
}


def compared(program: Callable[[bool, Path, bool], Seen]) -> tuple[bool, str]:
    """Whether it sees what it should, and in words."""
    with tempfile.TemporaryDirectory() as name:
        plain, under = Path(name, "plain"), Path(name, "under")
        want, got = program(False, plain, False), program(True, under, False)
        if len(want) != len(got):
            return False, f"{len(got)} numbers, and {len(want)} without the engine"
        apart = max(abs(a - b) / max(1e-6, abs(b)) for a, b in zip(got, want, strict=True))
        again = ""
        good = apart < APART
        later = under.joinpath("checkpoint-3")
        if later.is_dir() or under.joinpath("state").is_dir() or list(under.glob("*.ckpt")):
            if later.is_dir():  # the run is taken up from its middle
                _forget(under)
            resumed = program(True, under, True)
            same = resumed == got[-len(resumed) :]
            good, again = good and same, f", resumed {'to the bit' if same else 'otherwise  <-'}"
    return good, f"{len(got)} numbers, apart {apart:.0e}{again}"


def _forget(folder: Path) -> None:
    """All checkpoints but the one of step 3."""
    import shutil

    for path in folder.glob("checkpoint-*"):
        if path.name != "checkpoint-3":
            shutil.rmtree(path)


def main() -> int:
    """Exit status 1 where a program sees other numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-k", default="", help="programs whose names contain this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    api.probe = lambda *_, **__: _Found()  # type: ignore[assignment]
    bad = 0
    for name, program in PROGRAMS.items():
        if given.k not in name:
            continue
        begun = time.perf_counter()
        try:
            good, said = compared(program)
        except Exception:  # noqa: BLE001  # the other programs are tried all the same
            good, said = False, f"FAILED\n{traceback.format_exc()[-1500:]}"
        bad += not good
        took = time.perf_counter() - begun
        print(f"{name:22} {said}{'' if good else '  <-'} ({took:.0f} s)", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
