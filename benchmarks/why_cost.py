"""What being watched costs a rank: steps with and without the marks and the thread, in turns.

    python benchmarks/why_cost.py [--pairs 1000] [--seconds 0.2] [--device cpu|cuda]

Ranks train a small DistributedDataParallel with a DataLoader and an optimizer, whose steps are
short: what is added weighs most there. Each pair is one span of steps watched and one not, in the
same processes, in an order that alternates: the ring is taken away and given back, and the thread
sleeps where there is none. The ratio of a pair cancels what changes slowly on a shared machine; the
median of the pairs is reported, with its interval of 95% (by ranks) and the quartiles of the pairs:
many short pairs tell more than few long ones. The mark of a step is also timed by itself, which
bounds the cost where the spans are noisier than it. The ratio of CPU seconds is reported too: where
other programs take the cores, it stays what it is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import harness
from harness.records import RESULTS

from evener.base.ports import free_port


def rank_main(
    rank: int, ranks: int, port: int, folder: Path, pairs: int, seconds: float, device: str
) -> None:
    """One rank; rank 0 writes what it measured."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        LOCAL_RANK=str(rank), EVENER_LAUNCH_WATCH=str(folder / "rings"), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import _global_optimizer_post_hooks
    from torch.utils.data import DataLoader, TensorDataset

    from evener.watch import inside

    inside.arm()
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(place))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches = DataLoader(TensorDataset(torch.ones(1 << 16, 256)), batch_size=16)

    def span(count: int) -> tuple[float, float]:
        """Seconds of a step, over `count` steps, and CPU seconds of all this process's threads."""
        done, begin, work = 0, time.perf_counter(), time.process_time()
        while done < count:
            for (batch,) in batches:
                model(batch.to(place)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == count:
                    break
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count, (time.process_time() - work) / count

    span(30)
    each = torch.tensor([span(60)[0]])
    dist.broadcast(each.to(place) if device == "cuda" else each, 0)
    count = torch.tensor([max(20, int(seconds / float(each)))])
    count = count.to(place)
    dist.broadcast(count, 0)
    ring, ratios, works, plain_steps = inside.writer, [], [], []
    for pair in range(pairs):
        found: dict[bool, tuple[float, float]] = {}
        for watched in (True, False) if pair % 2 else (False, True):
            inside.writer = ring if watched else None
            dist.barrier()
            found[watched] = span(int(count))
        ratios.append(found[True][0] / found[False][0])
        works.append(found[True][1] / found[False][1])
        plain_steps.append(found[False][0])
    inside.writer = ring
    assert ring is not None
    mark = list(_global_optimizer_post_hooks.values())[-1]
    took: dict[bool, list[int]] = {True: [], False: []}
    for turn in range(1000):  # after a step, when nothing of the mark is in the caches
        inside.writer = None
        span(1)
        inside.writer = ring
        start = time.perf_counter_ns()
        if turn % 2:
            mark(optimizer, (), {})
        took[bool(turn % 2)].append(time.perf_counter_ns() - start)
    marked = (median(took[True]) - median(took[False])) / 1e9
    groups, loader = inside._groups(), inside._Loader()
    begin = time.perf_counter()
    for _ in range(2000):
        frame = sys._current_frames()[threading.get_ident()]
        ring.loader(*loader.look(time.monotonic(), frame))
        ring.state({"groups": inside._groups(), "waiting": inside._communicates(frame)})
    beat = (time.perf_counter() - begin) / 2000
    begin = time.perf_counter()
    inside._answer(folder, 99, groups, False)
    answer = time.perf_counter() - begin
    if rank == 0:
        (folder / "found").write_text(
            json.dumps({"ratios": ratios, "works": works, "steps": plain_steps, "mark": marked,
                        "beat": beat, "answer": answer})
        )  # fmt: skip
    dist.barrier()
    os._exit(0)


def _interval(values: list[float]) -> list[float]:
    """Where the median is, with 95%: by ranks, without an assumption on how values are spread."""
    ranked = sorted(values)
    middle, half = (len(ranked) - 1) / 2, 0.98 * len(ranked) ** 0.5
    return [
        ranked[max(round(middle - half), 0)],
        ranked[min(round(middle + half), len(ranked) - 1)],
    ]


def main() -> int:
    """Measure, print, write JSON."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--ranks", type=int, default=2, help="One waits for no other process.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    args.json = args.json or RESULTS / f"why_cost_{args.device}.json"
    import torch

    torch.set_num_threads(1)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(args.ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(rank, args.ranks, port, folder, args.pairs, args.seconds, args.device)
                except Exception:  # noqa: BLE001 - a rank says what ended it
                    traceback.print_exc()
                finally:
                    os._exit(1)
            pids.append(pid)
        failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
        if failed:
            sys.stderr.write("a rank failed; see above\n")
            return 1
        found: dict[str, Any] = json.loads((folder / "found").read_text())
    step = median(found["steps"])
    low, _, high = quantiles(found["ratios"], n=4)
    interval, work = _interval(found["ratios"]), _interval(found["works"])
    document = {
        "device": args.device, "ranks": args.ranks,
        "step_s": step, "ratio": median(found["ratios"]), "interval_95": interval,
        "cpu_ratio": median(found["works"]), "cpu_interval_95": work,
        "quartiles": [low, high], "pairs": args.pairs, "span_s": args.seconds,
        "mark_share": found["mark"] / step, "beat_share": found["beat"] / 0.5,
        "gather_share": found["answer"] / 60.0,
        "mark": found["mark"], "beat": found["beat"], "answer": found["answer"],
    }  # fmt: skip
    harness.keep(args, **document)
    print(
        f"a step takes {step * 1e3:.3g} ms; watched {document['ratio']:.4f} of that "
        f"(95%: {interval[0]:.4f} to {interval[1]:.4f}; quartiles {low:.4f} to {high:.4f})\n"
        f"CPU seconds of a step: {document['cpu_ratio']:.4f} of that (95%: {work[0]:.4f} to "
        f"{work[1]:.4f})\n"
        f"the mark {found['mark'] * 1e6:.2f} us a step ({document['mark_share']:.3%}); the thread "
        f"{found['beat'] * 1e6:.0f} us twice a second ({document['beat_share']:.3%}), an answer "
        f"{found['answer'] * 1e3:.0f} ms, once a minute and ever more rarely\n{args.json}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
