"""What Evener's FSDP2 door has a GPU do per unit and step: operators and kernel launches, counted.

    python benchmarks/fsdp_launches.py [--forms exact,int8,int4] [--ranks 2] [--json FILE]

Ranks train a small GPT in bf16 over Gloo, with FSDP2 and Evener, and Evener's codecs take the way
that they take on a GPU: kernels of Triton, in its interpreter. Each operator of torch that runs
within a stage is counted, in all threads. `launches` are kernels of Triton and those operators that
move or compute something; `others` make a view or memory, which costs the host alone. Counts are
per unit, in the last step, on rank 0; they do not depend on the machine.

Not counted, because a CPU has none: copies between host and GPU (two for each announcement, and for
a mirror in host memory one of the own row and two of each other one), streams and events, and what
the network's library does.

`us`: processor time that the host takes per unit, in microseconds, in a process of its own without
a network. Tensors are small and on a CPU; Triton's launcher runs as far as the driver, which is not
there. So it has Python and torch's dispatch, and no driver and no other thread. Median of turns.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import fsdp_host
import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from evener.base import kernels

FORMS = ("exact", "int8", "int4")
STAGES = ("own", "look", "announce", "write", "send", "apply", "copy", "reduce", "finish")
REFRESH = ("own", "look", "announce", "write", "send", "apply")
"""In the thread that refreshes. `copy` is in the training thread, once in each pass."""
BACKWARD = ("reduce", "finish")
# Operators after which a GPU has nothing to do.
HOST = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "reshape", "permute",
}  # fmt: skip
BLOCKS, WIDTH, CONTEXT, SYMBOLS, STEPS = 4, 32, 16, 61, 4


def _native(function: Any, *names: str) -> Any:
    def called(given: dict[str, Any]) -> None:
        found = [given[name] for name in names]
        function(*(x.view(torch.int16) if is_half(x) else x for x in found))

    return called


def is_half(x: Any) -> bool:
    """Whether it is a tensor of bf16."""
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


NATIVE = {
    "_choose": _native(kernels.differences_plan, "new", "old", "SHIFT", "MASK", "headers"),
    "_encode": _native(kernels.differences_write, "new", "old", "SHIFT", "MASK", "headers", "out"),
    "_decode": _native(kernels.differences_read, "message", "SHIFT", "MASK", "weights"),
}
"""For the kernels that take the interpreter seconds, those of the CPU, which give the same bits."""


class Meter:
    """Counts and times by stage; a stage within another is its own."""

    def __init__(self) -> None:
        self.counting = False
        self.launches: dict[str, Counter[str]] = defaultdict(Counter)
        self.others: dict[str, Counter[str]] = defaultdict(Counter)
        self._here = threading.local()

    def clear(self) -> None:
        """Begin again."""
        self.launches.clear()
        self.others.clear()

    @contextmanager
    def stage(self, name: str) -> Any:
        """What this thread does meanwhile belongs to it."""
        before = getattr(self._here, "name", None)
        self._here.name = name
        try:
            if self.counting:
                with _Counted(self, name):
                    yield
            else:
                yield
        finally:
            self._here.name = before

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a stage."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return measured

    def kernels(self) -> None:
        """Count the launches of Triton's kernels."""
        from triton.runtime.interpreter import InterpretedFunction

        launch, interpreter = InterpretedFunction.run, threading.Lock()

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(self._here, "name", None)
            if name is not None and self.counting:
                self.launches[name][f"triton {kernel.fn.__name__}"] += 1
            # The interpreter has one grid for all threads.
            with interpreter, torch.utils._python_dispatch._disable_current_modes():
                native = NATIVE.get(kernel.fn.__name__)
                if native is None:
                    return launch(kernel, *args, **kwargs)
                return native(dict(zip(kernel.arg_names, args, strict=False)))

        InterpretedFunction.run = counted


class _Counted(TorchDispatchMode):
    def __init__(self, meter: Meter, stage: str) -> None:
        super().__init__()
        self.meter, self.stage = meter, stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One more of this operator."""
        space, name = func._schema.name.split("::")
        if space != "c10d":  # the network's
            kept = self.meter.others if name in HOST else self.meter.launches
            kept[self.stage][name] += 1
        return func(*args, **(kwargs or {}))


def as_on_a_gpu() -> None:
    """Have the codecs take Triton's kernels for tensors on a CPU."""
    from evener.comm.codecs import checks

    for name in ("differences", "int8", "int4", "sums", "rows"):
        try:
            codec = importlib.import_module(f"evener.comm.codecs.{name}")
        except ImportError:  # of an older tree
            continue
        kernels = importlib.import_module(f"evener.comm.codecs.triton_{name}")
        for each, function in vars(kernels).items():
            if getattr(function, "__module__", "") == kernels.__name__ and hasattr(codec, each):
                setattr(codec, each, function)
    checks._by_kernel = lambda weights: weights.is_contiguous() and weights.numel() > 0


def stages(meter: Any) -> None:
    """Make the methods that are looked at stages of `meter`."""
    from evener.base import torch_names
    from evener.comm import ahead, mirrors, shards

    for name in ("look", "write", "send", "apply", "copy"):
        setattr(mirrors.Mirror, name, meter.within(name, getattr(mirrors.Mirror, name)))
    ahead.announce = meter.within("announce", ahead.announce)
    own = torch_names.fsdp_own

    def found(unit: Any) -> Any:
        made = own(unit)
        return None if made is None else meter.within("own", made)

    torch_names.fsdp_own = found
    scatter: Any = shards.FormedReduceScatter
    scatter.__call__ = meter.within("reduce", scatter.__call__)
    scatter.finish = meter.within("finish", scatter.finish)


def count(form: str) -> None:
    """One rank: train, and tell what the last step did."""
    import evener.fsdp
    from evener.tools.bench.train.transformers import GPT, Shape

    harness.join()
    meter = Meter()
    as_on_a_gpu()
    stages(meter)
    meter.kernels()
    torch.manual_seed(1)
    model = GPT(Shape(BLOCKS, 4, WIDTH, SYMBOLS, CONTEXT)).bfloat16()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    evener.fsdp.accelerate(model, mode=form)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        meter.counting = step == STEPS - 1
        symbols = torch.randint(SYMBOLS, (2, CONTEXT + 1), generator=drawn)
        loss = cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    units = BLOCKS + 1
    if dist.get_rank() == 0:
        rows = {
            stage: {
                "launches": sum(meter.launches[stage].values()) / units,
                "others": sum(meter.others[stage].values()) / units,
                "kinds": {**meter.launches[stage]},
            }
            for stage in STAGES
        }
        harness.say(units=units, rows=rows)
    model.evener.close()
    dist.barrier()
    dist.destroy_process_group()


def total(rows: dict[str, Any], stages: tuple[str, ...], what: str) -> float:
    """The sum of several stages."""
    return sum(rows[stage][what] for stage in stages)


def main() -> None:
    """Count and time each form, and print a table."""
    parser = harness.arguments(__doc__, json="fsdp-launches.json")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15, help="turns that are timed; 0: none")
    parser.add_argument("--rank", help="one rank of this form")
    parser.add_argument("--host", help="time this form's host")
    given = parser.parse_args()
    if given.rank:
        count(given.rank)
        return
    if given.host:
        fsdp_host.tell(given.host, given.turns)
        return
    runs = {}
    whats = ("launches", "others", "us") if given.turns else ("launches", "others")
    for form in harness.choose(given.forms, FORMS, "form"):
        env = {"TRITON_INTERPRET": "1", "EVENER_TIMEOUT": "300"}
        job = harness.ranks("--rank", form, count=given.ranks, limit=300, env=env)
        if job.failed:
            sys.exit(f"error: {form}: {job.failed}")
        runs[form] = job.row
        rows = runs[form]["rows"]
        if given.turns:
            timed = harness.again("--host", form, "--turns", str(given.turns), limit=300)
            if timed.failed:
                sys.exit(f"error: {form}: {timed.failed}")
            for stage in STAGES:
                rows[stage]["us"] = timed.row.get(stage, 0.0)
        table = [[stage, *(f"{rows[stage][what]:.1f}" for what in whats)] for stage in STAGES]
        for name, several in (("**refresh**", REFRESH), ("**backward**", BACKWARD)):
            table.append([name, *(f"{total(rows, several, what):.1f}" for what in whats)])
        print(f"{form}\n{harness.show(['stage', *whats], table)}", flush=True)
    harness.keep(given, runs=runs)


if __name__ == "__main__":
    main()
