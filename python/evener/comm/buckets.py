"""Where gradients live: flat buffers, cut into buckets, in which every gradient is a view.

A bucket is one contiguous range of one flat buffer (per device and dtype); a collective works on it
in place, and the optimizer reads the result through the views: nothing is copied out. On the way in
there are two cases, at most 2 S bytes of traffic for S bytes of gradients:

- `p.grad` is still the view of the step before (`zero_grad(set_to_none=False)`, accumulation):
  autograd has added into the bucket; nothing to do.
- `p.grad` was None and autograd made a new tensor: one copy into the view when the bucket is
  complete, fused over its tensors (and fused with a scaling, where one is needed), and `p.grad`
  becomes the view.

A tensor larger than `partition_bytes` lies in several buckets, one behind the other in one buffer,
so that its view is whole, and yet it is encoded, sent and decoded in parts: others need not wait
until all of it has crossed (tensor partitioning; Peng et al., ByteScheduler,
doi 10.1145/3341301.3359642). And buckets get smaller towards the end of backward, for those are
what the next step waits for.

Views have the strides of their parameter (channels_last too), so autograd and the optimizer's fused
kernels see what they would have seen. Buckets are laid out in the order in which backward produces
gradients; the order is measured in the first step, see `reducer`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evener.comm import holders

# Views start on 128-byte lines for 4-byte dtypes: vector loads of fused kernels stay aligned.
ALIGN = 32
# Up to here a bucket at the end of backward is not made smaller: its latency would be most of it.
_LAST_BYTES = 1 << 20
# How much a bucket may hold for a byte that is still to come behind it.
_TAPER = 4
# A bucket is at most as large as all before it, from this on: the network has something early.
_FIRST_BYTES = 25 << 20
# A thread of Gloo's lets go of a tensor just after it has said that it is done, but not while it
# has no processor: this often the holders are counted again, with this many seconds between. A
# program that keeps gradients in each step waits for the first number alone.
_LOOKS, _PATIENT, _BETWEEN = 10, 250, 2e-4


@dataclass(frozen=True)
class Slot:
    """One parameter's place: `offset` is in elements from the start of its bucket.

    `numel` entries from the parameter's `start`-th on, in the order of its memory, in which `width`
    of them are a row (of a matrix, or filter); 0: it is no matrix.
    """

    index: int
    offset: int
    numel: int
    start: int = 0
    width: int = 0


@dataclass
class Bucket:
    """A contiguous range of gradients that is reduced as one. `buffer`: [numel], padded.

    `index` is its place in the rank-invariant order in which collectives are issued. `dense`: holds
    what lossy forms leave out, norms and biases. `parts`: the buckets, this one among them, over
    which its tensor is spread; `part`: which of them it is, in words. `by_rows`: it brings rows of
    its tensor, which are added to what the parts before it have brought; it has no memory of its
    own, and its slot says how many entries are expected.
    """

    index: int
    buffer: torch.Tensor
    slots: tuple[Slot, ...]
    dense: bool = False
    parts: tuple[int, ...] = ()
    part: str = ""
    by_rows: bool = False

    @property
    def whole(self) -> bool:
        """Whether its tensors lie in no other bucket."""
        return len(self.parts) == 1

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
    alone: Container[int] = (),
) -> list[list[int]]:
    """Parameter indices, bucket by bucket, in `order`; one device and dtype a bucket.

    Those in `dense` have buckets of their own, and each in `alone` has one. Buckets come in the
    order in which their last gradient does.

    A bucket is closed by the tensor that would take it past `bucket_bytes`, past four times what is
    still to come (1 MiB is always allowed), or past what came before it (25 MiB are); a larger
    tensor is a bucket of its own, and so is every tensor where `bucket_bytes` is 0.
    """
    groups: list[list[int]] = []
    to_come: dict[tuple[torch.device, torch.dtype, bool], int] = {}
    for index in order:
        parameter = parameters[index]
        key = (parameter.device, parameter.dtype, index in dense)
        to_come[key] = to_come.get(key, 0) + parameter.numel() * parameter.element_size()
    open_group: dict[tuple[torch.device, torch.dtype, bool], tuple[list[int], int]] = {}
    closed: dict[tuple[torch.device, torch.dtype, bool], int] = {}
    for index in order:
        parameter = parameters[index]
        key = (parameter.device, parameter.dtype, index in dense)
        size = parameter.numel() * parameter.element_size()
        to_come[key] -= size
        if index in alone:
            groups.append([index])
            continue
        group, used = open_group.get(key, ([], 0))
        before = max(_FIRST_BYTES, closed.get(key, 0))
        most = min(bucket_bytes, before, max(_LAST_BYTES, _TAPER * to_come[key]))
        if not group or used + size > most:
            closed[key] = closed.get(key, 0) + used
            group, used = [], 0
            groups.append(group)
        group.append(index)
        open_group[key] = (group, used + size)
    position = {index: place for place, index in enumerate(order)}
    return sorted(groups, key=lambda group: position[group[-1]])


def partitions(numel: int, itemsize: int, partition_bytes: int, multiple: int) -> list[int]:
    """Into how many entries each the parts of a tensor go: equal ones, the last one the rest.

    All but the last are a multiple of `multiple`. One part where `partition_bytes` is 0.
    """
    count = -(-numel * itemsize // partition_bytes) if partition_bytes else 1
    if count <= 1:
        return [numel]
    length = padded(-(-numel // count), multiple)
    return [min(length, numel - start) for start in range(0, numel, length)]


class Buckets:
    """All buckets of a list of parameters, and the views into them."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        order: Sequence[int],
        bucket_bytes: int,
        shards: int,
        dense: frozenset[int] = frozenset(),
        partition_bytes: int = 0,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        """`shards`: every bucket's length is a multiple of it, for the reduce-scatter. `dense`:
        parameters that lossy forms leave out. `partition_bytes`: larger tensors are spread over
        several buckets; 0: none is. `rows`: parameters that have a bucket by rows behind their
        others, and how many entries are expected in it.
        """
        rows = rows or {}
        self.order = tuple(order)
        self.buckets: list[Bucket] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        # The buckets in whose memory each parameter lies; none for those that are not in `order`.
        self.buckets_of: list[tuple[int, ...]] = [()] * len(parameters)
        for group in group_by_size(parameters, order, bucket_bytes, dense, rows):
            first = parameters[group[0]]
            itemsize, unit = first.element_size(), ALIGN * shards
            cut = partitions(first.numel(), itemsize, partition_bytes, unit)
            if len(group) == 1 and len(cut) > 1:
                self._spread(parameters, group[0], cut, unit)
            else:
                self._fuse(parameters, group, unit)
            if group[0] in rows:
                self._follow(parameters[group[0]], group[0], rows[group[0]])
            for bucket in self.buckets[self.buckets_of[group[0]][0] :]:
                bucket.dense = group[0] in dense
        # By first bucket of a memory how many tensors lie in it where nobody else has one.
        self._alone = {b.index: holders.memory(b.buffer) for b in self if self._begins(b)}

    def _fuse(self, parameters: Sequence[torch.Tensor], group: Sequence[int], unit: int) -> None:
        """One bucket for all of `group`."""
        slots, offset = [], 0
        for index in group:
            numel = parameters[index].numel()
            slots.append(Slot(index, offset, numel, 0, row_width(parameters[index])))
            offset += padded(numel, ALIGN)
        buffer = _zeros(padded(offset, unit), parameters[group[0]])
        number = len(self.buckets)
        for slot in slots:
            self.views[slot.index] = place(buffer, slot, parameters[slot.index])
            self.buckets_of[slot.index] = (number,)
        self.buckets.append(Bucket(number, buffer, tuple(slots), parts=(number,)))

    def _spread(
        self, parameters: Sequence[torch.Tensor], index: int, cut: Sequence[int], unit: int
    ) -> None:
        """One parameter over several buckets, whose buffers follow each other in memory."""
        parameter = parameters[index]
        buffer = _zeros(padded(parameter.numel(), unit), parameter)
        self.views[index] = place(buffer, Slot(index, 0, parameter.numel()), parameter)
        first = len(self.buckets)
        parts = tuple(range(first, first + len(cut)))
        self.buckets_of[index] = parts
        start = 0
        for number, numel in zip(parts, cut, strict=True):
            part = buffer[start : start + padded(numel, unit)]
            said = f", {number - first + 1} of {len(cut)}"
            slots = (Slot(index, 0, numel, start, row_width(parameter)),)
            self.buckets.append(Bucket(number, part, slots, parts=parts, part=said))
            start += numel

    def _follow(self, parameter: torch.Tensor, index: int, numel: int) -> None:
        """Behind the buckets of a parameter the one by rows."""
        number = len(self.buckets)
        parts = (*self.buckets_of[index], number)
        for before in self.buckets_of[index]:
            self.buckets[before].parts = parts
        slots = (Slot(index, 0, numel),)
        made = Bucket(number, _zeros(0, parameter), slots, parts=parts, part=", rows", by_rows=True)
        self.buckets.append(made)

    @staticmethod
    def _begins(bucket: Bucket) -> bool:
        return bucket.index == bucket.parts[0] and not bucket.by_rows

    def kept(self, patient: bool) -> list[int]:
        """Buckets in whose memory others hold tensors too; of each memory the first one.

        Between steps: what is on its way has tensors there itself. `patient`: nobody did in the
        step before, so that it is most likely Gloo.
        """
        found = [i for i, alone in self._alone.items() if holders.memory(self[i].buffer) > alone]
        looks = _PATIENT if patient else _LOOKS
        for _ in range(looks if found and not self[found[0]].buffer.is_cuda else 0):
            time.sleep(_BETWEEN)
            found = [i for i in found if holders.memory(self[i].buffer) > self._alone[i]]
            if not found:
                break
        return found

    def renew(self, first: int, parameters: Sequence[torch.Tensor]) -> None:
        """Leave this bucket's memory, and that of its parts, to who holds it; take other memory."""
        own = [self[i] for i in self[first].parts if not self[i].by_rows]
        whole = _zeros(sum(bucket.buffer.numel() for bucket in own), own[0].buffer)
        start = 0
        for bucket in own:
            bucket.buffer = whole[start : start + bucket.buffer.numel()]
            start += bucket.buffer.numel()
        if len(own) > 1:
            slot = own[0].slots[0]
            parameter = parameters[slot.index]
            all_of_it = Slot(slot.index, 0, parameter.numel())
            self.views[slot.index] = place(whole, all_of_it, parameter)
        else:
            for slot in own[0].slots:
                self.views[slot.index] = place(whole, slot, parameters[slot.index])
        del whole
        self._alone[first] = holders.memory(own[0].buffer)

    def release(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Give the memory of all buckets back; what `restore` needs to have it again."""
        storages = {b.buffer.untyped_storage()._cdata: b.buffer.untyped_storage() for b in self}
        found = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in found:
            storage.resize_(0)
        return found

    def restore(self, released: list[tuple[torch.UntypedStorage, int]]) -> None:
        """All buckets have memory again, of zeros."""
        for storage, size in released:
            storage.resize_(size)
        for bucket in self:
            bucket.buffer.zero_()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]


def place(buffer: torch.Tensor, slot: Slot, parameter: torch.Tensor) -> torch.Tensor:
    """The view of `buffer` that has the shape of `parameter`, and its strides where it can.

    `slot` holds all of it.
    """
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if _dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view(parameter.size())


def row_width(parameter: torch.Tensor) -> int:
    """Entries of a row in the memory of its view; 0 where it has fewer than two dimensions.

    With more than two dimensions, memory is cut into rows so that rows and columns together are
    fewest: filters [64, 64, 3, 3] are 64 x 576, experts [8, 512, 256] are 4,096 x 256.
    """
    strides = parameter.stride()
    if not _dense(parameter):
        strides = torch.empty(parameter.shape, device="meta").stride()
    real = [step for size, step in zip(parameter.shape, strides, strict=True) if size > 1]
    widths = sorted(real)[1:]  # the shortest step is within a row
    return min(widths, key=lambda width: parameter.numel() // width + width, default=0)


def _zeros(numel: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(numel, dtype=like.dtype, device=like.device)


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


# Up to this mean size a pass over a whole bucket costs less than an operation a tensor.
_SMALL = 1 << 15


def pack(
    bucket: Bucket,
    views: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    scale: float,
) -> None:
    """Bring `gradients` into the `views` of `bucket`, multiplied by `scale`; None counts as zeros.

    One pass over what must move; on a GPU without a scale it is one fused copy of all tensors.
    Where tensors are small they are copied together and the bucket is scaled as a whole.
    """
    inside, outside, given = [], [], []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
        elif gradient is view or is_view(gradient, view):
            inside.append(view)
        else:
            outside.append(view)
            given.append(gradient)
    small = bucket.bytes <= _SMALL * len(views)
    if outside and (scale == 1.0 or small):
        torch._foreach_copy_(outside, given)
    if scale == 1.0:
        return
    if small and bucket.whole:  # what lies between the views is zero
        bucket.buffer.mul_(scale)
        return
    if outside and not small:
        for view, gradient in zip(outside, given, strict=True):
            torch.mul(gradient, scale, out=view)
    elif outside:
        inside += outside
    if inside:
        torch._foreach_mul_(inside, scale)
