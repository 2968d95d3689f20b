"""What a row of gradients has beside its codes: entries that go as they are, and what is kept.

`comm.shards` sends a row of a unit's gradients to each node. Norms and biases go exact, behind the
codes, and are zero in what is coded. What INT4's rounding takes away stays at the sender.

Each is a launch or two on a GPU (`triton_rows`), because the host that enqueues them is what a step
waits for; the references in plain torch define them, and are what runs on a CPU.
"""

from __future__ import annotations

import torch


def take_reference(
    rows: torch.Tensor, own: int, places: torch.Tensor, sent: torch.Tensor, start: int
) -> None:
    """See `take`."""
    end = start + places.numel() * rows.element_size()
    for node, row in enumerate(rows):
        if node != own:
            sent[node, start:end].view(rows.dtype).copy_(row[places])
            row[places] = 0


def give_reference(
    came: torch.Tensor, start: int, places: torch.Tensor, own: torch.Tensor, out: torch.Tensor
) -> None:
    """See `give`."""
    end = start + places.numel() * own.element_size()
    total = own[places].to(torch.float32, copy=True)
    for message in came:
        total += message[start:end].view(own.dtype)
    before = out[places]
    out[places] = torch.where(before.isnan(), before, total.to(out.dtype))


def keep_reference(left: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor) -> None:
    """See `keep`."""
    residual.copy_(torch.where(scales.sum().isnan(), residual.to(left.dtype), left))


def take(
    rows: torch.Tensor, own: int, places: torch.Tensor, sent: torch.Tensor, start: int
) -> None:
    """Entries at `places` of each row but `own` -> its message, from `start` on; then they are 0.

    `rows` [nodes, n], a floating dtype; `places` int64 [k]; `sent` uint8 [nodes, bytes]. `start`
    and a message's bytes are multiples of 16.
    """
    if rows.device.type == "cpu":
        take_reference(rows, own, places, sent, start)
        return
    from evener.comm.codecs import triton_rows

    triton_rows.take(rows, own, places, sent, start)


def give(
    came: torch.Tensor, start: int, places: torch.Tensor, own: torch.Tensor, out: torch.Tensor
) -> None:
    """`out` at `places` = `own` there + what each message says of it, in their order, in float32.

    `came` uint8 [ranks, bytes], from `take`, of the dtype of `own` [n]; `out` [n], a floating
    dtype. What is NaN in `out` stays so.
    """
    if own.device.type == "cpu":
        give_reference(came, start, places, own, out)
        return
    from evener.comm.codecs import triton_rows

    triton_rows.give(came, start, places, own, out)


def keep(left: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor) -> None:
    """`residual` [n] <- `left` [n], unless one of `scales` is NaN: such a step is skipped.

    `left`, `residual`: floating dtypes; `scales`: float32, none negative.
    """
    if residual.device.type == "cpu":
        keep_reference(left, scales, residual)
        return
    from evener.comm.codecs import triton_rows

    triton_rows.keep(left, scales, residual)
