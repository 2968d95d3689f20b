"""`evener.embedding.Store` from Python: what it gives, what it refuses, what others' users met."""

import resource
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.embedding import (
    L2,
    Adagrad,
    Adam,
    Constant,
    Counter,
    Options,
    Sgd,
    Store,
    Ttl,
    Zeros,
    forget,
    names,
)
from evener.errors import UsageError

DIM = 3
EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
_NUMBERS = count()


@pytest.fixture
def name() -> Iterator[str]:
    before = set(names())
    yield f"store-{next(_NUMBERS)}"
    for made in set(names()) - before:
        forget(made)


@pytest.fixture
def store(name: str) -> Store:
    return Store(name, Options(DIM, optimizer=Adagrad(lr=0.5)))


def contents(store: Store) -> dict[int, tuple[bytes, int, int]]:
    """Every row: key > its bytes with slots, frequency and version."""
    return {
        int(key): (row.tobytes(), int(frequency), int(version))
        for chunk in store.export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    }


def test_any_key_of_any_shape(store: Store) -> None:
    keys = np.array(EDGES).reshape(5, 1)
    values = store.lookup(keys, 1)
    assert values.shape == (5, 1, DIM) and values.dtype == np.float32
    assert len(store) == 5 and len(np.unique(values, axis=0)) == 5
    assert (store.lookup_infer(keys) == values).all()
    assert store.lookup(np.empty((0, 2), np.int64), 1).shape == (0, 2, DIM)
    assert store.lookup([], 1).shape == (0, DIM)


def test_torch_in_torch_out_and_room_that_is_given(store: Store) -> None:
    keys = torch.tensor([[4, 5]])
    values = store.lookup(keys, 1)
    assert isinstance(values, torch.Tensor) and values.shape == (1, 2, DIM)
    room, found = torch.empty(2, DIM), np.empty(2, np.uint8)
    assert store.lookup_infer(torch.tensor([5, 6]), out=room, found=found) is room
    assert (room[0] == values[0, 1]).all() and list(found) == [1, 0]
    assert len(store) == 2


def test_a_step_sums_duplicates_first(store: Store) -> None:
    before = store.lookup([7, 8], 1)
    gradients = np.ones((3, DIM), np.float32)
    store.apply([7, 8, 7], gradients, 1)
    # Adagrad's first step is lr x the sign; summed, a is 4, and not 1 + 1.
    np.testing.assert_allclose(before - store.lookup_infer([7, 8]), 0.5, rtol=1e-6)
    assert contents(store)[7][0][-4:] == np.float32(4).tobytes()
    frequencies, versions = store.meta([7, 8, 9])
    assert list(frequencies) == [2, 1, -1] and list(versions) == [1, 1, -1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.lookup(np.array([1.0]), 1), "keys has dtype float64"),
        (lambda s: s.lookup(np.array([1], np.uint64), 1), "keys has dtype uint64"),
        (lambda s: s.lookup(np.array([[1], [2, 3]], object), 1), "keys is ragged"),
        (lambda s: s.lookup(["a"], 1), "keys has dtype"),
        (lambda s: s.lookup([1], -1), "step -1"),
        (lambda s: s.lookup([1], 2**32), "step 4294967296"),
        (lambda s: s.lookup([1], 1, out=np.empty((1, 2), np.float32)), r"out is float32 \[1, 2\]"),
        (lambda s: s.lookup([1], 1, out=np.empty((1, DIM))), "out is float64"),
        (lambda s: s.lookup_infer([1], found=np.empty(2, np.uint8)), "found is uint8"),
        (lambda s: s.apply([1], np.ones((1, 2), np.float32), 1), r"gradients have shape \[1, 2\]"),
        (lambda s: s.apply([1], np.ones((1, DIM)), 1), "gradients has dtype float64"),
        (lambda s: s.upsert([1, 2], np.ones((1, DIM), np.float32)), "values have shape"),
        (lambda s: s.put_rows([1], np.ones((1, DIM), np.float32), [0], [0]), "rows have shape"),
        (
            lambda s: s.put_rows([1], np.ones((1, 2 * DIM), np.float32), [-1], [0]),
            "frequencies do not fit",
        ),
        (
            lambda s: s.apply([1], torch.ones(1, DIM, device="meta"), 1),
            "gradients is a tensor on meta",
        ),
    ],
)
def test_what_is_refused_by_name(store: Store, call: Any, words: str) -> None:
    store.apply([1, 5], np.ones((2, DIM), np.float32), 1)
    before = contents(store)
    with pytest.raises(UsageError, match=words) as caught:
        call(store)
    assert caught.value.fix
    assert contents(store) == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("call", ["apply", "upsert"])
def test_a_value_that_is_not_finite_changes_nothing(store: Store, call: str, bad: float) -> None:
    keys = np.arange(5000)
    store.apply(keys, np.ones((5000, DIM), np.float32), 1)
    before, steps = contents(store), store.stats()["steps"]
    values = np.ones((5000, DIM), np.float32)
    values[4321, 1] = bad
    with pytest.raises(ValueError, match=r"key 4321 .*column 1.*nothing was changed"):
        getattr(store, call)(keys, values, 2)
    assert contents(store) == before and store.stats()["steps"] == steps


def test_one_name_is_one_table_with_one_set_of_options(store: Store, name: str) -> None:
    store.lookup([1, 2], 1)
    assert len(Store.find(name)) == len(Store(name, store.options)) == 2
    with pytest.raises(ValueError, match="dim"):
        Store(name, Options(DIM + 1))
    with pytest.raises(KeyError, match="there-is-none"):
        Store.find("there-is-none")
    assert len(store) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(DIM + 1, optimizer=Adagrad(lr=0.5)), "dim"),
        (Options(DIM, optimizer=Adagrad(lr=0.5), dtype="f16"), "dtype"),
        (Options(DIM, optimizer=Adam()), "optimizer"),
        (Options(DIM, optimizer=Adagrad(lr=0.5), keys="string"), "keys"),
    ],
)
def test_a_snapshot_of_another_shape_is_refused(
    store: Store, tmp_path: Path, options: Options, words: str
) -> None:
    store.lookup(np.arange(10), 1)
    store.save(tmp_path / "rows.evs")
    other = Store(f"other-{next(_NUMBERS)}", options)
    if words != "keys":
        other.lookup([1], 1)
    before = contents(other)
    with pytest.raises(ValueError, match=words):
        other.restore(tmp_path / "rows.evs")
    assert contents(other) == before
    forget(other.name)


def test_a_snapshot_of_another_version_or_cut_short_is_refused(
    store: Store, tmp_path: Path
) -> None:
    store.lookup(np.arange(10), 1)
    path = tmp_path / "rows.evs"
    store.save(path)
    whole, before = path.read_bytes(), contents(store)
    path.write_bytes(whole[:8] + b"\x63\0\0\0" + whole[12:])
    with pytest.raises((ValueError, RuntimeError), match="99"):
        store.restore(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(RuntimeError, match=r"rows\.evs"):
        store.restore(path)
    with pytest.raises(KeyError, match="no snapshot"):
        store.restore(tmp_path / "nothing.evs")
    assert contents(store) == before


def test_frozen_stores_answer_and_do_not_change(store: Store) -> None:
    store.lookup([1], 1)
    store.frozen = True
    before = contents(store)
    assert (store.lookup([1, 2], 2)[0] == store.lookup_infer([1])[0]).all()
    for change in (
        lambda: store.apply([1], np.ones((1, DIM), np.float32), 2),
        lambda: store.upsert([1], np.ones((1, DIM), np.float32)),
        store.clear,
    ):
        with pytest.raises(ValueError, match="frozen"):
            change()
    assert contents(store) == before
    store.frozen = False


def test_a_batch_gives_what_its_keys_give_one_by_one(name: str) -> None:
    """Long batches read the index in stages, short ones do not; most keys are in crowded lines."""
    store = Store(name, Options(DIM, shards=1, threads=2))
    keys = np.arange(60_000) * 31
    store.lookup(keys, 1)
    asked = np.random.default_rng(1).permutation(np.concatenate([keys, keys + 1]))[:50_000]
    found = np.empty(len(asked), np.uint8)
    values = store.lookup_infer(asked, found=found)
    assert list(found) == list(asked % 31 == 0)
    for start in range(0, len(asked), 20):
        part = slice(start, start + 20)
        assert (values[part] == store.lookup_infer(asked[part])).all()


def test_strings(name: str) -> None:
    store = Store(name, Options(DIM, keys="string"))
    ids = store.intern(["user", "item", "user", b"\xff\0"])
    assert ids[0] == ids[2] and len(set(ids.tolist())) == 3
    store.lookup(ids, 1)
    assert store.name_of(ids[3]) == b"\xff\0"
    unknown = store.intern(["nobody"], insert=False)
    assert store.name_of(unknown[0]) is None and list(store.meta(unknown)[0]) == [-1]
    with pytest.raises(ValueError, match="string"):
        Store(f"{name}-ints", Options(DIM)).intern(["a"])


# What users of other libraries met: the issues that are named.


def test_tfra_451_a_restore_has_every_row(store: Store, tmp_path: Path, name: str) -> None:
    keys = np.concatenate([np.arange(-30_000, 30_000, 7), EDGES])
    store.apply(keys, np.ones((len(keys), DIM), np.float32), 1)
    store.snapshot(tmp_path)
    other = Store(f"{name}-other", Options(DIM, optimizer=Adagrad(lr=0.5), shards=2))
    other.restore(tmp_path)
    assert contents(other) == contents(store) and len(other) == len(set(keys.tolist()))


def test_tfra_243_a_save_does_not_need_the_table_again(name: str, tmp_path: Path) -> None:
    store = Store(name, Options(64, optimizer=Sgd(), init=Zeros()))
    store.lookup(np.arange(400_000), 1)  # 100 MB of rows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saved = store.save(tmp_path / "rows.evs")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert saved["bytes"] > 100e6 and more < 40e6


def test_deeprec_999_a_delta_brings_removals_and_slots(
    store: Store, tmp_path: Path, name: str
) -> None:
    ones = np.ones((100, DIM), np.float32)
    store.apply(np.arange(100), ones, 1)
    store.snapshot(tmp_path)
    other = Store(f"{name}-other", store.options)
    other.restore(tmp_path)
    store.remove(np.arange(50))
    store.apply(np.arange(40, 140), ones, 2)
    other.apply_delta(store.delta(tmp_path)["path"])
    assert contents(other) == contents(store)
    with pytest.raises(ValueError, match="follows"):
        Store(f"{name}-third", store.options).apply_delta(next(tmp_path.glob("delta-*.evs")))


@pytest.mark.timeout(120)  # batches held each other up for ever
def test_deeprec_808_eviction_while_others_look_up(name: str) -> None:
    options = Options(DIM, eviction=Ttl(1), init=Constant(2.0), optimizer=Sgd(), threads=2)
    store = Store(name, options)
    wrong, end = [], threading.Event()

    def look(first: int) -> None:
        while not end.is_set():
            if not (store.lookup(np.arange(first, first + 3000), 1) == 2.0).all():
                wrong.append(first)

    threads = [threading.Thread(target=look, args=(n * 2000,)) for n in range(3)]
    for thread in threads:
        thread.start()
    gone = sum(store.evict(100) for _ in range(60))
    end.set()
    for thread in threads:
        thread.join()
    assert gone > 0 and not wrong


def test_torchrec_3030_a_row_that_comes_back_begins_anew(name: str) -> None:
    store = Store(name, Options(DIM, eviction=L2(1e3)))
    first = store.lookup(np.arange(100), 1)
    store.apply(np.arange(100), np.ones((100, DIM), np.float32), 1)
    assert store.evict() == 100 and len(store) == 0
    again = store.lookup(np.arange(100), 2)
    assert (again == first).all() and again.any(axis=1).all()


def test_inference_inserts_nothing_and_counts_nothing_for_admission(name: str) -> None:
    store = Store(name, Options(DIM, admission=Counter(2), missing="zeros"))
    for _ in range(5):
        assert not store.lookup_infer([1]).any()
    assert not store.lookup([1], 1).any() and len(store) == 0
    assert store.lookup([1], 2).any() and len(store) == 1


@pytest.mark.parametrize("call", ["lookup", "lookup_infer", "found", "take_rows"])
@pytest.mark.parametrize("kind", ["bytes", "flag", "mapped", "list"])
def test_memory_that_cannot_be_written_is_refused(tmp_path: Path, call: str, kind: str) -> None:
    store = Store(f"read-only {call} {kind}", Options(3))
    keys = np.arange(5)
    shape, dtype = ((5,), np.uint8) if call == "found" else ((5, 3), np.float32)
    if call == "take_rows":
        shape = (5, 6)
    out: Any = np.zeros(shape, dtype)
    if kind == "bytes":
        out = np.frombuffer(bytes(out.nbytes), dtype).reshape(shape)
    elif kind == "mapped":
        np.save(tmp_path / "out.npy", out)
        out = np.load(tmp_path / "out.npy", mmap_mode="r")
    elif kind == "list":
        out = out.tolist()
    else:
        out.flags.writeable = False
    calls = {
        "lookup": lambda: store.lookup(keys, 1, out=out),
        "lookup_infer": lambda: store.lookup_infer(keys, out=out),
        "found": lambda: store.lookup_infer(keys, found=out),
        "take_rows": lambda: store.take_rows(keys, 1, out=out),
    }
    with pytest.raises(UsageError, match="a list" if kind == "list" else "read-only"):
        calls[call]()
    assert not np.asarray(out).any()


def test_keys_that_went_are_not_remembered_without_end(tmp_path: Path) -> None:
    """Where they are more than what is left, the next delta has all rows."""
    store = Store("went", Options(2, optimizer=Sgd(), shards=1))
    store.lookup(np.arange(100), 1)
    store.snapshot(tmp_path)
    store.remove(np.arange(5))
    assert store.delta(tmp_path)["path"].endswith("delta-000002.evs")
    for start in range(1000, 20_000, 1000):
        keys = np.arange(start, start + 1000)
        store.lookup(keys, 2)
        store.remove(keys)
    assert store.delta(tmp_path)["path"].endswith("full-000003.evs")
    store.lookup(np.arange(200, 210), 3)
    assert store.delta(tmp_path)["path"].endswith("delta-000004.evs")
    again = Store("went again", store.options)
    again.restore(tmp_path)
    assert sorted(k for r in again.export() for k in r.keys) == [*range(5, 100), *range(200, 210)]


def test_a_delta_follows_the_last_file_of_its_folder(tmp_path: Path) -> None:
    store = Store("follows", Options(2))
    one, two = tmp_path / "one", tmp_path / "two"
    names = []
    for step, folder in enumerate([one, one, two, two, one, one, two]):
        store.lookup(np.arange(step * 3, step * 3 + 4), step)
        names.append(Path(store.delta(folder)["path"]).name)
        again = Store(f"follows {step}", store.options)
        again.restore(folder)
        assert len(again) == len(store)
    assert names[:3] == ["delta-000001.evs", "delta-000002.evs", "full-000001.evs"]
    assert names[3:] == [
        "delta-000002.evs",
        "full-000003.evs",
        "delta-000004.evs",
        "full-000003.evs",
    ]
