"""Training programs under plain DDP and under Evener: by the line, and by the door without a line.

Two ranks live as long as the search, over Gloo, or with TWIN_DEVICE=cuda on two GPUs over NCCL.
Each program trains small models for some steps, between which anything may happen that users do.
Exact ways must give DDP's bits on every rank. In lossy forms what ranks apply must be alike, and
that with their residuals must be the sum of all gradients; a gradient that is finite must stay so
where `auto` chose the form.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import logging
import multiprocessing
import os
import pickle
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.twins._doors_faults import ENDS, FAULTS
from tests.twins._doors_programs import ROWS, programs
from tests.twins._doors_run import DEVICE, Net, Run
from tests.twins.harness import Program, Twin

RANKS = 2
_SECONDS = 40
_NO_PROGRAM = "plain DDP raises"


# --- the world ---


def run_one(program: Program, rank: int) -> str:
    """What differs from plain DDP on this rank; or nothing."""
    if program["form"]:
        return lossy(program, rank)
    results: dict[str, dict[str, torch.Tensor]] = {}
    errors: dict[str, str] = {}
    for way in ("plain", *program["ways"]):
        try:
            run = Run(program, way, rank)
            run.train()
            results[way] = run.result()
        except Exception:  # noqa: BLE001 - plain DDP may raise it too
            errors[way] = traceback.format_exc()
    if "plain" in errors:
        return _NO_PROGRAM
    if errors:
        return "".join(f"{way} raises: {trace}" for way, trace in errors.items())
    want = results.pop("plain")
    for way, found in results.items():
        if want.keys() != found.keys():
            return f"{way}: {sorted(want.keys() ^ found.keys())[:3]}"
        differ = [k for k, v in want.items() if not _same(v, found[k])]
        if differ:
            return f"{way}: {len(differ)} of {len(want)}, {differ[0]}"
    return ""


def lossy(program: Program, rank: int) -> str:
    """Whether what is applied and kept back are all gradients, and the ranks alike."""
    from evener.ddp import accelerate

    torch.manual_seed(program["seed"])
    net, form = Net("layers").to(DEVICE), program["form"]
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    options = {"floor": "fp16"} if form == "auto" else {"ratio": 0.1} if "topk" in form else {}
    options["bucket_bytes"] = program["bucket_bytes"]
    model: Any = accelerate(wrapped, mode=form, **options)
    given = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    got = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        parameter.register_hook(partial(_add_to, given[name]))
    run = Run.__new__(Run)
    run.program, run.rank, run.draws, run.rows = program, rank, 0, ROWS
    for number, step in enumerate([*program["steps"], {"use": [1, 1], "accumulate": 0}]):
        if form == "auto" and number == 2:
            _take_last_form(model)
        spike = 1e8 if form == "auto" and number == 3 else 1.0
        model.zero_grad()
        for _ in range(step["accumulate"]):
            with model.no_sync():
                model(run.data(), step["use"][rank]).square().mean().backward()
        (spike * model(run.data(), step["use"][rank]).square().mean()).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                if not parameter.grad.isfinite().all():
                    return f"step {number}: the gradient of {name} is not finite"
                got[name] += parameter.grad
    owed = model.evener.state_dict()["residual"]
    for name, mine in given.items():
        dist.all_reduce(mine)
        kept = owed[name].to(DEVICE) if name in owed else 0
        apart = (mine / RANKS - got[name] - kept).norm() / (mine.norm() + 1e-6)
        if apart > (1e-2 if form == "auto" else 1e-4):
            return f"{apart:.1%} of the gradients of {name} are lost"
    digest = hashlib.sha256(b"".join(map(_bytes, got.values()))).hexdigest()
    digests = [""] * RANKS
    dist.all_gather_object(digests, digest)
    return "" if len(set(digests)) == 1 else "ranks differ"


def _add_to(total: torch.Tensor, gradient: torch.Tensor) -> None:
    total.add_(gradient)


def _take_last_form(model: Any) -> None:
    """What the planner could choose, whatever this machine's network is."""
    from evener.comm.planner.choose import Choice, Decision
    from evener.comm.planner.trial import Way

    planner, reducer = model.evener_steps.planner, model.evener
    form = planner.forms[-1]
    choices = tuple(Choice("2d", form, (0.0, 1.0, 0.0)) for _ in reducer.exchanges)
    planner._take(Way(form, Decision(choices, tuple(reducer.sequence), False, 1.0, 1.0, 1.0)))


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _drawn_sequence(
    _profile: Any, stages: Sequence[Any], *_: Any, **_options: Any
) -> tuple[int, ...]:
    """Instead of the best order, which takes long to find: any order must do."""
    sequence = list(range(len(stages)))
    random.Random(len(stages)).shuffle(sequence)
    return tuple(sequence)


def _serve(rank: int, port: int, pipe: Any, env: dict[str, str]) -> None:
    from evener.comm import steps
    from evener.comm.planner import choose

    os.environ.update(env)
    os.environ.update({"EVENER_HOSTID": f"node{rank}", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ.update({"EVENER_TRIAL_STEPS": "0", "LIGHT_TOPK_THRESHOLD": "64"})
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=_SECONDS / 2)
    backend = "gloo"
    if DEVICE == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)
    steps.best_sequence = choose.best_sequence = _drawn_sequence
    fault, broken = env.get("TWIN_FAULT", ""), ""
    try:
        if fault:
            FAULTS[fault]()
    except Exception:  # noqa: BLE001 - the parent raises it
        broken = traceback.format_exc()
    while True:
        try:
            program = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        pipe.send_bytes(pickle.dumps(broken or run_one(program, rank)))


class World:
    """Two ranks that live until one of them hangs or dies."""

    def __init__(self) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.fault = ""

    def check(self, program: Program) -> None:
        """Raise AssertionError where a rank differs from plain DDP, or ranks from each other.

        TimeoutError and EOFError: a rank hangs, or died.
        """
        fault = os.environ.get("TWIN_FAULT", "")
        if not self.pipes or fault != self.fault:
            self.start(fault)
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps(program))
            answers: list[str] = []
            limit = _SECONDS * (5 if program["compile"] else 1)  # on busy processors
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(limit):
                    raise TimeoutError(f"rank {rank} has not finished after {limit} s")
                answers.append(pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            self.stop()
            raise
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if _NO_PROGRAM in answers:
            self.stop()  # plain DDP raises, and then the ranks may be anywhere
            return
        if wrong:
            self.stop()  # the ranks may be anywhere
            raise AssertionError("; ".join(wrong))

    def start(self, fault: str) -> None:
        """A world of its own, broken in that way."""
        self.stop()
        self.fault = fault
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload", "evener.ddp.line", "tests.twins.doors"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {"TWIN_FAULT": fault}
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.store.port, there, env), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        """End its processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []


WORLD = World()
atexit.register(WORLD.stop)


@contextlib.contextmanager
def _fault(name: str) -> Iterator[None]:
    os.environ["TWIN_FAULT"] = name
    try:
        yield
    finally:
        del os.environ["TWIN_FAULT"]
        WORLD.stop()


TWIN = Twin(
    "doors",
    programs(),
    WORLD.check,
    {name: partial(_fault, name) for name in FAULTS},
    ENDS,
    programs_per_round=100,
)
