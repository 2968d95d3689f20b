"""Models that nobody here wrote under the memory engine: 12 models x 3 budgets x 2 batches.

    python benchmarks/zero_zoo.py [--budget-s 300] [--only PREFIX,...] [--rounds 1,2] [--json FILE]

Models are transformers' own with drawn weights, checkpointing "auto", clipping at 1.0, the loss
their own; nothing is tuned. Each row: what the plan said of memory and time, and what was measured
(peak of torch's allocator with the context, of the driver for the whole GPU, of the process on the
host). A row that is refused must be refused at 1.15 x its budget too. The most telling rows come
first; rows that the file already has are not run again, so the command may be given again until
all are there. --tiny: the same code on a CPU with small models, which measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zero_diagnose

from evener import zero
from evener.zero.budget import resident_now
from evener.zero.probe import LIBRARIES

GB = 1_000_000_000
STEPS, WARMUP = 4, 5


def tiny_of(config: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small."""
    small = {
        "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 128, "d_ff": 128,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_layers": 2, "n_layer": 3, "encoder_layers": 2,
        "decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "d_kv": 16, "vocab_size": 4096, "image_size": 56, "num_experts": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_source_positions": 50,
        "num_mel_bins": 16,
    }  # fmt: skip
    return {key: small.get(key, value) for key, value in config.items()}


MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: (class, configuration, tokens of a sequence)
    "llama 2.7B": ("LlamaForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 32000}, 1024),
    "qwen3 4B": ("Qwen3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True}, 1024),
    "mixtral 2.2B": ("MixtralForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 7,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2}, 1024),
    "t5 3B": ("T5ForConditionalGeneration", {
        "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32,
        "vocab_size": 32128, "decoder_start_token_id": 0}, 512),
    "gpt2 xl": ("GPT2LMHeadModel", {
        "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}, 1024),
    "bert 2.5B": ("BertForMaskedLM", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 40, "vocab_size": 30522}, 512),
    "gemma 2.5B": ("GemmaForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 256000}, 1024),
    "qwen3 moe 2.6B": ("Qwen3MoeForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 48, "num_experts_per_tok": 8}, 1024),
    "whisper 1.5B": ("WhisperForConditionalGeneration", {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "vocab_size": 51866, "num_mel_bins": 128,
        "max_source_positions": 1500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1}, 384),
    "vit 1B": ("ViTForImageClassification", {
        "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 40,
        "num_attention_heads": 16, "image_size": 224, "patch_size": 14}, 256),
    "llama3 shape 2.8B": ("LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 1024),
    "qwen3 4B lora": ("Qwen3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True}, 1024),
}  # fmt: skip

BUDGETS: dict[str, tuple[float, float, float]] = {
    "llama 2.7B": (8, 24, 80),
    "qwen3 4B": (8, 40, 60),
    "mixtral 2.2B": (8, 16, 24),
    "t5 3B": (8, 24, 60),
    "gpt2 xl": (6, 16, 40),
    "bert 2.5B": (6, 8, 24),
    "gemma 2.5B": (10, 24, 60),
    "qwen3 moe 2.6B": (8, 16, 40),
    "whisper 1.5B": (6, 12, 40),
    "vit 1B": (4, 8, 24),
    "llama3 shape 2.8B": (8, 24, 60),
    "qwen3 4B lora": (8, 16, 40),
}
ROWS_OF_BATCH = (8, 2)


def rows_in_order() -> list[tuple[int, str, float, int]]:
    """(round, model, budget in GB, rows of the batch): each model's tight budget first."""
    found = []
    for model, budgets in BUDGETS.items():
        factor = 4 if model in ("vit 1B",) else 1
        order = [(budgets[0], 8), (budgets[1], 8), (budgets[2], 8), *((b, 2) for b in budgets)]
        for number, (budget, rows) in enumerate(order, 1):
            found.append((number, model, budget, rows * factor))
    return sorted(found, key=lambda row: row[0])


def name_of(model: str, budget: float, rows: int) -> str:
    """A row's name."""
    return f"{model}, {budget:g} GB, batch {rows}"


def model_of(name: str, tiny: bool) -> Any:
    """The model without memory; for LoRA with adapters that are."""
    import transformers  # type: ignore[import-not-found,unused-ignore]

    kind, config, _ = MODELS[name]
    config = tiny_of(config) if tiny else config
    cls = getattr(transformers, kind)
    with zero.empty_weights():
        model = cls(cls.config_class(**config))
        if name.endswith("lora"):
            import peft  # type: ignore[import-not-found,unused-ignore]

            model = peft.get_peft_model(
                model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
            )
    return model.train()


def batch_of(name: str, rows: int, model: Any, device: str, tiny: bool) -> dict[str, torch.Tensor]:
    """What the model is called with, with labels."""
    generator = torch.Generator(device).manual_seed(rows)
    length = 32 if tiny else MODELS[name][2]
    config = model.config

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=device, generator=generator)

    if name.startswith("vit"):
        size = config.image_size
        pixels = torch.randn(rows, 3, size, size, device=device, generator=generator)
        return {"pixel_values": pixels, "labels": whole(2, rows)}
    labels = whole(config.vocab_size, rows, length)
    if name.startswith("whisper"):
        shape = rows, config.num_mel_bins, 2 * config.max_source_positions
        sounds = torch.randn(*shape, device=device, generator=generator)
        return {"input_features": sounds, "labels": labels}
    return {"input_ids": labels, "labels": labels.clone()}


def value_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's initial value, drawn where it is used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if parameter.dim() < 2:
        fill = torch.zeros if name.endswith("bias") else torch.ones
        return fill(parameter.shape, device=device)
    generator = torch.Generator(device).manual_seed(sum(name.encode()))
    return torch.randn(parameter.shape, device=device, generator=generator).mul_(0.02)


def host_peak() -> int:
    """The most host memory that the process had resident since the last `forget_peaks`, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peaks() -> None:
    """Peaks begin anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _step(engine: zero.Engine, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def measure(
    name: str,
    budget: float,
    rows: int,
    machine: zero.Machine,
    tiny: bool,
    budget_host: int,
    more: bool = False,
    rehearse: bool = True,
) -> dict[str, Any]:
    """One row. `rehearse`: as the configuration has it. `more`: and why it takes what it takes
    (`zero_diagnose`)."""
    cuda = torch.cuda.is_available() and not tiny
    model = model_of(name, tiny)
    batch = batch_of(name, rows, model, "cuda" if cuda else "cpu", tiny)
    limit = int(budget * (4e6 if tiny else GB))
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "evener": {
            "checkpointing": "auto",
            "device": "cuda" if cuda else "simulated",
            "budget": {"gpu": limit, "host": budget_host},
            "rehearse": rehearse,
        },
    }
    begun = time.perf_counter()
    forget_peaks()
    machine = dataclasses.replace(machine, host_reserve=resident_now() + (LIBRARIES if cuda else 0))
    given = {"model": model, "machine": machine, "example": batch, "weights": value_of}
    traced: dict[str, Any] = {}
    try:
        with zero_diagnose.traced() if more else contextlib.nullcontext(traced) as traced:
            engine, *_ = zero.initialize(config=config, **given)
    except zero.NoFitError as error:
        refused: dict[str, Any] = {"refused": str(error), "nearest": error.nearest}
        refused["needs"] = error.plan.gpu_bytes / (1e6 if tiny else GB)
        refused["needs over budget"] = error.plan.gpu_bytes / limit
        return refused
    prepared = time.perf_counter() - begun
    plan = engine.plan
    assert plan is not None
    tokens = MODELS[name][2] * rows
    why: dict[str, Any] = {}
    once = functools.partial(_step, engine, batch)
    try:
        if more and cuda:
            try:
                why["memory"] = zero_diagnose.memory(engine, once, traced, limit)
                print("WHY " + json.dumps(why), flush=True)
            except Exception:  # noqa: BLE001  # the row itself is measured all the same
                traceback.print_exc()
        forget_peaks()
        driver, losses = 0, []
        marks: list[float] = []
        each: list[float] = []
        room: list[str] = []
        for step in range(WARMUP + STEPS):
            begun = time.perf_counter()
            if step == WARMUP:
                engine.drain()
                if cuda:
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())
            losses.append(once())
            if cuda:
                free, total = torch.cuda.mem_get_info()
                driver = max(driver, total - free)
            each.append(time.perf_counter() - begun)
            if len(engine.room.said) > len(room):
                room += [f"step {step}: {said}" for said in engine.room.said[len(room) :]]
        engine.drain()
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - marks[0]) / STEPS
        memory = engine.memory()
        allocated = torch.cuda.max_memory_allocated() if cuda else 0
        if cuda:
            why["time"] = zero_diagnose.timing(engine, once)
        return {
            "parameters": sum(place.numel for place in plan.places),
            "prepared_s": prepared,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "planned_seconds": plan.step_seconds,
            "speed_over_plan": plan.step_seconds / seconds,
            "expected_seconds": engine.expected_seconds,
            "speed_over_expected": engine.expected_seconds / seconds,
            "searched": engine.device.searched(),
            "bound": plan.bound,
            "times": plan.times,
            "checkpointing": plan.checkpointing,
            "recomputed": len(plan.recomputed),
            "traced": plan.traced,
            "resident": f"{len(plan.resident)}/{len(plan.places)}",
            "streaming": plan.streaming,
            "budget": limit,
            "gpu_planned": plan.gpu_bytes,
            "gpu_peak": memory["gpu peak"],
            "gpu_allocated": allocated,
            "gpu_driver": driver,
            "host_planned": plan.host_bytes,
            "host_peak": host_peak(),
            "again": memory["passes run again"],
            "made_room": room,
            "each_s": each,
            "losses": [float(x) for x in losses],
            **({"why": why} if why else {}),
        }
    finally:
        engine.close()
        del engine, model, batch, given, once
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def work(rows: list[list[Any]], tiny: bool, host: int, more: bool, rehearse: bool) -> None:
    """A process that measures one row after another, and says each."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not tiny else None
    machine = zero.probe(device or torch.device("cpu")).machine
    print("MACHINE " + json.dumps(dataclasses.asdict(machine)), flush=True)
    for model, budget, count in rows:
        name = name_of(model, budget, count)
        print("BEGIN " + name, flush=True)
        begun = time.perf_counter()
        left = torch.cuda.memory_allocated() if device is not None else 0
        try:
            found = measure(model, budget, count, machine, tiny, host, more, rehearse)
        except Exception as error:  # noqa: BLE001  # it is the row's result
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            found = {"failed": f"{type(error).__name__}: {said[0][:300]}"}
            del error
            gc.collect()
        found["left_by_earlier_rows"] = left
        found["row_s"] = time.perf_counter() - begun
        print("RESULT " + json.dumps({"name": name, "row": found}, default=str), flush=True)
        gc.collect()


def show(name: str, row: dict[str, Any], tiny: bool) -> None:
    """A line of the table."""
    unit = 1e6 if tiny else GB
    if "failed" in row:
        left = row.get("left_by_earlier_rows", 0) / unit
        print(f"{name:36} FAILED {row['failed'][:160]}, left before {left:.2f}", flush=True)
        return
    if "refused" in row:
        print(
            f"{name:36} refused: needs {row['needs']:.2f}, {row['needs over budget']:.2f} x the "
            f"budget; {'; '.join(row['nearest'])[:120]}",
            flush=True,
        )
        return
    over = "" if row["gpu_peak"] <= row["budget"] else " OVER"
    print(
        f"{name:36} {row['tokens_per_second']:8,.0f} tok/s, plan x {row['speed_over_plan']:.2f} "
        f"({row['bound']}); GPU {row['gpu_peak'] / unit:6.2f}{over}, plan "
        f"{row['gpu_planned'] / row['gpu_peak']:.3f} x, driver {row['gpu_driver'] / unit:6.2f}; "
        f"host {row['host_peak'] / unit:6.2f}, plan {row['host_planned'] / row['host_peak']:.3f} "
        f"x; {row['checkpointing']} {row['recomputed']}, resident {row['resident']}, again "
        f"{row['again']}, {row['row_s']:.0f} s, left before "
        f"{row['left_by_earlier_rows'] / unit:.2f}",
        flush=True,
    )
    for said in row["made_room"]:
        print(f"      made room: {said}", flush=True)


def summary(rows: dict[str, Any]) -> None:
    """What the table shows against what it must."""
    done = {name: row for name, row in rows.items() if "gpu_peak" in row}
    refused = [row for row in rows.values() if "refused" in row]
    failed = [name for name, row in rows.items() if "failed" in row]

    def count(test: Callable[[dict[str, Any]], bool]) -> str:
        return f"{sum(test(row) for row in done.values())}/{len(done)}"

    print(f"{len(rows)} rows: {len(done)} trained, {len(refused)} refused, failed: {failed}")
    print(
        f"GPU peak <= budget {count(lambda r: r['gpu_peak'] <= r['budget'])}; plan within 5% of it "
        f"{count(lambda r: abs(r['gpu_planned'] / r['gpu_peak'] - 1) <= 0.05)}; host within 3% "
        f"{count(lambda r: abs(r['host_planned'] / r['host_peak'] - 1) <= 0.03)}; >= 0.9 of the "
        f"plan's speed {count(lambda r: r['speed_over_plan'] >= 0.9)}, of the learned "
        f"{count(lambda r: r['speed_over_expected'] >= 0.9)}; no pass run again "
        f"{count(lambda r: r['again'] == 0)}; refused at 1.15 x too "
        f"{sum(row['needs over budget'] > 1.15 for row in refused)}/{len(refused)}"
    )


def main() -> None:
    """Run what is missing, until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budget-s", type=float, default=300, help="seconds for the whole run")
    parser.add_argument("--only", help="rows whose names begin so, separated by ;")
    parser.add_argument("--rounds", help="rounds, as 1,2: 1 is each model's tightest budget")
    parser.add_argument("--limit", type=float, default=75, help="seconds for a row")
    parser.add_argument("--host", type=float, default=100, help="GB of host memory")
    parser.add_argument("--again", action="store_true", help="run failed rows again")
    parser.add_argument("--fresh", action="store_true", help="a process for each row")
    parser.add_argument("--diagnose", action="store_true", help="why a row takes what it takes")
    parser.add_argument(
        "--rehearse", action=argparse.BooleanOptionalAction, default=True,
        help="units run before the plan",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU: a dry run")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/zero_zoo.json"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    host = int(given.host * GB)
    if given.work:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        logging.getLogger("evener.zero").setLevel(logging.INFO)
        work(json.loads(given.work), given.tiny, host, given.diagnose, given.rehearse)
        return
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one (--tiny: a dry run)")
    record: dict[str, Any] = {"rows": {}}
    if given.json.is_file():
        record = json.loads(given.json.read_text(encoding="utf-8"))
    record |= {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpus": len(os.sched_getaffinity(0)),
    }
    wanted = given.only.split(";") if given.only else [""]
    rounds = {int(x) for x in given.rounds.split(",")} if given.rounds else set(range(1, 7))
    todo: list[list[Any]] = []
    for number, model, budget, rows in rows_in_order():
        name = name_of(model, budget, rows)
        old = record["rows"].get(name)
        if old is not None and not (given.again and "failed" in old):
            continue
        if number in rounds and any(name.startswith(start) for start in wanted):
            todo.append([model, budget, rows])
    end = time.monotonic() + given.budget_s

    def keep(name: str, row: dict[str, Any]) -> None:
        record["rows"][name] = row
        show(name, row, given.tiny)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    while todo and time.monotonic() < end:
        mine = todo[:1] if given.fresh else todo
        command = [sys.executable, __file__, "--work", json.dumps(mine), "--host", str(given.host)]
        command += ["--tiny"] if given.tiny else []
        command += ["--diagnose"] if given.diagnose else []
        command += ["--no-rehearse"] if not given.rehearse else []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, bufsize=1
        ) as process:
            assert process.stdout is not None
            watch = selectors.DefaultSelector()
            watch.register(process.stdout, selectors.EVENT_READ)
            since, current = time.monotonic(), ""
            while True:
                if not watch.select(timeout=1.0):
                    if time.monotonic() > min(end, since + given.limit):
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
                        break
                    continue
                line = process.stdout.readline()
                if not line:
                    break
                if line.startswith("BEGIN "):
                    since, current = time.monotonic(), line[6:].strip()
                elif line.startswith("WHY "):
                    print(json.dumps(json.loads(line[4:]), indent=1), flush=True)
                elif line.startswith("MACHINE "):
                    record["machine"] = json.loads(line[8:])
                elif line.startswith("RESULT "):
                    found = json.loads(line[7:])
                    keep(found["name"], found["row"])
                    todo = [row for row in todo if name_of(*row) != found["name"]]
                    current = ""
            status = process.wait()
        if current and time.monotonic() < end:
            why = f"the process ended with {status}, or ran past {given.limit:.0f} s"
            keep(current, {"failed": why})
            todo = [row for row in todo if name_of(*row) != current]
        elif status != 0 and not current and time.monotonic() < end:
            print(f"the process ended with status {status} after its rows", flush=True)
            break
    summary(record["rows"])


if __name__ == "__main__":
    main()
