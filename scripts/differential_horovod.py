"""The same script on upstream's Horovod and on Evener's: the same bytes out?

    python scripts/differential_horovod.py UPSTREAM_PYTHON

UPSTREAM_PYTHON: the interpreter of an environment in which upstream's horovod is built for torch,
with Gloo; its `horovodrun` stands beside it. Both run this file's `work` on two ranks. What each
operation gave on each rank is written as bytes, and compared: dtype, shape and every bit. With two
ranks a sum has one order only, so nothing may differ but what `KNOWN` names.

Given the interpreter that runs this, it compares Evener with itself, which shows that the
comparison runs; it says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int32", "int64")
REFUSED = "refused: "
# What is meant to differ, and why.
KNOWN = {
    "allreduce.float16.scaled": "upstream rounds to float16 after each factor and after the sum, "
    "Evener computes in float32 and rounds once",
}
SHAPES = ((), (0,), (1,), (17,), (3, 5, 7), (70000,))


def operations(hvd: Any, torch: Any) -> Iterator[tuple[str, Any]]:
    """(name, function that gives a tensor or some) of one operation after the other.

    Public calls only, those of upstream's last release.
    """
    rank = hvd.rank()

    def values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        kind = getattr(torch, dtype)
        if dtype in FLOATS:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
        low = 0 if dtype == "uint8" else -50
        return torch.randint(low, 50, shape, generator=generator).to(kind)

    reductions = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max}
    reductions["Product"] = hvd.Product
    for dtype in FLOATS + INTEGERS:
        for shape in SHAPES:
            x = values(dtype, shape)
            for word, op in reductions.items():
                name = f"allreduce.{dtype}.{list(shape)}.{word}"
                yield name, partial(hvd.allreduce, x, op=op, name=name)
            name = f"{dtype}.{list(shape)}"
            yield f"broadcast.{name}", partial(hvd.broadcast, x, root_rank=1, name=f"b.{name}")
            if shape and x.numel() < 1000:
                rows = torch.cat([x] * (rank + 1))
                yield f"allgather.{name}", partial(hvd.allgather, rows, name=f"g.{name}")
                scatter = partial(hvd.reducescatter, x, op=hvd.Sum, name=f"s.{name}")
                yield f"reducescatter.{name}", scatter
        x = values(dtype, (11, 2))
        factors = {"prescale_factor": 0.3, "postscale_factor": 1.7}
        scaled = partial(hvd.allreduce, x, op=hvd.Sum, name=f"scaled.{dtype}", **factors)
        yield f"allreduce.{dtype}.scaled", scaled
        splits = torch.tensor([4, 7] if rank == 0 else [9, 2], dtype=torch.int32)
        yield f"alltoall.{dtype}", partial(hvd.alltoall, x, splits=splits, name=f"a.{dtype}")
        group = [values(dtype, shape, 3) for shape in ((2,), (3, 3), (1,))]
        grouped = partial(hvd.grouped_allreduce, group, op=hvd.Average, name=f"grouped.{dtype}")
        yield f"grouped_allreduce.{dtype}", grouped
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(5):

        def train(step: int = step) -> Any:
            optimizer.zero_grad()
            model(values("float32", (6, 8), 10 + step)).square().mean().backward()
            optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

        yield f"step {step}", train


def work(folder: Path) -> None:
    """One rank: write name, dtype, shape and a digest of the bytes of each result."""
    import horovod.torch as hvd
    import torch

    import horovod

    torch.set_num_threads(1)
    hvd.init()
    rows: dict[str, Any] = {"version": f"{horovod.__version__} ({Path(horovod.__file__).parent})"}
    for name, operation in operations(hvd, torch):
        try:
            values = operation()
        except (ValueError, hvd.HorovodInternalError) as error:  # the same on both ranks
            rows[name] = f"{REFUSED}{error}"
            continue
        rows[name] = []
        for value in [values] if isinstance(values, torch.Tensor) else values:
            data = value.contiguous().numpy().tobytes()
            shown = f" {value.tolist()}" if value.numel() < 30 else ""
            digest = hashlib.sha256(data).hexdigest()
            rows[name].append(f"{value.dtype} {list(value.shape)} {digest}{shown}")
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(rows))
    hvd.barrier()
    hvd.shutdown()


def run(command: list[str], folder: Path, env: dict[str, str], timeout: float) -> list[Any]:
    """Start `work` on two ranks; what they wrote."""
    folder.mkdir()
    done = subprocess.run(
        [*command, str(Path(__file__).resolve()), "--work", str(folder)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", type=Path, help="of the environment with upstream's horovod")
    parser.add_argument("--json", type=Path, help="write the comparison there")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a side may take")
    options = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    launch = [sys.executable, "-m", "evener", "launch", "--horovod", "-np", "2", sys.executable]
    with tempfile.TemporaryDirectory() as scratch:
        ours = run(launch, Path(scratch) / "ours", dict(os.environ), options.timeout)
        theirs_launch = [str(options.python.parent / "horovodrun"), "-np", "2", "--gloo"]
        itself = options.python.absolute() == Path(sys.executable).absolute()
        if itself:
            print("this interpreter was given: Evener is compared with itself")
            theirs_launch, env = launch[:-1], dict(os.environ)
        theirs_launch.append(str(options.python.absolute()))
        theirs = run(theirs_launch, Path(scratch) / "theirs", env, options.timeout)
    versions = [side[0].pop("version") for side in (ours, theirs)]
    ours[1].pop("version")
    theirs[1].pop("version")
    if not itself and versions[0] == versions[1]:
        sys.exit(f"error: both sides ran {versions[0]}\n  fix: give upstream's interpreter")
    names = list(dict.fromkeys(name for side in (*ours, *theirs) for name in side))
    refused = [name for name in names if str(theirs[0].get(name)).startswith(REFUSED)]
    compared = [name for name in names if name not in refused]
    different = [
        {"rank": rank, "name": name, "ours": ours[rank].get(name), "theirs": theirs[rank].get(name)}
        for rank in range(2)
        for name in compared
        if ours[rank].get(name) != theirs[rank].get(name)
    ]
    for row in different:
        print(f"rank {row['rank']} {row['name']}")
        print(f"   ours   {row['ours']}\n   theirs {row['theirs']}")
        if row["name"] in KNOWN:
            print(f"   known: {KNOWN[row['name']]}")
    print(f"ours {versions[0]}\ntheirs {versions[1]}")
    print(f"{len(compared)} operations compared on 2 ranks, {len(different)} results differ")
    print(f"{len(refused)} operations upstream refuses:")
    for name in refused:
        print(f"   {name}: {theirs[0][name]}")
    if options.json:
        document = {
            "versions": [version.partition(" (")[0] for version in versions],
            "compared": len(compared),
            "different": different,
            "known": KNOWN,
            "refused_upstream": {name: theirs[0][name] for name in refused},
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["name"] in KNOWN for row in different) else 1


if __name__ == "__main__":
    sys.exit(main())
