"""trl's own scripts, not a line of them changed, with EVENER_ZERO and without:
`python -m tests.wild.zero_scripts`.

It runs in the wild environment (`make wild` makes it), each script in a process of its own on the
CPU. Models, tokenizer and data are made on the spot. Losses and the weights that the script saves
must be the plain script's to rounding, and a run that is resumed at its middle must see the losses
that it saw without a stop. With `--gpu` the model has 1.2 billion parameters, and what is looked at
is the GPU memory that each takes, at losses that are those of bf16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evener.door.enter import SITE
from tests.wild.zero_frameworks import APART, STEPS, WORDS, llama, settings, words

ROOT = Path(__file__).parent.parent.parent
SAYS = "trains under evener.zero"
LORA, QLORA = ("--use_peft",), ("--use_peft", "--load_in_4bit")
SHORT = ("--max_length", "64")  # the plan counts with it
PROGRAMS: dict[str, tuple[str, ...]] = {
    "sft": ("sft", *SHORT),
    "sft-lora": ("sft", *LORA, *SHORT),
    "sft-qlora": ("sft", *QLORA, *SHORT),
    "sft-packed": ("sft", *SHORT, "--packing", "--gradient_accumulation_steps", "2",
                   "--eval_strategy", "steps", "--eval_steps", "2"),
    "dpo": ("dpo", *SHORT),
    "dpo-lora": ("dpo", *LORA, *SHORT),
    "dpo-qlora": ("dpo", *QLORA, *SHORT),
    "kto": ("kto", *SHORT),
    "reward": ("reward", *SHORT),
    "grpo": ("grpo", "--num_generations", "2", "--max_completion_length", "8",
             "--reward_model_name_or_path", "model"),
}  # fmt: skip

SECOND = {"dpo": "16GB"}
"""Budgets of scripts that put a second model on the GPU, beside the engine but of its budget."""


@dataclass
class Ran:
    """What a run left: losses, also of evaluations, its weights, and its peak in megabytes."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    peak: float


LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
         "num_attention_heads": 16, "max_position_embeddings": 1024}  # fmt: skip
"""With `--gpu`, beside rows of 32 times the words."""
ROUNDED = 0.05
WATCHED = """
import runpy, sys, torch
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
print("gpu peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
"""


def make(folder: Path, gpu: bool) -> None:
    """A model with its tokenizer in `model`, and rows for each script in a folder of its name."""
    with torch.device("cuda" if gpu else "cpu"):
        model = llama(**(LARGE if gpu else {"hidden_size": 64}))
    (model.bfloat16() if gpu else model).save_pretrained(folder / "model")
    words().save_pretrained(folder / "model")
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{draw.randrange(4, WORDS)}" for _ in range(count * 32**gpu))

    def row(script: str) -> dict[str, Any]:
        if script == "sft":
            return {"prompt": text(6), "completion": f" {text(10)}"}
        if script == "kto":
            return {"prompt": text(6), "completion": f" {text(10)}", "label": draw.random() < 0.5}
        if script == "reward":
            return {"chosen": text(12), "rejected": text(9)}
        pair = {"chosen": f" {text(8)}", "rejected": f" {text(8)}"} if script == "dpo" else {}
        return {"prompt": text(6), **pair}

    for script in {script for script, *_ in PROGRAMS.values()}:
        (folder / script).mkdir()
        for split in ("train", "test"):
            lines = "".join(f"{json.dumps(row(script))}\n" for _ in range(32))
            (folder / script / f"{split}.jsonl").write_text(lines)
    for script in ("", *SECOND):
        config = settings("8MB")
        if gpu:
            budget = {"gpu": SECOND.get(script, "10GB"), "host": "60GB"}
            config["evener"] = {"device": "cuda", "budget": budget}
        (folder / f"ds_config{script}.json").write_text(json.dumps(config))


def run(
    name: str, folder: Path, out: str, value: str, resume: bool = False, gpu: bool = False
) -> Ran:
    """Run a script as its user does. `value`: of EVENER_ZERO. Raises RuntimeError where it ends
    with an error."""
    script, *options = PROGRAMS[name]
    place = ["--use_cpu"]
    if gpu:
        place, options = [], [word.replace("64", "512") for word in options]
    given = {
        "model_name_or_path": "model", "dataset_name": script, "output_dir": out,
        "max_steps": STEPS, "save_steps": STEPS // 2, "logging_steps": 1,
        "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": "none",
        "bf16": gpu,
    }  # fmt: skip
    if gpu:
        given["save_strategy"] = "no"  # gigabytes, which say nothing about the GPU
        if script == "dpo":
            given["learning_rate"] = 1e-5  # at 1e-3 its loss grows, and any rounding with it
    if resume:
        given["resume_from_checkpoint"] = f"{out}/checkpoint-{STEPS // 2}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EVENER_")}
    path = filter(None, [kept.pop("PYTHONPATH", "")])
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *(("-c", WATCHED) if gpu else ("-m",)), f"trl.scripts.{script}"]
            + [*place, *options]
            + [word for key, value in given.items() for word in (f"--{key}", str(value))],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={**kept, "EVENER_ZERO": value, "EVENER_LOG": "info",
                 "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT / "python"), *path]),
                 "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"),
                 "TOKENIZERS_PARALLELISM": "false",
                 **({} if gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{script} ended with {process.returncode}:\n{said[-2000:]}")
    if (SAYS in said) != (value != "off"):
        raise RuntimeError(
            f"EVENER_ZERO={value}: {SAYS!r} was{'' if SAYS in said else ' not'} said"
        )
    if gpu:
        losses = [float(found) for found in re.findall(r"\{'loss': '?([-+.e\d]+)", said)]
        return Ran(losses, {}, int(said.partition("gpu peak ")[2].split()[0]) / 1e6)
    from safetensors.torch import load_file

    state = json.loads((folder / out / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    losses = [float(e[k]) for e in state["log_history"] for k in ("loss", "eval_loss") if k in e]
    saved = next(path for path in (folder / out).glob("*.safetensors"))
    return Ran(losses, load_file(saved), usage.ru_maxrss / 1000)


def compared(name: str, folder: Path, gpu: bool) -> tuple[bool, str]:
    """Whether it trains as it should, and in words."""
    config = f"ds_config{name if name in SECOND else ''}.json"
    plain, under = (
        run(name, folder, f"{name}-plain", "off", gpu=gpu),
        run(name, folder, name, config, gpu=gpu),
    )
    if plain.weights.keys() != under.weights.keys():
        return False, "saves other weights"
    apart = max(_apart(a, b) for a, b in zip(under.losses, plain.losses, strict=True))
    if gpu:
        return apart < ROUNDED, (
            f"{len(under.losses)} losses, apart {apart:.0e}, {under.losses[-1]} at the end "
            f"({plain.losses[-1]} plain), GPU {under.peak:.0f} MB, plain {plain.peak:.0f} MB"
        )
    # trl has the adapters of a model in 4 bits in bf16, and a plain run rounds each of its steps.
    rounded = "--load_in_4bit" in PROGRAMS[name]
    far = max(float((plain.weights[key].float() - value.float()).abs().max())
              for key, value in under.weights.items())  # fmt: skip
    good = apart < APART and (rounded or far < APART)
    again = run(name, folder, name, config, resume=True)
    good = good and (again.losses == under.losses or (
        rounded and max(map(_apart, again.losses, under.losses)) < APART))  # fmt: skip
    return good, (
        f"{len(under.losses)} losses, apart {apart:.0e}, weights {far:.0e}, resumed "
        f"{'to the bit' if again.losses == under.losses else 'otherwise'}, "
        f"peak {under.peak:.0f} MB, plain {plain.peak:.0f} MB"
    )


def _apart(a: float, b: float) -> float:
    """Relative; a loss of GRPO's is about zero."""
    return abs(a - b) / max(1e-3, abs(b))


def main() -> int:
    """Exit status 1 where a script trains otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-k", default="", help="these programs alone, separated by commas")
    parser.add_argument("--gpu", action="store_true", help="a larger model, on a GPU")
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("skipped: trl is not installed")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), given.gpu)
        for program in PROGRAMS:
            if given.k and program not in given.k.split(","):
                continue
            begun = time.perf_counter()
            try:
                good, said = compared(program, Path(name), given.gpu)
            except RuntimeError as error:
                good, said = False, str(error)
            bad += not good
            mark = "" if good else "  <-"
            print(f"{program}: {said}, {time.perf_counter() - begun:.0f} s{mark}", flush=True)
    print(f"{bad} train otherwise")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
