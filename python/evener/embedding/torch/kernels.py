"""What is done to the rows of a device all at once: sums of gradients by row, and their step.

`add_reference` and `step_reference`, in torch operations, say what it is, and are what runs on a
CPU. On a GPU one or two kernels (`triton_step`) do the same: there a step is bound by the number of
kernels that the processor launches. Before they are used, they are tried on a few rows of each kind
of table. A step must give the reference's bits, a sum the same up to rounding: torch's own sums
are added in another order. Otherwise the reference goes on, and a warning says so.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import torch

from evener.embedding import Options, slots
from evener.embedding.torch import updates
from evener.embedding.torch.updates import Held

_log = logging.getLogger(__name__)


def step(
    rows: Held, places: torch.Tensor, gradients: torch.Tensor, number: int, t: int, lr: float
) -> None:
    """Step rows `places` (int64 [n]), once each, with finite gradients [n, dim].

    `number`: of the step; `t`: which of all; `lr`: rounded to float32.
    """
    if places.device.type == "cuda" and _steps(_kind(rows.options), places.device):
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
    ids: torch.Tensor, bags: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that `ids` [n] name, once each and ascending, and the sum of the gradients of each.

    `bags` [m, dim]: gradients of bags, `lengths` [m]: how many of the ids each has. A row gets the
    gradient of its bags, in their order, the same way in every run.
    """
    if ids.device.type == "cuda" and _adds(bags.shape[1], ids.device):
        return _add_sorted(ids, bags, lengths)
    return add_reference(ids, bags, lengths)


def add_reference(
    ids: torch.Tensor, bags: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add`."""
    places, inverse = torch.unique(ids, return_inverse=True)
    return places, spread(bags, inverse.to(lengths.dtype), lengths, len(places))


def spread(
    gradients: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, n: int
) -> torch.Tensor:
    """[n, dim]: each row's sum of the gradients [bags, dim] of its bags, in their order."""
    if not ids.numel() or not n:
        return gradients.new_zeros(n, gradients.shape[1])
    found: torch.Tensor = torch.ops.aten._embedding_bag_dense_backward(
        gradients, ids, _bags(ids, lengths), lengths, ids[:0], n, False, 0, None
    )
    return found


def _bags(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The bag of each id."""
    count = torch.arange(len(lengths), dtype=ids.dtype, device=ids.device)
    return torch.repeat_interleave(count, lengths, output_size=ids.numel())


def _add_sorted(
    ids: torch.Tensor, bags: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from evener.embedding.torch import triton_step

    ordered, order = torch.sort(ids, stable=True)
    places, index, counts = torch.unique_consecutive(
        ordered, return_inverse=True, return_counts=True
    )
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    of = _bags(ids, lengths)[order]
    return places, triton_step.add_rows(bags.contiguous(), of, index, starts)


def _kind(options: dict[str, Any]) -> str:
    """What of a table's options its step depends on."""
    optimizer = {k: v for k, v in options["optimizer"].items() if k != "lr"}
    return json.dumps([options["dim"], options["dtype"], optimizer], sort_keys=True)


@functools.cache
def _steps(kind: str, device: torch.device) -> bool:
    dim, dtype, optimizer = json.loads(kind)
    return _tried(
        f"the step of {optimizer['kind']}", lambda: try_step(dim, dtype, optimizer, device)
    )


@functools.cache
def _adds(dim: int, device: torch.device) -> bool:
    return _tried("sums of gradients", lambda: try_add(dim, device))


def _tried(what: str, trial: Any) -> bool:
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
    given = ids.to(device), bags, lengths.to(device)
    places, sums = _add_sorted(*given)
    right, wanted = add_reference(*given)
    _, sizes = add_reference(given[0], bags.abs(), given[2])
    # Each of n additions may round the sum of magnitudes once.
    bound = n * 2.0**-24 * sizes
    return torch.equal(places, right) and bool(((sums - wanted).abs() <= bound).all())
