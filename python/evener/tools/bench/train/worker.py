"""One run in one process: build the model, take the first step, warm up, measure, prove, report.

The process is a fresh fork (see agent.py) and takes part in the run's group only. Ranks meet in
the store alone: a barrier is a counter there, so that nothing but the column's own collectives
crosses the network while the clock runs.

Time on a GPU is read from CUDA events, one after each step, without stopping the device; on a CPU
from the process's clock. The run's figure is taken from the slowest rank: from the common start to
the end of its last step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from evener.base.settings import (
    EVENER_GUARD_STEPS,
    LIGHT_2D_ALLREDUCE,
    LIGHT_TOPK_ALLREDUCE,
    LIGHT_TOPK_RATIO,
)
from evener.tools.bench.train import coding, guard, models, nccl, sharded, wrap
from evener.tools.bench.train.columns import Column
from evener.tools.bench.train.plan import Options

Report = Callable[[dict[str, Any]], None]

_PROGRESS_EVERY = 0.5
_TRACED = 3
_LEAST_STEPS = 5
_MOST_STEPS = 20_000


@dataclass(frozen=True)
class Task:
    """One rank's part in one run. `rank`, `world`: in the group; `slot`: on the node (its GPU)."""

    run: int
    row: str
    column: str
    group: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    slot: int
    everyone: int
    address: str
    port: int
    prefix: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def execute(task: Task, options: Options, column: Column, report: Report) -> None:
    """Run `task`; send `{"phase": ...}` while it goes and `{"done": {...}}` at the end."""
    _enter_group(task, column)
    device = _device(options, task)
    log = _log_nccl() if device.type == "cuda" and task.rank == 0 and task.group == 0 else None
    run = _Run(task, options, column, device, report)
    done = run.measure()
    if task.rank == 0 and task.group == 0:
        done["versions"] = versions(device)
    if log is not None:
        with log.open(encoding="utf-8", errors="replace") as lines:
            done["nccl"] = nccl.parse(lines).to_json()
        log.unlink()
    report({"done": done})


def _enter_group(task: Task, column: Column) -> None:
    # These would overrule the column.
    for setting in (LIGHT_2D_ALLREDUCE, LIGHT_TOPK_ALLREDUCE, LIGHT_TOPK_RATIO):
        os.environ.pop(setting.name, None)
    # The guard's check, one step in 200, is a dense exchange; the first would be one of few here.
    os.environ.setdefault(EVENER_GUARD_STEPS.name, "0")
    os.environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.world),
        LOCAL_RANK=str(task.local_rank),
        LOCAL_WORLD_SIZE=str(task.local_world),
        MASTER_ADDR=task.address,
        MASTER_PORT=str(task.port),
        **column.env,
    )


def _device(options: Options, task: Task) -> torch.device:
    wanted = options.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        torch.set_num_threads(max(1, options.threads))
        return torch.device("cpu")
    device = torch.device("cuda", task.slot % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = options.tf32
    torch.backends.cudnn.benchmark = True
    return device


def _log_nccl() -> Path | None:
    """Have NCCL write its choices to a file of our own, unless the user has it log already."""
    if "NCCL_DEBUG" in os.environ:
        return None
    handle, name = tempfile.mkstemp(prefix="evener-nccl-")
    os.close(handle)
    os.environ.update(
        NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P,TUNING", NCCL_DEBUG_FILE=name
    )
    return Path(name)


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what runs in this process, and the device's name."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = torch.version.cuda or ""
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


class _Run:
    def __init__(
        self, task: Task, options: Options, column: Column, device: torch.device, report: Report
    ) -> None:
        self.task, self.options, self.column = task, options, column
        self.device, self.report = device, report
        self.began = time.perf_counter()
        self.phases: dict[str, float] = {}
        timeout = timedelta(seconds=options.timeout)
        store = TCPStore(task.address, task.port, None, False, timeout)
        self.everyone = PrefixStore(f"{task.prefix}/run{task.run}", store)
        self.store = PrefixStore(f"group{task.group}", self.everyone)
        if column.wrap != "none":
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("pg", self.store),
                rank=task.rank,
                world_size=task.world,
                timeout=timeout,
            )
        self._phase("join")

    def measure(self) -> dict[str, Any]:
        options, task = self.options, self.task
        self._build()
        looks = task.rank == 0 and task.group == 0
        # To see a sharded parameter, all ranks take part.
        before = self._sketch() if looks or self.column.sharded else None
        self._step()
        first_loss = self.loss.item()
        update = later = None
        owed = self._owed()
        if before is not None:
            first = self._sketch(owed)
            update = guard.encode((first - before).tolist())
        self._phase("first step")
        for _ in range(guard.LATER):
            self._step()
        owed = self._owed()
        if before is not None:
            later = guard.encode((self._sketch(owed) - first).tolist())
            del before, first
        del owed
        self._phase("compared steps")
        steps = self._warm_up()
        self._phase("warmup")
        self._barrier("start", self.everyone, task.everyone)
        sent = _sent_bytes() if task.slot == 0 else 0
        start = time.perf_counter()
        step_ms = self._timed(steps)
        elapsed = time.perf_counter() - start
        self._barrier("end", self.store, task.world)
        if task.slot == 0:
            sent = _sent_bytes() - sent
        if options.background and task.everyone > task.world:
            # Others may still be measuring beside us; leave them the load that they began with.
            for _ in range(options.warmup):
                self._step()
        last_loss = self.loss.item()
        self._wait_for_device()
        self._phase("measure")
        if options.trace:
            self._trace(Path(options.trace))
        coding_ms = self._coding()
        done: dict[str, Any] = {
            "rank": task.rank,
            "group": task.group,
            "world": task.world,
            "steps": steps,
            "samples": steps * options.batch_size,
            "elapsed_s": elapsed,
            "step_ms": [round(value, 4) for value in step_ms],
            "first_loss": first_loss,
            "last_loss": last_loss if math.isfinite(last_loss) else str(last_loss),
            "checksum": self._checksum(),
            "update": update if looks else None,
            "later": later if looks else None,
            "sent_bytes": sent if task.slot == 0 else None,
            "gradient_bytes": sum(
                p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
            ),
            "device": self.device.type,
            "plan": self._planned(),
            "carrier": self._carrier(),
            "coding_ms": coding_ms,
        }
        self._phase("check")
        done["phases_s"] = self.phases
        self._barrier("leave", self.everyone, task.everyone)
        return done

    def _build(self) -> None:
        options = self.options
        torch.manual_seed(options.seed)
        model = models.build(options.model).to(self.device)
        # Every rank has samples of its own, so that ranks that do not synchronise drift apart.
        torch.manual_seed(options.seed + 1000 * (1 + self.task.rank))
        self.inputs, self.targets = models.data(
            options.model, options.batch_size, self.device, options.image_size
        )
        if options.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        plain = torch.optim.SGD(model.parameters(), lr=options.lr)
        self.model, self.optimizer = wrap.wrap(model, plain, self.device, self.column, options)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model.train()
        self.loss = torch.zeros((), device=self.device)
        self._phase("build")

    def _step(self) -> None:
        self.optimizer.zero_grad()
        with self._precision():
            loss = models.criterion(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.amp == "bf16" and not self.column.sharded:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _timed(self, steps: int) -> list[float]:
        """Train `steps` steps; milliseconds of each. The device is done when this returns."""
        told = time.perf_counter()
        gpu = self.device.type == "cuda"
        marks: list[Any] = [self._mark(gpu)]
        for step in range(steps):
            self._step()
            marks.append(self._mark(gpu))
            now = time.perf_counter()
            if now - told > _PROGRESS_EVERY:
                told = now
                self.report({"phase": "measure", "step": step + 1, "steps": steps})
        # What the last step has left for the next forward belongs to it.
        if steps and (left := getattr(self.model, "evener_steps", None)) is not None:
            left.finish("")
            marks[-1] = self._mark(gpu)
        if gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def _trace(self, directory: Path) -> None:
        """Train a few more steps; rank 0 writes what torch's profiler saw of them."""
        if self.task.rank or self.task.group:
            self._timed(_TRACED)
            return
        with torch.profiler.profile() as profile:
            self._timed(_TRACED)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.options.model}-{self.column.name}-{self.task.world}-run{self.task.run}"
        profile.export_chrome_trace(str(directory / f"{name}.json.gz"))
        self._phase("trace")

    def _mark(self, gpu: bool) -> Any:
        if not gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _warm_up(self) -> int:
        """Train without a clock, and find how many steps to measure.

        Where seconds are asked for, these steps tell how many fill them; the answer is the same on
        every rank, in groups in the background too.
        """
        options = self.options
        count = options.warmup if options.steps else max(options.warmup, 1)
        self._barrier("warmup", self.everyone, self.task.everyone)
        start = time.perf_counter()
        for _ in range(count):
            self._step()
        self._wait_for_device()
        if options.steps:
            return options.steps
        if self.task.rank == 0 and self.task.group == 0:
            fill = math.ceil(options.seconds * count / (time.perf_counter() - start))
            self.everyone.set("steps", str(min(max(fill, _LEAST_STEPS), _MOST_STEPS)))
        return int(self.everyone.get("steps"))

    def _barrier(self, name: str, store: Store, count: int) -> None:
        if store.add(f"{name}/count", 1) == count:
            store.set(f"{name}/open", "1")
        store.wait([f"{name}/open"])

    def _wait_for_device(self) -> None:
        # What a step has left for the next forward belongs to it, and not to what is timed next.
        if (steps := getattr(self.model, "evener_steps", None)) is not None:
            steps.finish("")
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _owed(self) -> dict[int, torch.Tensor]:
        """By the parameter's id what Evener has not sent yet. Collective over the group."""
        self._wait_for_device()
        reducer = getattr(self.model, "evener", None) or getattr(self.optimizer, "evener", None)
        if reducer is None:
            return {}
        state = reducer.state_dict()
        if self.column.sharded:
            return sharded.owed(self.model, state)
        residual = state["residual"]
        named = zip(reducer.names, reducer.parameters, strict=True)
        return {id(p): residual[name] for name, p in named if name in residual}

    def _sketch(self, owed: Mapping[int, torch.Tensor] = MappingProxyType({})) -> torch.Tensor:
        """float64[guard.SKETCH] on the CPU: the parameters' count sketch, see guard.py.

        `owed`: by the parameter's id gradients that are counted as applied.
        """
        self._wait_for_device()
        sums = torch.zeros(guard.SKETCH, dtype=torch.float64, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        piece = guard.SKETCH * 4096
        for parameter in self.parameters:
            whole = sharded.whole(parameter)
            if id(parameter) in owed:
                whole = whole - self.options.lr * owed[id(parameter)].to(self.device)
            for values in whole.reshape(-1).split(piece):
                signs = torch.randint(
                    0, 2, values.shape, generator=generator, device=self.device, dtype=torch.int8
                )
                signed = values.double() * (2 * signs - 1)
                padding = -signed.numel() % guard.SKETCH
                signed = nn.functional.pad(signed, (0, padding))
                sums += signed.view(-1, guard.SKETCH).sum(0)
        return sums.cpu()

    def _checksum(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        seen = sharded.gathered(self.model) if self.column.sharded else iter(self.parameters)
        for parameter in seen:
            raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(raw.cpu().numpy().data)
        return digest.hexdigest()

    def _coding(self) -> float | None:
        """Milliseconds of a step's encoding and decoding, where this is known; see coding.py."""
        exchanges = getattr(getattr(self.model, "evener", None), "exchanges", ())
        compressed = any(exchange.wire.name != "exact" for exchange in exchanges)
        if self.device.type != "cuda" or not compressed:
            return None

        def finish() -> None:
            if (left := getattr(self.model, "evener_steps", None)) is not None:
                left.finish("")

        took = coding.measure(self._step, finish, here=self.task.rank == 0)
        self._phase("coding")
        return took

    def _carrier(self) -> dict[str, Any] | None:
        """What carries the exchange between nodes, and why; None where Evener does not reduce."""
        communicators = getattr(getattr(self.model, "evener", None), "communicators", None)
        return None if communicators is None else communicators.route.carrier.to_json()

    def _planned(self) -> dict[str, Any] | None:
        """What Evener's planner decided and expected, where this column has one."""
        steps = getattr(self.model, "evener_steps", None)
        planner = getattr(steps, "planner", None)
        if steps is None or planner is None or planner.decision is None or self.task.rank:
            return None
        return {
            **planner.decision.to_json(),
            "forced_ms": planner.forced_ms,
            "costs": planner.costs.to_json(),
            "profile": steps.profile.to_json(),
        }

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = round(now - self.began, 3)
        self.began = now
        self.report({"phase": name})


def _sent_bytes() -> int:
    """Bytes that this network namespace's cards have sent since they came up, loopback aside.

    Where NCCL or Gloo were told which card to use, only that one counts.
    """
    named = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    wanted = tuple(name.lstrip("=") for name in named.split(",") if name and name[0] != "^")
    total = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, counters = line.partition(":")
        name = name.strip()
        if name == "lo" or (wanted and not name.startswith(wanted)):
            continue
        total += int(counters.split()[8])
    return total
