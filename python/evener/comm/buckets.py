"""Where gradients live: flat buffers, cut into buckets, in which every gradient is a view.

A bucket is one contiguous range of one flat buffer (per device and dtype); a collective works on it
in place, and the optimizer reads the result through the views: nothing is copied out. On the way in
there are two cases, at most 2 S bytes of traffic for S bytes of gradients:

- `p.grad` is still the view of the step before (`zero_grad(set_to_none=False)`, accumulation):
  autograd has added into the bucket; nothing to do.
- `p.grad` was None and autograd made a new tensor: one copy into the view when the bucket is
  complete, fused over its tensors (and fused with a scaling, where one is needed), and `p.grad`
  becomes the view.

Views have the strides of their parameter (channels_last too), so autograd and the optimizer's fused
kernels see what they would have seen. Buckets are laid out in the order in which backward produces
gradients; the order is measured in the first step, see `reducer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# Views start on 128-byte lines for 4-byte dtypes: vector loads of fused kernels stay aligned.
ALIGN = 32


@dataclass(frozen=True)
class Slot:
    """One parameter's place: `offset` is in elements from the start of its bucket."""

    index: int
    offset: int
    numel: int


@dataclass
class Bucket:
    """A contiguous range of gradients that is reduced as one. `buffer`: [numel], padded.

    `index` is its place in the rank-invariant order in which collectives are issued. `dense`: holds
    what lossy forms leave out, norms and biases.
    """

    index: int
    buffer: torch.Tensor
    slots: tuple[Slot, ...]
    dense: bool = False

    @property
    def bytes(self) -> int:
        """Size of the buffer, padding included."""
        return self.buffer.numel() * self.buffer.element_size()


def padded(numel: int, multiple: int) -> int:
    """`numel` rounded up."""
    return -(-numel // multiple) * multiple


def group_by_size(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    bucket_bytes: int,
    dense: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Parameter indices, bucket by bucket, in `order`; one device and dtype a bucket.

    Those in `dense` have buckets of their own. Buckets come in the order in which their last
    gradient does.

    A bucket is closed by the tensor that would take it past `bucket_bytes`; a larger tensor is a
    bucket of its own, and so is every tensor where `bucket_bytes` is 0.
    """
    groups: list[list[int]] = []
    open_group: dict[tuple[torch.device, torch.dtype, bool], tuple[list[int], int]] = {}
    for index in order:
        parameter = parameters[index]
        key = (parameter.device, parameter.dtype, index in dense)
        size = parameter.numel() * parameter.element_size()
        group, used = open_group.get(key, ([], 0))
        if not group or used + size > bucket_bytes:
            group, used = [], 0
            groups.append(group)
        group.append(index)
        open_group[key] = (group, used + size)
    position = {index: place for place, index in enumerate(order)}
    return sorted(groups, key=lambda group: position[group[-1]])


class Buckets:
    """All buckets of a list of parameters, and the views into them."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        order: Sequence[int],
        bucket_bytes: int,
        shards: int,
        dense: frozenset[int] = frozenset(),
    ) -> None:
        """`shards`: every bucket's length is a multiple of it, for the reduce-scatter. `dense`:
        parameters that lossy forms leave out.
        """
        self.order = tuple(order)
        self.buckets: list[Bucket] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        self.bucket_of: list[int] = [-1] * len(parameters)
        for group in group_by_size(parameters, order, bucket_bytes, dense):
            bucket = self._bucket(parameters, group, shards)
            bucket.dense = group[0] in dense
            self.buckets.append(bucket)

    def _bucket(
        self, parameters: Sequence[torch.Tensor], group: Sequence[int], shards: int
    ) -> Bucket:
        slots, offset = [], 0
        for index in group:
            numel = parameters[index].numel()
            slots.append(Slot(index, offset, numel))
            offset += padded(numel, ALIGN)
        first = parameters[group[0]]
        buffer = torch.zeros(padded(offset, ALIGN * shards), dtype=first.dtype, device=first.device)
        for slot in slots:
            self.views[slot.index] = place(buffer, slot, parameters[slot.index])
            self.bucket_of[slot.index] = len(self.buckets)
        return Bucket(len(self.buckets), buffer, tuple(slots))

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]


def place(buffer: torch.Tensor, slot: Slot, parameter: torch.Tensor) -> torch.Tensor:
    """The view of `buffer` that has the shape of `parameter`, and its strides where it can."""
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if _dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view(parameter.size())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the strides cover exactly numel elements: transposed and channels_last ones do."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_view(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a parameter's gradient already lives at its place in the bucket."""
    return (
        gradient.data_ptr() == view.data_ptr()
        and gradient.stride() == view.stride()
        and gradient.dtype == view.dtype
    )


def pack(views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], scale: float) -> None:
    """Bring `gradients` into `views`, multiplied by `scale`: one pass over what must move.

    On a GPU without a scale that is one fused copy of all tensors.
    """
    outside = [
        (view, gradient)
        for view, gradient in zip(views, gradients, strict=True)
        if not is_view(gradient, view)
    ]
    if scale == 1.0:
        if outside:
            torch._foreach_copy_([view for view, _ in outside], [grad for _, grad in outside])
        return
    moved = {id(view) for view, _ in outside}
    for view, gradient in outside:
        torch.mul(gradient, scale, out=view)
    inside = [view for view in views if id(view) not in moved]
    if inside:
        torch._foreach_mul_(inside, scale)
