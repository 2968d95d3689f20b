"""Moves the data of what was agreed: one call of torch.distributed, or a few, a fused answer.

All functions run under the engine's drive lock, in the same order on every rank. A rank that has
joined takes part with zeros (its entry is None); the answer says how many and of what kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from evener._native import Answer
from evener.horovod import dtypes, kinds
from evener.horovod.adasum import adasum
from evener.horovod.common.reductions import Adasum, Average, Max, Min, Product, Sum
from evener.horovod.entry import Entry, Set
from evener.horovod.timeline import Timeline

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Adasum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}

# Where a backend has no reduction for a dtype, or a poor one, a wider one is reduced.
_WIDER_ON_CPU = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.bool: torch.int32,
}
_WIDER_ON_CUDA = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.bool: torch.int32,
}

_OPTIONS: dict[int, Any] = {}

# Broadcasts of many tensors are packed into messages of this size.
_PACKED = 32 << 20

# Fusion buffers of up to this many bytes are kept, 16 at most.
_KEPT = 1 << 20


class Engine(Protocol):
    """What is used of `evener.horovod.engine.Engine`."""

    sets: dict[int, Set]
    join_device: int
    timeline: Timeline

    def make_set(self, ranks: list[int]) -> Set: ...


class Executor:
    """The data's side of an `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: torch.device | None = None  # the GPU of the last operation
        self._buffers: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._fusion: dict[Any, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = {}
        self._kinds: dict[int, Callable[[Answer, Entry | None], None]] = {
            kinds.ALLGATHER: self._allgather,
            kinds.BROADCAST: self._broadcast,
            kinds.ADASUM: self._adasum,
            kinds.ALLTOALL: self._alltoall,
            kinds.REDUCESCATTER: self._reducescatter,
            kinds.ADD_SET: self._add_set,
            kinds.REMOVE_SET: self._remove_set,
        }

    def run(self, answers: list[Answer], entries: list[Entry | None]) -> None:
        """Do what `answers` say. Results are in the entries' outputs afterwards."""
        if answers[0].kind == kinds.ALLREDUCE:
            self.allreduce(answers, entries, None)
            return
        for answer, entry in zip(answers, entries, strict=True):
            function = self._kinds.get(answer.kind)
            if function is None:
                continue  # a barrier, or a join: to agree was all
            with self._placed([answer], [entry]):
                function(answer, entry)

    def _set(self, answer: Answer) -> Set:
        return self._engine.sets[answer.set]

    def _device(self, answer: Answer) -> torch.device:
        """Where this rank makes its zeros: where `join` said, or where its tensors were last.

        The current GPU is of a thread, and the engine's thread has GPU 0.
        """
        if not answer.gpu:
            return torch.device("cpu")
        given = self._engine.join_device
        if given >= 0:
            return torch.device("cuda", given)
        return self._last or torch.device("cuda", torch.cuda.current_device())

    @contextlib.contextmanager
    def _placed(self, answers: list[Answer], entries: Sequence[Entry | None]) -> Iterator[None]:
        """On a GPU: on the caller's stream where the caller itself is here; else on a stream of
        ours, after the callers', and done when this ends."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if not answers[0].gpu:
                self._begin(answers)
                yield
                self._end(answers)
                return
            found = next((e.inputs[0].device for e in entries if e is not None), None)
            device = found or self._device(answers[0])
            self._last = device
            if len(entries) == 1 and entries[0] is not None and entries[0].here:
                stack.enter_context(torch.cuda.device(device))
                self._begin(answers)
                yield
                if self._engine.timeline.active:
                    torch.cuda.current_stream().synchronize()
                self._end(answers)
                return
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            stack.enter_context(torch.cuda.device(device))
            for entry in entries:
                if entry is not None and entry.here:
                    stream.wait_stream(torch.cuda.current_stream())
                elif entry is not None and entry.ready is not None:
                    stream.wait_event(entry.ready)
            stack.enter_context(torch.cuda.stream(stream))
            self._begin(answers)
            yield
            # This thread waits, so that a handle that is done is done for every stream.
            stream.synchronize()
            self._end(answers)

    def _begin(self, answers: list[Answer]) -> None:
        if self._engine.timeline.active:
            self._engine.timeline.begin(answers)

    def _end(self, answers: list[Answer]) -> None:
        if self._engine.timeline.active:
            self._engine.timeline.end(answers)

    def _activity(self, answers: list[Answer], what: str) -> None:
        if self._engine.timeline.active:
            self._engine.timeline.activity(answers, what)

    # --- all-reduce ---

    def is_direct(self, source: torch.Tensor) -> bool:
        """Whether it is reduced as it is."""
        return source.dtype not in (_WIDER_ON_CUDA if source.is_cuda else _WIDER_ON_CPU)

    def direct(self, source: torch.Tensor, output: torch.Tensor, op: int) -> None:
        """Reduce one tensor over all ranks, on the caller's stream: what `allreduce` would do, in
        fewer steps. Neither has a history, so autograd sees nothing of it."""
        made = self._engine.sets[0]
        if source is not output:
            output.copy_(source)
        if output.numel():
            _reduced(output, op, made.cuda if source.is_cuda else made.cpu)
        if op == Average:
            _average(output, len(made.ranks))

    def frozen(self, answers: list[Answer], entries: Sequence[Entry | None], flag: bool) -> bool:
        """A step of the frozen schedule with the flag in the collective. flag: raise ours. Gives
        whether any rank raised its flag: nothing was written to the outputs then.

        The buffer with the flag's place is kept, so that a step is a copy in, a reduction, a copy
        out.
        """
        entry, answer = entries[0], answers[0]
        if len(entries) > 1 or entry is None or len(entry.inputs) > 1 or answer.gpu:
            return self.allreduce(answers, entries, flag)
        source = entry.inputs[0]
        if source.dtype in _WIDER_ON_CPU or answer.factors != (1.0, 1.0):
            return self.allreduce(answers, entries, flag)
        key = (answer.name, source.dtype, source.numel())
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) > 64:
                self._buffers.clear()
            work = source.new_empty(source.numel() + 1)
            buffer = self._buffers[key] = work, work[:-1], work[-1:]
        work, data, lane = buffer
        made = self._set(answer)
        with torch.no_grad():
            self._begin(answers)
            data.copy_(source.view(-1))
            lane.fill_(answer.op in (Min, Product))
            self._activity(answers, "GLOO_ALLREDUCE")
            _reduced(work, answer.op, made.cpu)
            if (lane.item() != 0) != (answer.op in (Min, Product)):
                self._end(answers)
                return True
            result = _finished(data, answer, len(made.ranks))
            (entry.outputs or ())[0].view(-1).copy_(result)
            self._end(answers)
            return False

    def allreduce(
        self, answers: list[Answer], entries: Sequence[Entry | None], flag: bool | None
    ) -> bool:
        """Reduce all of them together. flag: raise ours, or not; None: there is none.

        Gives whether any rank raised its flag: nothing was written to the outputs then.
        """
        first = answers[0]
        if first.gpu and len({e.inputs[0].device for e in entries if e is not None}) > 1:
            # Several GPUs of one process: each by itself.
            for answer, entry in zip(answers, entries, strict=True):
                self.allreduce([answer], [entry], None)
            return False
        with self._placed(answers, entries):
            sources: list[torch.Tensor] = []
            targets: list[torch.Tensor] = []
            for answer, entry in zip(answers, entries, strict=True):
                if entry is None:
                    device = self._device(answer)
                    for number, shape, _ in answer.tensors:
                        zeros = torch.zeros(shape, dtype=dtypes.DTYPES[number], device=device)
                        sources.append(zeros)
                        targets.append(zeros)
                else:
                    sources.extend(entry.inputs)
                    targets.extend(entry.outputs or ())
            if all(source.dtype == sources[0].dtype for source in sources):
                return self._reduce(answers, sources, targets, first, flag)
            by_dtype: dict[torch.dtype, list[int]] = {}
            for index, source in enumerate(sources):
                by_dtype.setdefault(source.dtype, []).append(index)
            flagged = False
            for indices in by_dtype.values():
                flagged |= self._reduce(
                    answers,
                    [sources[i] for i in indices],
                    [targets[i] for i in indices],
                    first,
                    flag,
                )
            return flagged

    def _reduce(
        self,
        answers: list[Answer],
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        first: Answer,
        flag: bool | None,
    ) -> bool:
        dtype, device = sources[0].dtype, sources[0].device
        wide = (_WIDER_ON_CUDA if device.type == "cuda" else _WIDER_ON_CPU).get(dtype, dtype)
        made = self._set(first)
        group = made.cuda if device.type == "cuda" else made.cpu
        alone = len(sources) == 1 and flag is None and wide == dtype
        views: list[torch.Tensor] = []
        if alone:
            # In place in the target: nothing is copied twice.
            if targets[0].data_ptr() != sources[0].data_ptr():
                targets[0].copy_(sources[0])
            data = work = targets[0].detach()
        else:
            self._activity(answers, "MEMCPY_IN_FUSION_BUFFER")
            work, data, views = self._fused(sources, wide, flag is not None)
            torch._foreach_copy_(views, sources)
            if flag is not None:
                # Raised: a sum above 0, a maximum of 1, a minimum or product of 0.
                work[-1:].fill_(flag == (first.op not in (Min, Product)))
        if first.factors[0] != 1.0:
            data.copy_(_scaled(data, first.factors[0]))
        name = "NCCL" if device.type == "cuda" else "GLOO"
        self._activity(answers, f"{name}_ALLREDUCE")
        if work.numel():
            _reduced(work, first.op, group)
        if flag is not None and bool(work[-1].item() != 0) != (first.op in (Min, Product)):
            return True
        result = _finished(data, first, len(made.ranks))
        if alone:
            if result.data_ptr() != work.data_ptr():
                targets[0].copy_(result)
            return False
        self._activity(answers, "MEMCPY_OUT_FUSION_BUFFER")
        if result is not data:
            views = list(_unflatten_dense_tensors(result, targets))
        torch._foreach_copy_(targets, views)
        return False

    def _fused(
        self, sources: list[torch.Tensor], dtype: torch.dtype, flagged: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A buffer (of one element more where `flagged`), its part for the data, views of that in
        the sources' shapes.

        Small ones on a CPU are kept: a steady burst asks for the same again, and to make it costs
        as much as to fill it.
        """
        device = sources[0].device
        key = (dtype, flagged, *[source.shape for source in sources])
        found = self._fusion.get(key) if device.type == "cpu" else None
        if found is None:
            size = sum(source.numel() for source in sources)
            work = torch.empty(size + flagged, dtype=dtype, device=device)
            data = work[:size]
            found = work, data, list(_unflatten_dense_tensors(data, sources))
            if device.type == "cpu" and work.nbytes <= _KEPT:
                if len(self._fusion) >= 16:
                    self._fusion.clear()
                self._fusion[key] = found
        return found

    def _adasum(self, answer: Answer, entry: Entry | None) -> None:
        made = self._set(answer)
        if entry is None:
            device = self._device(answer)
            inputs = [
                torch.zeros(shape, dtype=dtypes.DTYPES[number], device=device)
                for number, shape, _ in answer.tensors
            ]
            outputs: Sequence[torch.Tensor] = inputs
        else:
            inputs, outputs = list(entry.inputs), entry.outputs or ()
        self._activity([answer], "ADASUM_ALLREDUCE")
        for source, target in zip(inputs, outputs, strict=True):
            group = cast(dist.ProcessGroup, made.cuda if source.is_cuda else made.cpu)
            scaled = _scaled(source, answer.factors[0]) if answer.factors[0] != 1.0 else source
            combined = adasum(scaled, group)
            target.copy_(_scaled(combined, answer.factors[1]))

    # --- the others; their entries are there, because a join was refused ---

    def _reducescatter(self, answer: Answer, entry: Entry | None) -> None:
        assert entry is not None
        made = self._set(answer)
        place, size = cast(int, made.place), len(made.ranks)
        self._activity([answer], "REDUCESCATTER")
        outputs = []
        for source in entry.inputs:
            on_gpu = source.is_cuda
            wider = _WIDER_ON_CUDA if on_gpu else _WIDER_ON_CPU
            work = source.to(wider.get(source.dtype, source.dtype), copy=True)
            if answer.factors[0] != 1.0:
                work = _scaled(work, answer.factors[0])
            rows, over = divmod(source.shape[0], size)
            start = place * rows + min(place, over)
            count = rows + (place < over)
            if on_gpu and over == 0 and work.numel():
                part = work.new_empty((rows, *work.shape[1:]))
                dist.reduce_scatter_tensor(part, work, _OPS[answer.op], group=made.cuda)
            else:
                # Gloo has no reduce-scatter worth the name, and parts may be uneven.
                if work.numel():
                    group = made.cuda if on_gpu else made.cpu
                    dist.all_reduce(work, _OPS[answer.op], group=group)
                part = work.narrow(0, start, count)
            outputs.append(
                _finished(part, answer, size).to(source.dtype, copy=not on_gpu or over > 0)
            )
        entry.outputs = [output.contiguous() for output in outputs]

    def _allgather(self, answer: Answer, entry: Entry | None) -> None:
        assert entry is not None
        made = self._set(answer)
        self._activity([answer], "ALLGATHER")
        entry.outputs = [
            _gathered(
                source,
                [member[index] for member in answer.rows],
                made.cuda if source.is_cuda else made.cpu,
            )
            for index, source in enumerate(entry.inputs)
        ]

    def _broadcast(self, answer: Answer, entry: Entry | None) -> None:
        assert entry is not None
        made = self._set(answer)
        outputs = [output for output in entry.outputs or () if output.numel()]
        self._activity([answer], "BROADCAST")
        group = made.cuda if answer.gpu else made.cpu
        if len(outputs) == 1 and outputs[0].is_contiguous():
            data = outputs[0].view(-1).view(torch.uint8)
            dist.broadcast(data, group=group, group_src=made.ranks.index(answer.root))
            return
        chunk: list[torch.Tensor] = []
        size = 0
        root = made.ranks.index(answer.root)
        for output in outputs:
            chunk.append(output)
            size += output.numel() * output.element_size()
            if size >= _PACKED:
                _send(chunk, root, made.place == root, group)
                chunk, size = [], 0
        if chunk:
            _send(chunk, root, made.place == root, group)

    def _alltoall(self, answer: Answer, entry: Entry | None) -> None:
        assert entry is not None
        made = self._set(answer)
        place = cast(int, made.place)
        self._activity([answer], "ALLTOALL")
        source = entry.inputs[0]
        received = [member[place] for member in answer.rows]
        row = source.element_size() * source.shape[1:].numel()
        output = source.new_empty((sum(received), *source.shape[1:]))
        largest = max(max(member, default=0) for member in answer.rows) * row
        if largest:
            dist.all_to_all_single(
                output.view(-1).view(torch.uint8),
                source.view(-1).view(torch.uint8),
                [count * row for count in received],
                [count * row for count in entry.splits],
                group=made.cuda if source.is_cuda else made.cpu,
            )
        entry.outputs = [output]

    # --- process sets ---

    def _add_set(self, answer: Answer, _entry: Entry | None) -> None:
        if answer.value >= 0:
            self._engine.sets[answer.value] = self._engine.make_set(answer.splits)

    def _remove_set(self, answer: Answer, _entry: Entry | None) -> None:
        # Its groups stay for the next set of these ranks: torch would give a new group the name of
        # a destroyed one, and with it the addresses of the dead.
        self._engine.sets.pop(answer.value, None)


def _reduced(work: torch.Tensor, op: int, group: Any) -> None:
    """`dist.all_reduce` in place without its Python. Rank members of the group only."""
    options = _OPTIONS.get(op)
    if options is None:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        options.asyncOp = False
        _OPTIONS[op] = options
    pending = group.allreduce([work], options)
    if pending is not None:
        pending.wait()


def _scaled(work: torch.Tensor, factor: float) -> torch.Tensor:
    """`work` times `factor`; whole numbers in float64, toward zero.

    For float16 on a GPU the factor is rounded to float16 first, as upstream's kernel does
    (horovod/common/ops/cuda/cuda_kernels.cu); on a CPU the product alone is rounded.
    """
    if factor == 1.0:
        return work
    if work.dtype == torch.float16 and work.is_cuda:
        factor = float(torch.tensor(factor, dtype=torch.float16))
    if work.is_floating_point():
        return work * factor
    return (work.double() * factor).trunc().to(work.dtype)


def _average(total: torch.Tensor, size: int) -> torch.Tensor:
    """In place; whole numbers toward zero."""
    if total.is_floating_point():
        return total.div_(size)
    return total.copy_(torch.div(total, size, rounding_mode="trunc"))


def _finished(work: torch.Tensor, answer: Answer, size: int) -> torch.Tensor:
    """The sum made an average, and scaled."""
    factor = answer.factors[1]
    if answer.op != Average:
        return _scaled(work, factor)
    if work.is_floating_point() or factor == 1.0:
        return _scaled(_average(work, size), factor)
    return (work.double() * factor / size).trunc().to(work.dtype)


def _gathered(
    source: torch.Tensor, rows: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Bytes travel, so that every dtype works; ragged parts are padded to the longest."""
    shape = source.shape[1:]
    row = source.element_size() * shape.numel()
    longest = max(rows) * row
    out = source.new_empty((sum(rows), *shape))
    if longest == 0:
        return out
    mine = source.view(-1).view(torch.uint8)
    if min(rows) == max(rows):
        dist.all_gather_into_tensor(out.view(-1).view(torch.uint8), mine, group=group)
        return out
    part = torch.zeros(longest, dtype=torch.uint8, device=source.device)
    part[: mine.numel()] = mine
    whole = torch.empty(longest * len(rows), dtype=torch.uint8, device=source.device)
    dist.all_gather_into_tensor(whole, part, group=group)
    table = whole.view(len(rows), longest)
    parts = [table[index, : count * row] for index, count in enumerate(rows)]
    torch.cat(parts, out=out.view(-1).view(torch.uint8))
    return out


def _send(chunk: list[torch.Tensor], root: int, is_root: bool, group: Any) -> None:
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in chunk]
    packed = torch.cat(parts)
    dist.broadcast(packed, group=group, group_src=root)
    if is_root:
        return
    offset = 0
    for tensor, part in zip(chunk, parts, strict=True):
        # Aligned for a view of any dtype only after a copy.
        piece = packed[offset : offset + part.numel()].clone()
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
        offset += part.numel()
