"""What is done to the rows of a device all at once: bags, sums of gradients by row, and their step.

The functions that end in `_reference`, in torch operations, say what it is, and are what runs on a
CPU. On a GPU one or two kernels (`triton_step`, `triton_bags`) do the same: there a step is bound
by the number of kernels that the processor launches. Before they are used, they are tried on a few
rows of each kind of table. Bags and a step must have the reference's bits, a sum the same up to
rounding: torch's own sums are added in another order. Otherwise the reference goes on, and a
warning says so.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from evener.embedding import Options, slots
from evener.embedding.torch import updates
from evener.embedding.torch.columns import Columns
from evener.embedding.torch.updates import Held

_log = logging.getLogger(__name__)


def on(device: torch.device) -> bool:
    """Whether kernels are asked for at all."""
    return device.type == "cuda"


def step(
    rows: Held, places: torch.Tensor, gradients: torch.Tensor, number: int, t: int, lr: float
) -> None:
    """Step rows `places` (int64 [n]), once each, with finite gradients [n, dim].

    `number`: of the step; `t`: which of all; `lr`: rounded to float32.
    """
    if on(places.device) and _steps(_kind(rows.options), places.device):
        from evener.embedding.torch import triton_step

        triton_step.step(rows, places, gradients, number, t, lr)
    else:
        step_reference(rows, places, gradients, number, t, lr)


def step_reference(
    rows: Held, places: torch.Tensor, gradients: torch.Tensor, number: int, t: int, lr: float
) -> None:
    """See `step`."""
    w, own, version = rows.weight[places], rows.slots[places], rows.version[places]
    kept = own.split(w.shape[1], 1) if own.shape[1] else ()
    absent = ((number - version).clamp_(min=0) - 1).clamp_(min=0)
    batch = updates.Batch(w, tuple(kept), gradients, absent, t, lr)
    new, *after = updates.of(rows.options)(batch)
    rows.weight[places] = new
    if after:
        rows.slots[places] = torch.cat(after, 1)
    rows.version[places] = number
    rows.frequency[places] += 1


def add(
    ids: torch.Tensor,
    bags: torch.Tensor,
    ends: torch.Tensor,
    after: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that `ids` (int32 [n]) name, once each and ascending, and the sum of each's gradients.

    `bags` [m, dim]: gradients of bags, `ends` (int32 [m + 1]): where the ids of each begin and end.
    A row gets the gradient of its bags, in their order, the same way in every run. Rows (int64) and
    sums `after` stand behind these.
    """
    if on(ids.device) and _adds(bags.shape[1], ids.device):
        return _add_sorted(ids, bags, ends, after)
    return add_reference(ids, bags, ends, after)


def add_reference(
    ids: torch.Tensor,
    bags: torch.Tensor,
    ends: torch.Tensor,
    after: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add`."""
    places, inverse = torch.unique(ids, return_inverse=True)
    sums = spread(bags, inverse.int(), ends, len(places))
    return torch.cat((places.long(), after[0])), torch.cat((sums, after[1]))


def spread(gradients: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor, n: int) -> torch.Tensor:
    """[n, dim]: each row's sum of the gradients [bags, dim] of its bags, in their order.

    `ids` (int32 [m]): rows of bags; `ends` (int32 [bags + 1]): where those of each begin and end.
    """
    if not ids.numel() or not n:
        return gradients.new_zeros(n, gradients.shape[1])
    lengths = ends.diff()
    found: torch.Tensor = torch.ops.aten._embedding_bag_dense_backward(
        gradients, ids, bags_of(ends, ids.numel()), lengths, ids[:0], n, False, 0, None
    )
    return found


def bags_of(ends: torch.Tensor, n: int) -> torch.Tensor:
    """int32 [n]: the bag of each id."""
    if on(ends.device) and _numbers(ends.device):
        from evener.embedding.torch import triton_bags

        return triton_bags.number(ends, n)
    return bags_of_reference(ends, n)


def bags_of_reference(ends: torch.Tensor, n: int) -> torch.Tensor:
    """See `bags_of`."""
    count = torch.arange(len(ends) - 1, dtype=ends.dtype, device=ends.device)
    return torch.repeat_interleave(count, ends.diff(), output_size=n)


def _add_sorted(
    ids: torch.Tensor,
    bags: torch.Tensor,
    ends: torch.Tensor,
    after: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    from evener.embedding.torch import triton_step

    ordered, order = torch.sort(ids, stable=True)
    places, index, counts = torch.unique_consecutive(
        ordered, return_inverse=True, return_counts=True
    )
    starts = F.pad(counts.cumsum(0), (1, 0))
    of = bags_of(ends, len(ids))[order]
    n = len(places)
    sums = bags.new_empty(n + len(after[0]), bags.shape[1])
    triton_step.add_rows(bags.contiguous(), of, index, starts, sums[:n])
    sums[n:] = after[1]
    return torch.cat((places.long(), after[0])), sums


def pool(
    rows: torch.Tensor,
    ids: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    to: Columns | None = None,
) -> torch.Tensor:
    """float32 [bags, dim]: sums of rows [n, dim] that `ids` (int32) name, in their order.

    `ends` (int32 [bags + 1]): where the ids of each bag begin and end. Without these two row i is
    bag i. `to`: where bags are put instead of a tensor of their own, which is then what returns.
    """
    if not (on(rows.device) and _pools(rows.shape[1], rows.device)):
        return pool_reference(rows, ids, ends, to)
    from evener.embedding.torch import triton_bags

    return triton_bags.pool(rows, ids, ends, to)


def pool_reference(
    rows: torch.Tensor,
    ids: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    to: Columns | None = None,
) -> torch.Tensor:
    """See `pool`."""
    bags = rows
    if ids is not None and ends is not None:
        if ids.numel():
            bags = F.embedding_bag(ids, rows, ends, mode="sum", include_last_offset=True)
        else:
            bags = rows.new_zeros(ends.numel() - 1, rows.shape[1])
    if to is None:
        return bags
    for column, part in zip(to.columns, bags.view(len(to.columns), -1, rows.shape[1]), strict=True):
        to.out[:, column : column + rows.shape[1]] = part
    return to.out


def take(
    of: Columns, dim: int, largest: torch.Tensor | None = None, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [features, batch, dim]: the columns of gradients [batch, ...].

    `largest` [tables]: raised to the largest magnitude in the columns of each of `tables` (int64
    [features]); infinite where one is not finite.
    """
    if not (on(of.out.device) and _pools(dim, of.out.device)):
        return take_reference(of, dim, largest, tables)
    from evener.embedding.torch import triton_bags

    return triton_bags.take(of, dim, largest, tables)


def take_reference(
    of: Columns, dim: int, largest: torch.Tensor | None = None, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """See `take`."""
    if not of.columns:
        return of.out.new_zeros(0, len(of.out), dim)
    found = torch.stack([of.out[:, column : column + dim] for column in of.columns])
    if largest is not None and tables is not None and found.numel():
        largest.scatter_reduce_(0, tables, sizes(found.flatten(1)), "amax")
    return found


def sizes(rows: torch.Tensor) -> torch.Tensor:
    """[n]: the largest magnitude of each row; infinite where one is not finite."""
    found: torch.Tensor = torch.linalg.vector_norm(rows, ord=math.inf, dim=1)
    return found.nan_to_num_(nan=math.inf, posinf=math.inf)


def _kind(options: dict[str, Any]) -> str:
    """What of a table's options its step depends on."""
    optimizer = {k: v for k, v in options["optimizer"].items() if k != "lr"}
    return json.dumps([options["dim"], options["dtype"], optimizer], sort_keys=True)


@functools.cache
def _steps(kind: str, device: torch.device) -> bool:
    dim, dtype, optimizer = json.loads(kind)
    return tried(
        f"the step of {optimizer['kind']}", lambda: try_step(dim, dtype, optimizer, device)
    )


@functools.cache
def _pools(dim: int, device: torch.device) -> bool:
    return tried("bags", lambda: try_pool(dim, device))


@functools.cache
def _numbers(device: torch.device) -> bool:
    return tried("bags of ids", lambda: try_number(device))


@functools.cache
def _adds(dim: int, device: torch.device) -> bool:
    return tried("sums of gradients", lambda: try_add(dim, device))


def tried(what: str, trial: Any) -> bool:
    """Whether a kernel gives what the reference gives."""
    try:
        wrong = "" if trial() else "it gives other numbers than torch's operations"
    except Exception as error:  # noqa: BLE001 - of Triton, the compiler, the driver
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        _log.warning("embeddings: no kernel for %s, which is slower: %s", what, wrong)
    return not wrong


def try_step(dim: int, dtype: str, optimizer: dict[str, Any], device: torch.device) -> bool:
    """Whether the kernel steps some rows to the bits of the reference, in two steps."""
    from evener.embedding.torch import triton_step

    options = {"dim": dim, "dtype": dtype, "optimizer": {"lr": 0.1, **optimizer}}
    extra = slots(Options.from_dict(options))
    draw = torch.Generator().manual_seed(dim)
    n, lr = 100, updates.rounded(0.1)
    weight = torch.randn(n, dim, generator=draw)
    if dtype != "f32":
        weight = weight.to(torch.float16 if dtype == "f16" else torch.bfloat16).float()
    weight[:3] = 0.0
    whole = (
        weight,
        torch.rand(n, extra, generator=draw),
        torch.randint(0, 9, (n,), generator=draw),
        torch.randint(0, 9, (n,), generator=draw),
    )
    mine, right = (Held(options, *(each.clone().to(device) for each in whole)) for _ in range(2))
    for number, t in ((10, 1), (1000, 7)):
        places = torch.randperm(n, generator=draw)[: n - 30].to(device)
        gradients = torch.randn(n - 30, dim, generator=draw).to(device)
        gradients[:2] = 0.0
        triton_step.step(mine, places, gradients, number, t, lr)
        step_reference(right, places, gradients, number, t, lr)
    return all(
        torch.equal(getattr(mine, name), getattr(right, name))
        for name in ("weight", "slots", "version", "frequency")
    )


def try_add(dim: int, device: torch.device) -> bool:
    """Whether the kernel's sums are the reference's up to rounding."""
    draw = torch.Generator().manual_seed(dim)
    lengths = torch.randint(0, 9, (300,), generator=draw, dtype=torch.int32)
    n = int(lengths.sum())
    ids = torch.randint(0, 100, (n,), generator=draw, dtype=torch.int32)
    ids[: n // 2] = 7  # a row of many entries
    bags = torch.randn(len(lengths), dim, generator=draw).to(device)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    more = torch.arange(200, 203, device=device), torch.ones(3, dim, device=device)
    places, sums = _add_sorted(ids.to(device), bags, ends, more)
    right, wanted = add_reference(ids.to(device), bags, ends, more)
    _, whole = add_reference(ids.to(device), bags.abs(), ends, more)
    # Each of n additions may round the sum of magnitudes once.
    bound = n * 2.0**-24 * whole
    return torch.equal(places, right) and bool(((sums - wanted).abs() <= bound).all())


def try_number(device: torch.device) -> bool:
    """Whether ids get the bags that they get by the reference."""
    from evener.embedding.torch import triton_bags

    ends = torch.tensor([0, 0, 1, 40, 40, 140, 141], dtype=torch.int32, device=device)
    return torch.equal(triton_bags.number(ends, 141), bags_of_reference(ends, 141))


def try_pool(dim: int, device: torch.device) -> bool:
    """Whether bags, and the columns of their gradients, have the bits of the references."""
    from evener.embedding.torch import triton_bags

    draw = torch.Generator().manual_seed(dim)
    batch, features = 33, 3
    lengths = torch.randint(0, 9, (features * batch,), generator=draw, dtype=torch.int32)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    rows = torch.randn(50, dim, generator=draw).to(device)
    ids = torch.randint(0, 50, (int(lengths.sum()),), generator=draw, dtype=torch.int32).to(device)
    near = torch.randn(features * batch, dim, generator=draw).to(device)
    near[3, 0], near[70, dim - 1] = math.nan, -math.inf
    columns = Columns.of([2 * dim + 1, 0, dim + 1], torch.zeros(batch, 3 * dim + 1, device=device))
    tables = torch.tensor([1, 0, 1], device=device)
    pairs = [(triton_bags.pool(rows, ids, ends), pool_reference(rows, ids, ends))]
    for own, of, bags in ((rows, ids, ends), (near, None, None)):
        mine, right = (columns.like(torch.zeros_like(columns.out)) for _ in range(2))
        triton_bags.pool(own, of, bags, mine)
        pool_reference(own, of, bags, right)
        pairs.append((mine.out, right.out))
        bounds = [torch.zeros(2, device=device) for _ in range(2)]
        pairs.append(
            (
                triton_bags.take(mine, dim, bounds[0], tables),
                take_reference(right, dim, bounds[1], tables),
            )
        )
        pairs.append((bounds[0], bounds[1]))
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
