"""torch's PipelineStage for what crosses between stages here, and its runtime for any schedule.

Beside torch's own it lets integers and booleans cross (without a gradient), sends a gradient of
zeros where nothing depends on a tensor that was received, and takes buffers for what is received
when it is due, not for all microbatches at once. `Ordered` runs the orders of `schedules` on
torch's runtime, which receives ahead of time: torch's own GPipe and 1F1B receive when they need it,
so that transfers and computation take turns.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from evener.pipeline import schedules
from evener.pipeline.simulate import Mark
from evener.pipeline.split import Edge, Split, StageModule
from evener.pipeline.torch_names import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    _RecvInfo,
)
from evener.pipeline.wire import Wire

_TYPES = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


class Stage(PipelineStage):
    """A stage of a split model. `rows(microbatch)`: how many rows a microbatch has."""

    def __init__(
        self,
        module: StageModule,
        split: Split,
        index: int,
        rows: Callable[[int], int],
        group: dist.ProcessGroup | None,
        clock: Clock,
    ) -> None:
        self.split, self.rows, self.clock = split, rows, clock
        self.incoming = split.edge(split.bounds[index])
        self.outgoing = split.edge(split.bounds[index + 1])
        stages = len(split.bounds) - 1
        super().__init__(
            module, index, stages, module.device, input_args=(),
            output_args=tuple(self._empty(e, split.captured.rows, "meta") for e in self.outgoing)
            or (torch.empty((), device="meta"),),
            group=group,
        )  # fmt: skip
        self.module = module
        self.args_recv_info: dict[int, Any]
        # How tensors go over the cut before and after this stage, by the way they go; None: as they
        # are. `step`: of the pipeline.
        self.before: dict[str, Wire] = {}
        self.after: dict[str, Wire] = {}
        self.step = 0
        # Told of what is sent: (stage, microbatch, 0 forward or 1 backward, tensors).
        self.sees: Callable[[int, int, int, Any], None] = lambda *_: None

    def _empty(self, edge: Edge, rows: int, device: Any = None) -> torch.Tensor:
        value = edge.node.meta["val"]
        shape = self.split.captured.shape(value, rows)
        return torch.empty(shape, dtype=value.dtype, device=device or self.device)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = tuple(
                _RecvInfo(edge.node.name, self.stage_index - 1, None)  # type: ignore[arg-type]
                for edge in self.incoming
            )
        last = self.is_last
        self.act_send_info = {k: [] if last else [self.stage_index + 1]
                              for k in range(max(len(self.outgoing), 1))}  # fmt: skip
        return ()

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return tuple(
            _RecvInfo(edge.node.name, self.stage_index + 1, None)  # type: ignore[arg-type]
            for edge in self.outgoing
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        rows = self.rows(fwd_chunk_id)
        for edge, info in zip(self.incoming, self.args_recv_info[fwd_chunk_id], strict=True):
            info.buffer = self._room(edge, rows, self.before.get("forward"))
        return self._get_recv_ops(self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        rows = self.rows(bwd_chunk_id)
        wanted = []
        for edge, info in zip(self.outgoing, self.grad_recv_info[bwd_chunk_id], strict=True):
            if edge.differentiable:
                info.buffer = self._room(edge, rows, self.after.get("backward"))
                wanted.append(info)
        return self._get_recv_ops(tuple(wanted))

    def _room(self, edge: Edge, rows: int, wire: Wire | None) -> torch.Tensor:
        """A buffer for what comes over a cut."""
        value = edge.node.meta["val"]
        shape = self.split.captured.shape(value, rows)
        if wire is None or not wire.fits(value.dtype, shape):
            return self._empty(edge, rows)
        return wire.buffer(math.prod(shape), self.device)

    def _read(self, edge: Edge, rows: int, wire: Wire | None, came: torch.Tensor) -> torch.Tensor:
        """The tensor that came over a cut."""
        value = edge.node.meta["val"]
        shape = self.split.captured.shape(value, rows)
        if wire is None or not wire.fits(value.dtype, shape):
            return came
        return wire.decode(came, shape, value.dtype)

    def _written(self, tensor: torch.Tensor, wire: Wire | None, microbatch: int) -> torch.Tensor:
        """What is sent for a tensor."""
        if wire is None or not wire.fits(tensor.dtype, tensor.shape):
            return tensor
        return wire.encode(tensor, self.step, microbatch)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take inputs from a stage on this rank, which may have sent integers too."""
        given = prev_stage_outputs
        for info, tensor in zip(self.args_recv_info[mb_index], given, strict=True):
            info.buffer = tensor.detach()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from a stage on this rank; what has none stays without."""
        if not self.has_backward:  # an evaluation, for which the order is that of training
            return
        for info, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs,
                                strict=False):  # fmt: skip
            info.buffer = tensor

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self._filled(self.bwd_cache.pop(mb_index, ()), mb_index)

    def _filled(self, gradients: Any, microbatch: int) -> list[torch.Tensor | None]:
        """A gradient for each received tensor that can have one; zeros where nothing used it."""
        rows = self.rows(microbatch)
        found: list[torch.Tensor | None] = []
        for edge, gradient in zip(self.incoming, gradients, strict=False):
            if not edge.differentiable:
                found.append(None)
            elif gradient is None:
                found.append(self._empty(edge, rows).zero_())
            else:
                found.append(gradient.contiguous())
        return found

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        peer = self.stage_index_to_group_rank[self.stage_index - 1]
        target = peer if self.group is None else dist.get_global_rank(self.group, peer)
        gradients = self._filled(self.bwd_cache.pop(bwd_chunk_id), bwd_chunk_id)
        wire = self.before.get("backward")
        return [
            dist.P2POp(dist.isend, self._written(g, wire, bwd_chunk_id), target, self.group)
            for g in gradients
            if g is not None
        ]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        wire = self.after.get("forward")
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        return [
            dist.P2POp(op.op, self._written(op.tensor, wire, fwd_chunk_id), op.peer, op.group)
            for op in ops
        ]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        infos, rows = self.args_recv_info[fwd_chunk_id], self.rows(fwd_chunk_id)
        values = []
        for edge, info in zip(self.incoming, infos, strict=True):
            value = self._read(edge, rows, self.before.get("forward"), info.buffer)
            value = self.split.laid(edge, value, rows)
            values.append(value.requires_grad_(edge.differentiable and self.has_backward))
            info.buffer = None
        return tuple(values)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        values, rows = [], self.rows(bwd_chunk_id)
        for edge, info in zip(self.outgoing, self.grad_recv_info[bwd_chunk_id], strict=True):
            value = None
            if edge.differentiable:
                value = self._read(edge, rows, self.after.get("backward"), info.buffer)
            values.append(value)
            info.buffer = None
        return tuple(values)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """torch's backward of inputs alone wants no output and no input without a gradient."""
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        keep = [k for k, out in enumerate(outputs) if out.requires_grad]
        bwd_kwargs["stage_output"] = tuple(outputs[k] for k in keep)
        if gradients is not None:
            bwd_kwargs["output_grads"] = [gradients[k] for k in keep]
        found, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        each = iter(found)
        return [next(each, None) if e.differentiable else None for e in self.incoming], groups

    def clear_runtime_states(self) -> None:
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.output_chunks.clear()
        self.dw_runner.clear()
        self.backward_state.clear()

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Shapes follow from the capture."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.draw.microbatch = fwd_chunk_id
        with self.clock.timed("F", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.sees(self.stage_index, fwd_chunk_id, 0, output)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with self.clock.timed(kind, self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.sees(self.stage_index, bwd_chunk_id, 1, self.bwd_cache.get(bwd_chunk_id, ()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.clock.timed("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Connections are made when they are first used."""
        return []


class Clock:
    """When a rank did what: seconds since `start`, per action; on a GPU from events."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.on = False
        self.origin = 0.0
        self._first: Any = None
        self._marks: list[tuple[str, int, int, Any, Any]] = []

    def start(self) -> None:
        self._marks.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
        self.origin = time.perf_counter()

    @contextlib.contextmanager
    def timed(self, kind: str, stage: int, microbatch: int) -> Any:
        if not self.on:
            yield
            return
        begin = self._now()
        yield
        self._marks.append((kind, stage, microbatch, begin, self._now()))

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter() - self.origin

    def marks(self) -> list[Mark]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [
            Mark(kind, self.rank, stage, microbatch, self._seconds(begin), self._seconds(end))
            for kind, stage, microbatch, begin, end in self._marks
        ]

    def _seconds(self, when: Any) -> float:
        if self.device.type == "cuda":
            return float(self._first.elapsed_time(when)) / 1e3
        return float(when)


class Ordered(_PipelineScheduleRuntime):
    """A schedule of `schedules` on torch's runtime."""

    def __init__(
        self, name: str, stages: list[Stage], microbatches: int, loss: Callable[..., Any]
    ) -> None:
        kind = schedules.kind_of(name)
        ranks = stages[0].group_size
        local = len(stages)
        super().__init__(stages, microbatches, loss_fn=loss, scale_grads=False)
        total = ranks * local
        self.stage_index_to_group_rank = {
            s: schedules.rank_of(kind, s, ranks) for s in range(total)
        }
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order = {
            rank: [_Action(a.stage, _TYPES[a.kind], a.microbatch) for a in actions]
            for rank, actions in enumerate(schedules.order(kind.name, ranks, local, microbatches))
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
