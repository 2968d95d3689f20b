"""Starts operations: checks the arguments here and now, and submits. Each function gives a handle.

`tensors` is what the user gave, one or a group; `grouped` decides whether the handle gives a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from evener._native import Answer
from evener.horovod import dtypes, kinds
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Adasum, Average, Max, Min, Product, Sum
from evener.horovod.engine import Engine
from evener.horovod.entry import Entry, Set
from evener.horovod.state import STATE

OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
OPS = (Average, Sum, Adasum, Min, Max, Product)

Finish = Callable[[list[torch.Tensor], Answer], Any]


def member(process_set: Any) -> tuple[Engine, int, Set]:
    """The engine, the set's number and the set. Raises where this process is not in the set."""
    engine = STATE.engine
    if process_set is None or process_set is global_process_set:
        return engine, 0, engine.sets[0]
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is not an hvd.ProcessSet")
    number = process_set.process_set_id
    made = engine.set_of(number)
    if made.place is None:
        raise ValueError(
            f"rank {STATE.ranks.rank} is not in process set {number} of ranks {made.ranks}: "
            "call the operation on its ranks only"
        )
    return engine, cast(int, number), made


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history. Raises ValueError for what no rank could ever submit."""
    if tensor.layout != torch.strided:
        raise ValueError(
            f"Tensor type {tensor.type()} is not supported; use hvd.sparse_allreduce_async"
        )
    if tensor.dtype not in dtypes.DTYPE_NUMBERS:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach() if tensor.requires_grad else tensor


def group_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The detached tensors of a group. They must be on one kind of device."""
    if not tensors:
        raise ValueError("a grouped operation needs one tensor at least")
    found = [detached(tensor) for tensor in tensors]
    if len(found) > 1 and len({tensor.device for tensor in found}) > 1:
        where = ", ".join(sorted({str(tensor.device) for tensor in found}))
        raise HorovodInternalError(
            f"the tensors of a group are on {where}", "put them on one device"
        )
    return found


def submit(
    kind: int,
    process_set: Any,
    name: str | None,
    *,
    urgent: bool,
    finish: Finish | None,
    inputs: Sequence[torch.Tensor] = (),
    outputs: Sequence[torch.Tensor] | None = None,
    **more: Any,
) -> int:
    """Submit an operation of `kind`. The n-th without a name goes with the others' n-th."""
    engine, number, _ = member(process_set)
    sort = "allreduce" if kind == kinds.ADASUM else kinds.KINDS[kind]
    if name is None:
        name = engine.automatic_name(f"{sort} {number}")
    return engine.submit(
        Entry(
            kind,
            f"{sort}.{name}",
            inputs,
            outputs,
            number,
            finish=finish,
            **more,
        ),
        urgent=urgent,
    )


def _first(outputs: list[torch.Tensor], _answer: Answer) -> Any:
    return outputs[0]


def _all(outputs: list[torch.Tensor], _answer: Answer) -> Any:
    return outputs


def checked_op(op: int | None, process_set: Any) -> int:
    """The reduction; Average by default."""
    if op is None:
        return Average
    if op not in OPS:
        raise ValueError(f"op={op!r} is not one of hvd.{', hvd.'.join(OP_NAMES)}")
    if op == Adasum:
        _, number, made = member(process_set)
        if number != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if len(made.ranks) & (len(made.ranks) - 1):
            raise NotImplementedError(
                "Running Adasum with non-power of 2 ranks is not supported yet."
            )
    return op


def allreduce(
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grouped: bool,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: Any,
    urgent: bool = False,
) -> int:
    """outputs: where the results go, which is what the handle gives."""
    op = checked_op(op, process_set)
    inputs = group_of(given)
    if op == Adasum and not all(tensor.is_floating_point() for tensor in inputs):
        raise ValueError("Adasum reduces floating-point tensors only")
    # As `submit`, by a shorter way: of these there are many in a row.
    engine, number, _ = member(process_set)
    entry = Entry(
        kinds.ADASUM if op == Adasum else kinds.ALLREDUCE,
        f"allreduce.{engine.automatic_name(f'allreduce {number}') if name is None else name}",
        inputs,
        [output.detach() if output.requires_grad else output for output in outputs],
        number,
        op,
        factors=(float(factors[0]), float(factors[1])),
        result=list(outputs) if grouped else outputs[0],
    )
    return engine.submit(entry, urgent=urgent)


def allreduce_now(
    given: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: Any,
) -> torch.Tensor:
    """Reduce one tensor into `output`, which is given, and wait."""
    engine = STATE.engine
    if (process_set is global_process_set or process_set is None) and op != Adasum:
        source, op = detached(given), checked_op(op, None)
        if name is None:
            name = engine.automatic_name("allreduce 0")
        target = source if output is given else output.detach()
        if engine.quick(source, target, f"allreduce.{name}", op, factors):
            return output
    handle = allreduce([given], [output], False, name, op, factors, process_set, urgent=True)
    return cast(torch.Tensor, engine.synchronize(handle))


def reducescatter(
    given: Sequence[torch.Tensor],
    grouped: bool,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: Any,
    urgent: bool = False,
) -> int:
    """The parts of the first dimension; the first ranks get what is left over."""
    if op == Adasum:
        raise HorovodInternalError(
            "reducescatter with op=hvd.Adasum is not defined", "use op=hvd.Average or hvd.Sum"
        )
    return submit(
        kinds.REDUCESCATTER,
        process_set,
        name,
        urgent=urgent,
        finish=_all if grouped else _first,
        inputs=group_of(given),
        op=checked_op(op, process_set),
        factors=(float(factors[0]), float(factors[1])),
    )


def allgather(
    given: Sequence[torch.Tensor],
    grouped: bool,
    name: str | None,
    process_set: Any,
    urgent: bool = False,
) -> int:
    """Concatenations along dimension 0, in which ranks may differ. A scalar counts as one row."""
    inputs = [tensor if tensor.dim() else tensor.reshape(1) for tensor in group_of(given)]
    return submit(
        kinds.ALLGATHER,
        process_set,
        name,
        urgent=urgent,
        finish=_all if grouped else _first,
        inputs=inputs,
    )


def broadcast(
    outputs: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None,
    process_set: Any,
    *,
    labels: Sequence[str] = (),
    result: Any = None,
    urgent: bool = False,
) -> int:
    """Overwrite `outputs` with rank `root_rank`'s; the handle gives `result`. Any strides."""
    _, number, made = member(process_set)
    if root_rank not in made.ranks:
        where = f"this job of {len(made.ranks)}" if number == 0 else f"process set {number}"
        raise ValueError(f"root_rank={root_rank} is not a rank of {where}")
    return submit(
        kinds.BROADCAST,
        process_set,
        name,
        urgent=urgent,
        finish=lambda _outputs, _answer: result,
        inputs=outputs,
        outputs=outputs,
        root=root_rank,
        labels=labels,
    )


def alltoall(
    tensor: torch.Tensor,
    splits: Any,
    name: str | None,
    process_set: Any,
    urgent: bool = False,
    received: bool = False,
) -> int:
    """Slice r of dimension 0 goes to member r. splits: rows of each slice; None: equal ones.

    The handle gives (tensor, received rows) where splits were given, or `received` is.
    """
    _, _, made = member(process_set)
    size = len(made.ranks)
    source = detached(tensor)
    if source.dim() == 0:
        raise ValueError("alltoall needs a tensor of one dimension at least")
    rows = source.shape[0]
    where = torch.device("cpu")
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension that {size} divides, not {rows}"
            )
        counts = [rows // size] * size
    else:
        if not isinstance(splits, torch.Tensor):
            splits = torch.tensor(splits, dtype=torch.int32)
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall: splits are {splits.dtype}; give 32-bit integers")
        if splits.dim() != 1 or splits.shape[0] != size:
            raise ValueError(
                f"alltoall: splits have shape {list(splits.shape)}; give one number for each of "
                f"the {size} ranks"
            )
        where, counts = splits.device, splits.tolist()
        if min(counts) < 0 or sum(counts) > rows:
            raise ValueError(
                f"alltoall: splits {counts} sum to {sum(counts)}, the first dimension is {rows}"
            )
        source = source[: sum(counts)]
    place = cast(int, made.place)

    def finish(outputs: list[torch.Tensor], answer: Answer) -> Any:
        if splits is None and not received:
            return outputs[0]
        rows_of = [member[place] for member in answer.rows]
        return outputs[0], torch.tensor(rows_of, dtype=torch.int32, device=where)

    return submit(
        kinds.ALLTOALL,
        process_set,
        name,
        urgent=urgent,
        finish=finish,
        inputs=[source],
        splits=counts,
    )
