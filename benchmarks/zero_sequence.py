"""Memory of one sequence on several ranks (`evener.sequence`): a small model measured on CPUs, and
Llama 3 8B planned for GPUs that need not be here. JSON and a table.

    python benchmarks/zero_sequence.py [--json FILE]
    python benchmarks/zero_sequence.py --gpus 2 [--json FILE]    # NCCL, real GPUs

Measured: a Llama of 7 million parameters (4 layers, width 256, 8 heads), one sequence of 4,096
tokens, on 1, 2 and 4 ranks over Gloo; the simulated device counts what each holds. Planned: one
sequence of 524,288 tokens on 8 GPUs of 80 GB, a sequence each and one for all eight. Peaks are the
largest of the ranks. It needs transformers. GB are 1e9 bytes.

With `--gpus`: one sequence of 65,536 tokens through eight layers of Llama 3 8B, on one GPU and on
all of them, with the same weights.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import harness
import torch
import torch.distributed as dist
import transformers
from zero_models import Driver, memory, place, timed, value_of

from evener import zero
from evener.zero.machines import imagine

LENGTH, LONG, ACROSS = 4096, 524_288, 65_536
SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": LONG,
}  # fmt: skip


def _model(**shape: Any) -> Any:
    config = transformers.LlamaConfig(**shape, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config).train()


def measure(recompute: bool) -> None:
    """One rank of all that share the sequence; the first says what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(0, SMALL["vocab_size"], (1, LENGTH))
    given = {"input_ids": tokens, "labels": tokens}
    own = {"device": "simulated", "budget": {"gpu": "8GB", "host": "8GB"}}
    engine, *_ = zero.initialize(
        model=_model(**SMALL),
        config={
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "evener": {**own, "sequence": size, "checkpointing": recompute},
        },
        machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
        example=given,
    )
    for _ in range(2):
        engine.backward(engine(**given).loss)
        engine.step()
    found = engine.memory()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, (found["gpu planned"], found["gpu peak"]))
    engine.close()
    if dist.get_rank() == 0:
        planned, peak = (max(column) for column in zip(*every, strict=True))
        harness.say(planned=planned, peak=peak)


def on_gpus() -> None:
    """One rank of all that share the sequence, on its GPU; the first says what was found."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with zero.empty_weights():
        model = _model(**LLAMA3 | {"num_hidden_layers": 8})
    drawn = torch.Generator("cuda").manual_seed(0)  # the same on all ranks
    tokens = torch.randint(0, LLAMA3["vocab_size"], (1, ACROSS), device="cuda", generator=drawn)
    given = {"input_ids": tokens, "labels": tokens}
    engine, *_ = zero.initialize(
        model=model,
        config={
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "evener": {"device": place(), "sequence": size, "checkpointing": True, "tiles": True,
                       "budget": {"gpu": "70GB", "host": "60GB"}},
        },
        weights=value_of,
        example=given,
    )  # fmt: skip

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(**given).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = timed(step, ACROSS // size, 3, engine.drain, warmup=2)
    with Driver() as driver:
        step()
    found |= memory(driver, found) | {"planned": engine.memory()["gpu planned"]}
    engine.close()
    dist.destroy_process_group()
    if rank == 0:
        harness.say(**found)


def planned(sequence: int) -> dict[str, Any]:
    """The plan of the long sequence on eight GPUs."""
    machine = imagine("h100-80gb")
    with zero.empty_weights():
        model = _model(**LLAMA3)
    made = zero.plan(
        model,
        config={"bf16": {"enabled": True}, "evener": {"sequence": sequence, "checkpointing": "auto",
                "device": "cpu"}},
        budget={"gpu": machine.memory, "host": "2000GB"},
        batch=(1, LONG),
        ranks=8,
        machine=machine.machine,
    )  # fmt: skip
    return {"fits": made.fits, "gpu_bytes": made.gpu_bytes, "host_bytes": made.host_bytes,
            "checkpointing": made.checkpointing}  # fmt: skip


def main() -> None:
    """Each row in processes of its own."""
    parser = harness.arguments(__doc__, json="zero_sequence.json")
    parser.add_argument("--gpus", type=int, help="measure on so many GPUs, and nothing else")
    parser.add_argument(
        "--measure", choices=["none", "recompute", "gpu"], help="a rank, for itself"
    )
    given = parser.parse_args()
    if given.measure:
        on_gpus() if given.measure == "gpu" else measure(given.measure == "recompute")
        return
    rows: dict[str, Any] = {}
    for size in sorted({1, given.gpus}) if given.gpus else ():
        run = (sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(size))  # fmt: skip
        rows[f"{size} GPUs"] = harness.again("--measure", "gpu", launcher=run, limit=200).row
        print(f"{size} GPUs", rows[f"{size} GPUs"], flush=True)
        harness.keep(given, ["transformers"], measured=rows)
    if given.gpus:
        return
    for mode in ("none", "recompute"):
        for size in (1, 2, 4):
            run = (sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(size))  # fmt: skip
            rows[f"{mode}, {size} ranks"] = harness.again("--measure", mode, launcher=run).row
            print(f"{mode}, {size} ranks", rows[f"{mode}, {size} ranks"], flush=True)
    plans = {str(sequence): planned(sequence) for sequence in (8, 1)}
    print(plans)
    harness.keep(given, ["transformers"], measured=rows, planned=plans)


if __name__ == "__main__":
    main()
