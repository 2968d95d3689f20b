"""What `auto` gives back: this rank's stages, and a step of all of them.

A step cuts the batch into microbatches, lets the stages run in the order of the schedule, sums what
tied parameters and replicas have, and agrees on the loss. A value that is not finite is named with
the stage and the microbatch that made it first. Checkpoints and records are begun from here, too.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evener.base.log import logger
from evener.comm import total_norm
from evener.errors import UsageError
from evener.pipeline import checkpoint, report, schedules
from evener.pipeline import tensor as divided
from evener.pipeline.capture import Captured, autocast_now
from evener.pipeline.example import Example
from evener.pipeline.faults import PipelineError, Watch
from evener.pipeline.gradients import Gradients
from evener.pipeline.plan import Plan
from evener.pipeline.replicas import Replicas
from evener.pipeline.split import Draw, Split, check_split_backward
from evener.pipeline.stage import Clock, Ordered, Stage
from evener.pipeline.torch_names import NO_OUTPUTS
from evener.pipeline.weigh import Weighing, scaled
from evener.pipeline.wire import LIMIT, Wire

_COUNT = itertools.count()
_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()

Weights = Callable[[str, torch.Tensor], torch.Tensor]


class Pipeline:
    """This rank's part of a pipeline. Made by `auto`.

    `plan`: what was decided. `modules`: this rank's stages, by their index.
    """

    def __init__(
        self, captured: Captured, plan: Plan, model: nn.Module, replicas: Replicas,
        device: torch.device, weights: Weights | None, seed: int, timeout: float,
        hosts: list[str], sharding: divided.Sharding | None = None, gradients: str = "exact",
        weighing: Weighing | None = None, evaluates: str = "",
    ) -> None:  # fmt: skip
        self.plan, self.device = plan, device
        self.replicas, group = replicas, replicas.pipeline
        self._captured = captured
        self._weighing = weighing or Weighing("mean")
        self._shares: list[Fraction | float] = []
        self._evaluates = evaluates
        kind = schedules.kind_of(plan.schedule)
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        members = list(range(ranks)) if group is None else dist.get_process_group_ranks(group)
        limit = timedelta(seconds=timeout)
        name = next(_COUNT)
        # Transfers, and what ranks tell each other once per step, on groups of their own: they can
        # be aborted without harm to the program's.
        self._group = dist.new_group(members, limit, use_local_synchronization=True,
                                     group_desc=f"evener pipeline {name}")  # fmt: skip
        self._control = dist.new_group(members, limit, "gloo", use_local_synchronization=True,
                                       group_desc=f"evener pipeline control {name}")  # fmt: skip
        everyone = list(replicas.members or members)
        # What replicas tell each other, and the sums of their gradients.
        self._all, data = self._control, None
        if len(everyone) > len(members):
            self._all = dist.new_group(everyone, limit, "gloo", use_local_synchronization=True,
                                       group_desc=f"evener pipeline all {name}")  # fmt: skip
        if replicas.data is not None:
            data = dist.new_group(
                dist.get_process_group_ranks(replicas.data), limit, use_local_synchronization=True,
                group_desc=f"evener pipeline data {name}",
            )  # fmt: skip
        self.split = Split(captured, plan.cuts)
        own = [s for s in range(len(plan.stages)) if schedules.rank_of(kind, s, ranks) == self.rank]
        if kind.split:
            check_split_backward(captured, plan.cuts)
        self._draw = Draw(seed + replicas.index)
        self._clock = Clock(device, self.rank)
        self._rows: list[int] = []
        self._before: dict[str, torch.Tensor] = {}
        fill = _placer(device, weights)
        self.modules = {
            s: self.split.module(s, device, self._draw, plan.recompute, kind.split, fill)
            for s in own
        }
        self._sharding = sharding
        if sharding is not None:
            for module in self.modules.values():
                sharding.apply(module)
        _share(list(self.modules.values()))
        self._stages = [
            Stage(self.modules[s], self.split, s, lambda m: self._rows[m], self._group, self._clock)
            for s in own
        ]
        self._check = _Finite(self._stages)
        self._lay_wires(kind, ranks, hosts)
        self._schedule: Ordered | None = None
        self._tied = self._tied_groups(kind, ranks, members, limit)
        self._left = _left_over(model, captured) if self.rank == 0 else {}
        self._seed = seed
        self.aliases = dict(captured.aliases)
        self.steps = 0
        self.seconds = 0.0
        groups = {self._group, self._control, self._all}
        self._gradients: Gradients | None = None
        if data is not None:
            # One stage takes the mean of a tied parameter, and gives it to the others: means that
            # each took alone would round apart.
            borrowed = {n for n, tied in self._tied if dist.get_rank(tied) != 0}
            trained = [(n, p) for n, p in self.named_parameters()
                       if p.requires_grad and n not in borrowed]  # fmt: skip
            self._gradients = Gradients(trained, data, device, gradients)
            groups |= {data, *self._gradients.groups}
        elif gradients != "exact" and self.rank == 0:
            logger.info("gradients=%s: there is one replica, and no gradient is sent", gradients)
        self._watch = Watch(f"{name}/{everyone[0]}", everyone.index(dist.get_rank()),
                            len(everyone), list(groups))  # fmt: skip
        self._record: Path | None = None
        _pipelines.add(self)
        total_norm.ask(_norm_over_stages)

    # --- What an optimizer and a checkpoint see ------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by the model's own names; each once."""
        seen: set[int] = set()
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def grad_norm(
        self, norm_type: float = 2.0, gradients: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The norm of the gradients of all stages. All ranks call it.

        gradients: some of this rank's; default: all. torch.nn.utils.clip_grad_norm_ of
        `pipe.parameters()` calls it too.
        """
        some = None if gradients is None else {id(g) for g in gradients}
        mine = [
            (divided.own(p.grad), self._norm_share(n, p))
            for n, p in self.named_parameters()
            if p.grad is not None and (some is None or id(p.grad) in some)
        ]
        norm_type = float(norm_type)
        told = torch.tensor([total_norm.partial(mine, norm_type)], dtype=torch.float64)
        everyone = [torch.empty_like(told) for _ in range(dist.get_world_size(self._all))]
        with self._watch.step("the norm of gradients"):
            dist.all_gather(everyone, told, group=self._all)
        found = total_norm.whole([float(one) for one in everyone], norm_type)
        first = next(self.parameters(), None)
        dtype = torch.float32 if first is None or first.dtype.itemsize < 8 else torch.float64
        return torch.tensor(found, device=self.device, dtype=dtype)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all stages is at most `max_norm`; returns it."""
        found = self.grad_norm(norm_type)
        for parameter in self.parameters():
            if parameter.grad is not None:
                divided.own(parameter.grad).mul_((max_norm / (found + 1e-6)).clamp(max=1.0))
        return found

    def _norm_share(self, name: str, parameter: nn.Parameter) -> float:
        """This rank's share in a norm: tied copies, replicas and whole copies count once."""
        for tied, group in self._tied:
            if tied == name and dist.get_rank(group) != 0:
                return 0.0
        share = 1.0 / (self.replicas.count)
        if self._sharding is not None and not divided.is_divided(parameter):
            share /= self.replicas.parts
        return share

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's tensors under the model's own names, tied ones under each of them."""
        found: dict[str, torch.Tensor] = dict(self._left)
        for module in self.modules.values():
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, used in self.aliases.items():
                if used in held and name in self._captured.kept:
                    found[name] = divided.whole(held[used].detach())
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take this rank's tensors from a state dict of the whole model. Raises UsageError."""
        names: dict[str, list[str]] = {}
        for name, used in self.aliases.items():
            names.setdefault(used, []).append(name)
        with torch.no_grad():
            for module in self.modules.values():
                tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                for used, tensor in tensors.items():
                    known = [n for n in names.get(used, [used]) if n in state]
                    if not known:
                        if used in self._captured.kept:
                            raise UsageError(f"{used} is not in the checkpoint",
                                             "give one of this model")  # fmt: skip
                        continue
                    value = state[known[0]]
                    if value.shape != tensor.shape:
                        raise UsageError(
                            f"{used} is of shape {tuple(tensor.shape)}, and "
                            f"{tuple(value.shape)} in the checkpoint",
                            "give one of this model",
                        )
                    divided.fill(tensor, value)
            for name in self._left:
                if name in state:
                    self._left[name] = state[name].detach().clone()

    def save(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Write a checkpoint of all ranks into `folder`; it is there as a whole or not at all.

        The weights are safetensors under the model's names with an index, as transformers has it.
        All ranks call it; they need one file system.
        """
        with self._watch.step("saving"):
            if self.replicas.index == 0:  # all replicas have the same
                tensors, states = self.state_dict(), self._named(optimizer)
                if self.replicas.first:
                    checkpoint.save(Path(folder), tensors, states,
                                    {"steps": self.steps, "seed": self._seed, **(extra or {})},
                                    self.rank, self.plan.ranks, self._control)  # fmt: skip
            dist.barrier(self._all)
        return Path(folder)

    def load(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, of any number of stages or of none; returns `extra`."""
        found = checkpoint.State(Path(folder))
        self.load_state_dict(found.tensors(self._wanted()))
        if optimizer is not None:
            found.restore(optimizer, {id(p): n for n, p in self.named_parameters()})
        self.steps = int(found.extra.get("steps", 0))
        self._seed = int(found.extra.get("seed", self._seed))
        self._draw.seed = self._seed + self.replicas.index
        return found.extra

    def _wanted(self) -> set[str]:
        here = {name for module in self.modules.values() for name in module.state_dict()}
        names = {name for name, used in self.aliases.items() if used in here}
        return names | here | set(self._left)

    def _named(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        if optimizer is None:
            return None
        names = {id(p): n for n, p in self.named_parameters()}
        found = checkpoint.named_state(optimizer, names)
        for state in found["states"].values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = divided.whole(value)
        return found

    # --- Steps ---------------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, which every rank gives as a whole.

        Gradients are added to `.grad`: those of the loss of the batch (see `auto`'s `average`).
        Returns that loss (a scalar on the CPU, the same on all ranks). Raises PipelineError on
        every rank where one fails, dies, or gives values that are not finite; UsageError for
        another call.
        """
        return self._run(Example(args, kwargs, target), train=True)

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch as the model in eval() gives it, without gradients.

        Raises UsageError where eval() does more than leave out dropout: batch norm, noise.
        """
        if self._evaluates:
            raise UsageError(
                f"this model cannot be evaluated in the pipeline: {self._evaluates}",
                "save a checkpoint and load it into the plain model",
            )
        with torch.no_grad():
            return self._run(Example(args, kwargs, target), train=False)

    def _run(self, call: Example, train: bool) -> torch.Tensor:
        if (now := autocast_now()) != self._captured.autocast:
            raise UsageError(
                f"autocast is {_autocast(now)} here, and was {_autocast(self._captured.autocast)} "
                "when the pipeline was made",
                "put autocast inside the model's forward, or around both auto() and step()",
            )
        if train and not torch.is_grad_enabled():
            raise UsageError("step() is called under no_grad", "call evaluate() for a loss alone")
        pieces = self._microbatches(call)
        schedule = self._scheduled()
        begin = time.perf_counter()
        self._draw.step = self.steps
        self._draw.off = not train
        losses: list[torch.Tensor] = []
        indices = ", ".join(str(s) for s in self.modules)
        inside = self._sharding.step() if self._sharding else contextlib.nullcontext()
        with self._watch.step(f"stage {indices}"), inside:
            self._clock.start()
            for stage in self._stages:
                stage.has_backward, stage.step = train, self.steps
                stage.clear_runtime_states()
            self._check.clear()
            if train:
                self._put_aside()
            schedule._has_backward = train
            count = self.plan.microbatches
            schedule._step_microbatches(
                [()] * count, pieces, list(range(count)), losses, **NO_OUTPUTS
            )
            if train:
                for parameter in self.parameters():
                    divided.settle(parameter)
                self._sum_tied()
                if self._gradients is not None:
                    self._gradients.average()
                    self._share_tied()
                self._bring_back()
            value = self._agree(losses, train)
        self.seconds = time.perf_counter() - begin
        if train:
            self.steps += 1
        if self._record is not None:
            self._write_record()
        return value

    def _scheduled(self) -> Ordered:
        if self._schedule is None:
            count = self.plan.microbatches
            self._schedule = Ordered(
                self.plan.schedule, self._stages, count,
                lambda output, microbatch: scaled(output[0], self._shares[microbatch]),
            )  # fmt: skip
        return self._schedule

    def _microbatches(self, call: Example) -> list[dict[str, Any]]:
        """The inputs that this rank's stages use, by microbatch."""
        leaves = self._captured.flatten(call)
        rows, count = call.rows, self.plan.microbatches
        sizes = [rows // count + (m < rows % count) for m in range(count)]
        wrong = [size for size in sizes if size and not self._captured.fits(size)]
        if self._captured.dynamic and wrong and rows >= count:
            raise UsageError(
                f"the model takes another branch for {wrong[0]} row(s) than for the "
                f"{self.plan.rows} that it was captured with",
                f"give {count * self.plan.rows} rows, or drop the last batch",
            )
        if rows < count or wrong:
            raise UsageError(
                f"a batch of {rows} rows does not go into {count} microbatches"
                + ("" if self._captured.dynamic else f" of {self.plan.rows}"),
                f"give {count * self.plan.rows} rows"
                + (", or any number from that of the microbatches" if self._captured.dynamic
                   else ": torch.export found the batch's size fixed"),
            )  # fmt: skip
        self._rows = sizes
        self._shares = self._shares_of(leaves, sizes)
        needed = {name for module in self.modules.values() for name in module.needs}
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, leaf, split in zip(self.split.input_names, leaves, self._captured.split,
                                     strict=True):  # fmt: skip
            if name not in needed:
                continue
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = leaf.to(self.device, non_blocking=True)
            parts = value.split(sizes) if split else [value] * count
            for piece, part in zip(found, parts, strict=True):
                piece[name] = part
        return found

    def _shares_of(self, leaves: list[Any], sizes: list[int]) -> list[Fraction | float]:
        """What each microbatch counts in the loss. All ranks ask: all raise where it is nothing."""
        cut: list[list[Any]] = [[] for _ in sizes]
        for leaf, split in zip(leaves, self._captured.split, strict=True):
            for one, part in zip(cut, leaf.split(sizes) if split else [leaf] * len(sizes),
                                 strict=True):  # fmt: skip
                one.append(part)
        return self._weighing.shares(self._captured, cut, sizes)

    def _agree(self, losses: list[torch.Tensor], train: bool) -> torch.Tensor:
        """The loss for all ranks; raises where some stage's values are not finite."""
        total = torch.stack([one.detach().double() for one in losses]).sum() if losses else None
        bad = self._check.first(losses)
        lost = [0.0] * len(self.plan.cuts)
        for wire in self._wires:
            lost[wire.cut] = max(lost[wire.cut], wire.worst())
        sums = self._sums_of_tied()
        mine = torch.tensor(
            [0.0 if total is None else float(total), float(total is not None),
             *(bad if bad else (-1.0, -1.0, 0.0)), *lost, *sums], dtype=torch.float64
        )  # fmt: skip
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._all))]
        dist.all_gather(everyone, mine, group=self._all)
        rows = [one.tolist() for one in everyone]
        if any(row[2] >= 0 for row in rows):
            # The first replica that has one: sums over replicas may have brought it to others.
            ranks = self.plan.ranks
            replica = min(k // ranks for k, row in enumerate(rows) if row[2] >= 0)
            wrong = [row for row in rows[replica * ranks :][:ranks] if row[2] >= 0]
            # Forward first: what comes after a stage that gave NaN is NaN too.
            row = min(wrong, key=lambda row: (row[4], row[3], row[2] if not row[4] else -row[2]))
            stage, microbatch = int(row[2]), int(row[3])
            where = self.plan.stages[stage]
            what = "gradients" if row[4] else "values"
            of = f" of replica {replica}" if self.replicas.count > 1 else ""
            place = replica * ranks + where.rank
            rank = self.replicas.members[place] if self.replicas.members else place
            replica //= self.replicas.parts
            raise PipelineError(
                f"stage {stage}{of} on rank {rank} ({where.blocks}) gave {what} that are not "
                f"finite, in microbatch {microbatch} of step {self.steps}",
                "no weight was changed: call zero_grad() and skip the batch, or lower the learning "
                "rate",
                rank,
            )
        self._check_tied([row[len(row) - len(sums) :] for row in rows])
        self._guard([max(row[5 + cut] for row in rows) for cut in range(len(lost))])
        losses_of = [row[0] for row in rows if row[1]]
        dtype = self._captured.loss.meta["val"].dtype
        wide = dtype if dtype is torch.float64 else torch.float32
        return torch.tensor(sum(losses_of) / len(losses_of), dtype=wide)

    # --- What crosses between nodes --------------------------------------------------------------

    def _lay_wires(self, kind: schedules.Kind, ranks: int, hosts: list[str]) -> None:
        """A form for each cut between two nodes, where one is asked for."""
        self._wires: list[Wire] = []
        self.lossy_cuts: set[int] = set()
        if self.plan.activations == "exact":
            return
        self.lossy_cuts = {
            cut
            for cut in range(len(self.plan.cuts))
            if hosts[schedules.rank_of(kind, cut, ranks)]
            != hosts[schedules.rank_of(kind, cut + 1, ranks)]
        }
        for stage in self._stages:
            for cut, side in ((stage.stage_index - 1, stage.before),
                              (stage.stage_index, stage.after)):  # fmt: skip
                if cut in self.lossy_cuts:
                    for way in ("forward", "backward"):
                        side[way] = Wire(self.plan.activations, cut, 2 * cut + (way == "backward"))
                        self._wires.append(side[way])
        if not self.lossy_cuts and self.rank == 0:
            logger.info("activations=%s: all stages are on one node, and they go as they are",
                        self.plan.activations)  # fmt: skip

    def _guard(self, lost: list[float]) -> None:
        """Cuts that lost too much go as they are from now on; all ranks decide alike."""
        for cut, share in enumerate(lost):
            if cut not in self.lossy_cuts or share <= LIMIT:
                continue
            self.lossy_cuts.discard(cut)
            if self.rank == 0 and self.replicas.first:
                logger.warning(
                    "activations=%s lost %.0f%% of a tensor between stages %d and %d in step %d: "
                    "they go there as they are from now on",
                    self.plan.activations, share * 100, cut, cut + 1, self.steps,
                )  # fmt: skip
            for wire in self._wires:
                if wire.cut == cut:
                    wire.form = "exact"

    # --- Parameters on several stages ----------------------------------------------------------

    def _tied_groups(
        self, kind: schedules.Kind, ranks: int, members: list[int], limit: timedelta
    ) -> list[tuple[str, dist.ProcessGroup]]:
        """Parameters that stages of several ranks use, with the group of these ranks."""
        found = []
        groups: dict[tuple[int, ...], Any] = {}
        self._tied_names: list[str] = []
        short = self._captured.module.meta["evener_short"]
        names = dict(self._captured.module.named_parameters(remove_duplicate=False))
        for name in sorted(names):
            at = {schedules.rank_of(kind, s, ranks) for s in self.split.stage_of(name)}
            if len(at) < 2 or not names[name].requires_grad:
                continue
            self._tied_names.append(short[name])
            if self.rank not in at:
                continue
            key = tuple(sorted(members[one] for one in at))
            if key not in groups:
                groups[key] = dist.new_group(list(key), limit, use_local_synchronization=True)
            found.append((short[name], groups[key]))
        return found

    def _sum_tied(self) -> None:
        own = dict(self.named_parameters())
        for name, group in self._tied:
            parameter = own[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(divided.own(parameter.grad), group=group)

    def _share_tied(self) -> None:
        """The mean over replicas, from the first stage that has a parameter to the others."""
        own = dict(self.named_parameters())
        for name, group in self._tied:
            gradient = own[name].grad
            assert gradient is not None
            dist.broadcast(divided.own(gradient), group=group, group_src=0)

    def _sums_of_tied(self) -> list[float]:
        """A sum over each parameter that several ranks have, and over its magnitudes."""
        own = dict(self.named_parameters())
        found: list[float] = []
        with torch.no_grad():
            for name in self._tied_names:
                if name not in own:
                    found += [float("nan"), 0.0]
                    continue
                value = divided.own(own[name].detach())
                value = torch.view_as_real(value) if value.is_complex() else value
                found += [float(value.sum(dtype=torch.float64)),
                          float(value.abs().sum(dtype=torch.float64))]  # fmt: skip
        return found

    def _check_tied(self, rows: list[list[float]]) -> None:
        """Raises PipelineError where copies of a tied parameter are not alike."""
        if self._sharding is not None:
            return
        for k, name in enumerate(self._tied_names):
            sums = [row[2 * k] for row in rows if row[2 * k] == row[2 * k]]
            size = max(row[2 * k + 1] for row in rows)
            if sums and max(sums) - min(sums) > 1e-6 * size:
                raise PipelineError(
                    f"the copies of {name} on the stages that share it have become different",
                    "change gradients and weights alike on all ranks: clip by "
                    "pipe.clip_grad_norm_(), and give all ranks the same optimizer",
                )

    def _put_aside(self) -> None:
        """Gradients of an earlier step that were summed then, where this step's are summed alone.

        An exact mean over replicas leaves them as they are: they are equal there already.
        """
        own = dict(self.named_parameters())
        alone = (
            own
            if self._gradients is not None and self._gradients.lossy
            else [n for n, _ in self._tied]
        )
        self._before = {}
        for name in alone:
            if (gradient := own[name].grad) is not None:
                self._before[name], own[name].grad = gradient, None

    def _bring_back(self) -> None:
        own = dict(self.named_parameters())
        for name, before in self._before.items():
            added = own[name].grad
            own[name].grad = before if added is None else before.add_(added)
        self._before = {}

    # --- What was measured ---------------------------------------------------------------------

    def record(self, path: str | Path) -> None:
        """Write the timeline of the next step to `path`, for `evener pipeline report`."""
        self._clock.on = True
        self._record = Path(path)

    def _write_record(self) -> None:
        path, self._record = self._record, None
        self._clock.on = False
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        mine = ([list(m) for m in map(_flat, self._clock.marks())], self.seconds, float(peak))
        everyone: list[Any] = [None] * self.plan.ranks
        dist.all_gather_object(everyone, mine, group=self._control)
        if self.rank == 0 and self.replicas.first and path is not None:
            report.write(self.plan, everyone, path)

    def close(self) -> None:
        """End the thread that listens for errors, and give groups back. On all ranks."""
        _pipelines.discard(self)
        self._watch.close()
        if self._gradients is not None and self._watch.heard is None:
            self._gradients.close()


def _norm_over_stages(
    gradients: Sequence[torch.Tensor], norm_type: float, _: total_norm.Plain
) -> torch.Tensor | None:
    """For torch's clip_grad_norm_: the norm of all stages where the gradients are a pipeline's."""
    here = {id(gradient) for gradient in gradients}
    pipes = list(_pipelines)
    if not here:
        # A stage without any of these parameters takes part in the norm of the others'.
        return pipes[0].grad_norm(norm_type, []) if len(pipes) == 1 else None
    for pipe in pipes:
        mine = here & {id(p.grad) for p in pipe.parameters() if p.grad is not None}
        if mine and mine != here:
            raise UsageError(
                "gradients of a pipeline and others are clipped together",
                "clip pipe.parameters() alone; pipe.grad_norm() gives their norm",
            )
        if mine:
            return pipe.grad_norm(norm_type, gradients)
    return None


def _autocast(state: tuple[Any, ...]) -> str:
    return ", ".join(f"on for {device} ({dtype})" for device, dtype in state) or "off"


def _flat(mark: Any) -> tuple[Any, ...]:
    return (mark.kind, mark.rank, mark.stage, mark.microbatch, mark.begin, mark.end)


def _placer(
    device: torch.device, weights: Weights | None
) -> Callable[[str, torch.Tensor, bool], torch.Tensor]:
    def place(name: str, held: torch.Tensor, parameter: bool) -> torch.Tensor:
        if weights is not None and (parameter or held.is_meta):
            value = weights(name, held)
            if value.shape != held.shape:
                raise UsageError(
                    f"weights({name!r}) is of shape {tuple(value.shape)}, not {tuple(held.shape)}",
                    "return a tensor of the parameter's shape",
                )
            return value.detach().to(device, held.dtype, copy=True)
        if held.is_meta:
            raise UsageError(
                f"{name} has no values: the model is on the meta device",
                "give weights=function(name, tensor) that returns them, or a model with values",
            )
        return held.to(device, copy=True)

    return place


def _share(modules: list[Any]) -> None:
    """One tensor for a parameter that several stages of this rank use."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            if name not in first:
                first[name] = parameter
                continue
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            owner._parameters[last] = first[name]


def _left_over(model: nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    """Tensors of the model's state dict that no stage uses: they stay as they are."""
    short = captured.module.meta["evener_short"]
    used = {short.get(name, name) for name in
            (str(n.target) for n in captured.module.graph.nodes if n.op == "get_attr")}  # fmt: skip
    found = {}
    for name, tensor in model.state_dict().items():
        if captured.aliases.get(name, name) not in used and not tensor.is_meta:
            found[name] = tensor.detach().clone()
    if found:
        logger.debug("%d tensors of the model take no part in the loss", len(found))
    return found


class _Finite:
    """Whether what each stage sends is finite: flags on the device, read once per step."""

    def __init__(self, stages: list[Stage]) -> None:
        self.flags: list[tuple[int, int, int, torch.Tensor]] = []
        for stage in stages:
            stage.sees = self._see

    def clear(self) -> None:
        self.flags.clear()

    def _see(self, stage: int, microbatch: int, backward: int, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.flags.append((stage, microbatch, backward, value.detach().isfinite().all()))

    def first(self, losses: list[torch.Tensor]) -> tuple[float, float, float] | None:
        """(stage, microbatch, backward) of the first that is not."""
        if not self.flags:
            return None
        good = torch.stack([flag for *_, flag in self.flags]).tolist()
        bad = [row[:3] for row, fine in zip(self.flags, good, strict=True) if not fine]
        if not bad:
            return None
        stage, microbatch, backward = min(bad, key=lambda row: (row[2], row[1], row[0]))
        return float(stage), float(microbatch), float(backward)
