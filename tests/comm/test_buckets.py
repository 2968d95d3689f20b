"""Where gradients live: views, their strides, how tensors are grouped, what moves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.buckets import ALIGN, Buckets, group_by_size, is_view, pack


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    bucket_bytes=st.integers(0, 20000),
    shards=st.integers(1, 5),
    partition=st.sampled_from([0, 256, 1000, 5000]),
)
def test_every_gradient_has_a_place_of_its_own(
    sizes: list[int], bucket_bytes: int, shards: int, partition: int
) -> None:
    params = parameters(*[(size,) for size in sizes])
    order = range(len(params))
    buckets = Buckets(params, order, bucket_bytes, shards, frozenset(), partition)
    for index, view in enumerate(buckets.views):
        view.copy_(torch.arange(sizes[index]) + 10_000 * (index + 1))
    seen = [0] * len(params)
    for bucket in buckets:
        assert bucket.buffer.numel() % (shards * ALIGN) == 0
        want = torch.zeros_like(bucket.buffer)
        for slot in bucket.slots:
            # Parts come one behind the other.
            assert seen[slot.index] == slot.start and bucket.index in buckets.buckets_of[slot.index]
            seen[slot.index] += slot.numel
            entries = torch.arange(slot.start, slot.start + slot.numel) + 10_000 * (slot.index + 1)
            want[slot.offset : slot.offset + slot.numel] = entries
        assert torch.equal(bucket.buffer, want)  # no overlap, padding untouched
        assert all(part == buckets[part].index for part in bucket.parts)
        if not bucket.whole:
            assert len(bucket.slots) == 1
            assert bucket.slots[0].numel * 4 < partition + 4 * shards * ALIGN
    assert seen == sizes


@pytest.mark.parametrize("looks", [0, 5, 100])
@pytest.mark.parametrize("patient", [False, True])
def test_who_lets_go_a_little_later_keeps_nothing(
    looks: int, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a thread of Gloo's does, which may have no processor for a while."""
    buckets = Buckets(parameters((100,), (100,)), range(2), 1 << 20, 1, frozenset())
    held, slept = [buckets[0].buffer[:10]], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == looks:
            held.clear()

    monkeypatch.setattr("evener.comm.buckets.time.sleep", sleep)
    found = buckets.kept(patient)
    assert found == ([] if looks == 5 or (patient and looks == 100) else [0])
    assert sum(slept) < (0.06 if patient else 0.003)


def test_size_zero_means_one_bucket_a_tensor() -> None:
    assert group_by_size(parameters((4,), (4,), (1000,)), range(3), 0) == [[0], [1], [2]]


def test_a_bucket_is_closed_by_what_would_not_fit() -> None:
    params = parameters((60,), (60,), (500,), (10,), (10,))
    assert group_by_size(params, range(5), 4 * 130) == [[0, 1], [2], [3, 4]]


def test_buckets_get_smaller_towards_the_end() -> None:
    """VGG16's convolutions one by one: the last bucket is what the next forward waits for."""
    kb = [9437, 9437, 9437, 9437, 9437, 4719, 2359, 2359, 1180, 590, 295, 147, 7]
    params = parameters(*[(250 * size,) for size in kb])
    groups = group_by_size(params, range(len(params)), 25 << 20)
    sizes = [sum(kb[i] for i in group) for group in groups]
    assert sizes == [18874, 18874, 16515, 3539, 1039]
    assert group_by_size(params[9:], range(4), 25 << 20) == [[0, 1, 2, 3]], "1 MiB is one bucket"


def test_large_buckets_begin_small() -> None:
    """So that the network has something early; then each at most what came before it."""
    mb = 1 << 20
    params = [torch.empty(mb, device="meta") for _ in range(100)]  # 4 MiB each
    groups = group_by_size(params, range(len(params)), 64 * mb)
    assert [4 * len(group) for group in groups[:5]] == [24, 24, 48, 64, 64]
    assert sum(map(len, groups)) == 100 and len(groups) < 12


def test_dtypes_do_not_mix() -> None:
    params = [torch.zeros(4), torch.zeros(4, dtype=torch.float16), torch.zeros(4)]
    # In the order in which their last gradient comes: a bucket waits for those before it.
    assert group_by_size(params, range(3), 1000) == [[1], [0, 2]]


def test_norms_and_biases_have_buckets_of_their_own() -> None:
    params = parameters((100,), (4,), (100,), (4,))
    groups = group_by_size(params, range(4), 10_000, dense=frozenset({1, 3}))
    assert groups == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(3, 5),
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(5, 3).t(),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(1, 7, 1),
    ],
)
def test_views_have_the_strides_of_their_parameter(parameter: torch.Tensor) -> None:
    view = Buckets([parameter], [0], 1 << 20, 2).views[0]
    assert view.shape == parameter.shape
    for size, have, want in zip(view.shape, view.stride(), parameter.stride(), strict=True):
        assert size <= 1 or have == want


def test_a_parameter_with_holes_gets_a_contiguous_view() -> None:
    parameter = torch.randn(8, 8)[:, ::2]
    view = Buckets([parameter], [0], 1 << 20, 1).views[0]
    assert view.is_contiguous()


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("sizes", [((7,), (4, 3), (5,)), ((300, 200), (100, 100), (5,))])
def test_pack_scales_each_once(scale: float, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Small ones together, large ones each: in place, from elsewhere, and none at all."""
    params = parameters(*sizes)
    buckets = Buckets(params, range(3), 1 << 20, 1)
    here, elsewhere = buckets.views[0], torch.randn(sizes[1])
    here.copy_(params[0])
    buckets.views[2].fill_(3.0)
    pack(buckets[0], buckets.views, [here, elsewhere, None], scale)
    assert torch.equal(buckets.views[0], params[0] * scale)
    assert torch.equal(buckets.views[1], elsewhere * scale)
    assert torch.equal(buckets.views[2], torch.zeros(5))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_pack_moves_only_what_lives_elsewhere(scale: float) -> None:
    params = parameters((7,), (4, 3))
    buckets = Buckets(params, range(2), 1 << 20, 1)
    here, elsewhere = buckets.views[0], torch.randn(4, 3)
    here.copy_(params[0])
    assert is_view(here, buckets.views[0])
    assert not is_view(elsewhere, buckets.views[1])
    pack(buckets[0], buckets.views, [here, elsewhere], scale)
    assert torch.equal(buckets.views[0], params[0] * scale)
    assert torch.equal(buckets.views[1], elsewhere * scale)
