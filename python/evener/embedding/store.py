"""`Store`: the native store under a name, on numpy arrays or torch tensors.

What comes in decides what goes out: keys in a torch tensor give a torch tensor, all else numpy.
Checks are here; `evener._native` takes addresses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from evener import _native
from evener.base.given import given
from evener.embedding.options import Optimizer, Options
from evener.errors import UsageError

_MISSING = 0xFFFFFFFF
_STEPS = 1 << 32

# Who wants to know the name of a store that has other rows now, and another count of steps.
RESTORED: list[Callable[[str], None]] = []


class Rows(NamedTuple):
    """Some rows: keys int64 [n], values float32 [n, ...], frequencies and versions int64 [n]."""

    keys: np.ndarray
    values: np.ndarray
    frequencies: np.ndarray
    versions: np.ndarray


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, what: str, dtype: type) -> np.ndarray:
    """`value` as a contiguous array of this dtype, without a copy where it is one already."""
    wanted = np.dtype(dtype)
    if _is_torch(value):
        if value.device.type != "cpu":
            raise UsageError(
                f"{what} is a tensor on {value.device}", "move it to the CPU: the store is there"
            )
        value = value.detach().contiguous().numpy()
    array = np.asarray(value)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(wanted)
    if array.dtype != wanted:
        # A key of another integer type is the same key; anything else would be a guess.
        if wanted == np.int64 and array.dtype.kind in "iu" and array.dtype != np.uint64:
            array = array.astype(np.int64)
        elif array.dtype == object:
            raise UsageError(
                f"{what} is ragged: its rows differ in length",
                "pass one flat array of ids, with offsets where rows differ",
            )
        else:
            raise UsageError(
                f"{what} has dtype {array.dtype}, and {wanted} is needed",
                f"convert it: .astype('{wanted}') or .to(torch.{wanted})",
            )
    return np.ascontiguousarray(array)


def _output(out: Any, shape: tuple[int, ...], dtype: type, what: str) -> np.ndarray:
    if out is None:
        return np.empty(shape, dtype)
    if not (_is_torch(out) and out.device.type == "cpu") and not isinstance(out, np.ndarray):
        where = f" on {out.device}" if _is_torch(out) else ""
        raise UsageError(
            f"{what} is a {type(out).__name__}{where}", "give an array or a tensor on the CPU"
        )
    array: np.ndarray = out.detach().numpy() if _is_torch(out) else out
    if array.dtype != np.dtype(dtype) or array.shape != shape or not array.flags.c_contiguous:
        raise UsageError(
            f"{what} is {array.dtype} {list(array.shape)}, and {np.dtype(dtype)} {list(shape)}, "
            "contiguous, is needed",
            "make it so, or leave it out",
        )
    if not array.flags.writeable:
        raise UsageError(f"{what} cannot be written: its memory is read-only", "give a copy of it")
    return array


def _step(step: int) -> int:
    if not 0 <= step < _STEPS:
        raise UsageError(f"step {step} cannot be", f"count steps from 0 to {_STEPS - 1}")
    return int(step)


def names() -> list[str]:
    """The stores of this process."""
    return _native.embedding_names()


@given
def forget(name: str) -> bool:
    """Takes a name away; the store goes with its last holder."""
    return _native.embedding_forget(name)


def table() -> int:
    """The address of the table of C functions through which a shim uses these stores."""
    return _native.embedding_table()


class Store:
    """A table from keys to rows; two `Store`s of one name are the same table.

    Shapes: keys int64 [...]; values and gradients float32 [..., dim]. Every method may be called
    from any thread. What is refused (UsageError, ValueError) has changed nothing.
    """

    def __init__(self, name: str, options: Options | dict[str, Any]) -> None:
        """Make the store, or find it: one of that name with other options is refused."""
        chosen = options if isinstance(options, Options) else Options.from_dict(options)
        self._open(name, chosen.to_json())

    def _open(self, name: str, options: str | None) -> None:
        self.name = name
        self._native = _native.EmbeddingStore.open(name, options)
        self.options = Options.from_json(self._native.options())
        self.dim = self.options.dim

    @classmethod
    def find(cls, name: str) -> Store:
        """The store of this name. Raises KeyError, with the names that there are."""
        found = cls.__new__(cls)
        found._open(name, None)
        return found

    def __len__(self) -> int:
        return self._native.size()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Store({self.name!r}, dim={self.dim}, rows={len(self)})"

    @property
    def step(self) -> int:
        """The last step that was applied; 0 before the first."""
        return int(self.stats()["step"])

    def _values(self, keys: Any, out: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = _array(keys, "keys", np.int64)
        return ids, _output(out, (*ids.shape, self.dim), np.float32, "out")

    @staticmethod
    def _like(keys: Any, out: Any, array: np.ndarray) -> Any:
        if out is not None:
            return out
        return sys.modules["torch"].from_numpy(array) if _is_torch(keys) else array

    def lookup(self, keys: Any, step: int, out: Any = None) -> Any:
        """The values of `keys` [..., dim], for training: keys that are new get rows.

        A key that admission does not let in gives its initial values, or zeros (`missing`).
        """
        ids, values = self._values(keys, out)
        self._native.lookup(ids.ctypes.data, ids.size, _step(step), values.ctypes.data, values.size)
        return self._like(keys, out, values)

    def lookup_infer(self, keys: Any, out: Any = None, found: Any = None) -> Any:
        """The values of `keys`, with nothing changed. `found` (uint8) says which have rows."""
        ids, values = self._values(keys, out)
        flags = 0
        if found is not None:
            flags = _output(found, ids.shape, np.uint8, "found").ctypes.data
        self._native.lookup_infer(ids.ctypes.data, ids.size, values.ctypes.data, values.size, flags)
        return self._like(keys, out, values)

    def apply(self, keys: Any, gradients: Any, step: int, lr: float | None = None) -> None:
        """One optimizer step. Gradients of equal keys are added up first, in their order.

        Raises ValueError where a gradient is not finite, with nothing changed.
        """
        ids, values = self._pair(keys, gradients, "gradients")
        self._native.apply(
            ids.ctypes.data, ids.size, values.ctypes.data, values.size, _step(step), lr
        )

    def upsert(self, keys: Any, values: Any, step: int = 0) -> None:
        """Set values; of equal keys the last count. Slots of rows that were there stay."""
        ids, array = self._pair(keys, values, "values")
        self._native.upsert(ids.ctypes.data, ids.size, array.ctypes.data, array.size, _step(step))

    def _pair(self, keys: Any, values: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        ids = _array(keys, "keys", np.int64)
        array = _array(values, what, np.float32)
        if array.shape != (*ids.shape, self.dim) and array.size + ids.size > 0:
            raise UsageError(
                f"{what} have shape {list(array.shape)}, keys {list(ids.shape)}",
                f"pass {what} of shape {[*ids.shape, self.dim]}: dim is {self.dim}",
            )
        return ids, array

    def is_(self, other: Store) -> bool:
        """Whether both are one table: after `forget` a name may stand for a new one."""
        return self._native.same(other._native)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys without a row that admission has counted, and how often each came, int64 [n]."""
        keys, counts = self._native.counts()
        return np.frombuffer(keys, np.int64), np.frombuffer(counts, np.uint32).astype(np.int64)

    def set_counts(self, keys: Any, counts: Any) -> None:
        """Put counts of `counts()` back; 0 forgets a key. Nothing where no key is counted."""
        ids = _array(keys, "keys", np.int64).reshape(-1)
        each = _array(counts, "counts", np.int64).reshape(-1)
        if each.size != ids.size or (each < 0).any() or (each >= _STEPS).any():
            raise UsageError("counts do not fit", f"pass {ids.size} numbers below {_STEPS}")
        short = each.astype(np.uint32)
        self._native.set_counts(ids.ctypes.data, short.ctypes.data, ids.size)

    def counters(self) -> bytes:
        """The counters of admission by a Bloom filter; empty without one."""
        return self._native.counters()

    def raise_counters(self, counters: bytes) -> None:
        """What either has counted is counted: `counters` are those of a store of these options."""
        self._native.raise_counters(counters)

    def remove(self, keys: Any) -> int:
        """Take rows away; how many there were."""
        ids = _array(keys, "keys", np.int64)
        return self._native.remove(ids.ctypes.data, ids.size)

    def clear(self) -> None:
        """Take all rows away; steps and counts of admission start anew."""
        self._native.clear()

    def evict(self, step: int | None = None) -> int:
        """Take away what the eviction policy names as of `step` (the last one); how many rows."""
        return self._native.evict(self.step if step is None else _step(step))

    def intern(self, strings: Sequence[str | bytes], insert: bool = True) -> np.ndarray:
        """A number for each string, int64 [n]: never one number for two strings.

        Without `insert` a string that is not known gets a number that has no row.
        """
        out = np.empty(len(strings), np.int64)
        encoded = [s.encode() if isinstance(s, str) else bytes(s) for s in strings]
        self._native.intern(encoded, insert, out.ctypes.data)
        return out

    def name_of(self, key: int) -> bytes | None:
        """The string of a number that `intern` gave."""
        return self._native.name(int(key))

    def meta(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Frequencies and versions (steps of the last update), int64 [n]; -1 without a row."""
        ids = _array(keys, "keys", np.int64)
        frequencies, versions = np.empty(ids.shape, np.uint32), np.empty(ids.shape, np.uint32)
        self._native.meta(ids.ctypes.data, ids.size, frequencies.ctypes.data, versions.ctypes.data)
        gone = (frequencies == _MISSING) & (versions == _MISSING)
        return (
            np.where(gone, -1, frequencies.astype(np.int64)),
            np.where(gone, -1, versions.astype(np.int64)),
        )

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Another optimizer: other numbers of the same kind count from the next step on.

        Another kind is refused once a step was done; before, it takes its place.
        """
        self._native.set_optimizer(json.dumps(optimizer.to_dict()))
        self.options = Options.from_json(self._native.options())

    @property
    def frozen(self) -> bool:
        """Whether lookups insert nothing and changes are refused; deltas may still be read."""
        return self._native.frozen()

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._native.freeze(frozen)

    def snapshot(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Write all rows to `folder/full-N.evs`, as of one instant, while training goes on.

        The file is whole or not there; the full snapshot before it and its deltas stay. Gives path,
        rows, bytes, step and id.
        """
        return self._file("snapshot", folder)

    def delta(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Write what changed since the last file of `folder` to `folder/delta-N.evs`.

        Where that file is not this store's last snapshot or delta, or more rows went than are left,
        all rows go to `folder/full-N.evs`: what is read from the folder is right in any case.
        """
        return self._file("delta", folder)

    def save(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Write all rows to one file; one that is there is replaced once the new one is whole.

        The next delta is what it would have been without it.
        """
        return self._file("save", path)

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Replace all rows by those of a file or folder: its last snapshot and the deltas after it.

        Raises KeyError without a snapshot, RuntimeError where a file is not whole (it names the
        place), ValueError where dim, dtype, keys or optimizer differ; with nothing changed.
        """
        found = self._file("restore", path)
        self._tell()
        return found

    def apply_delta(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take a delta in, while lookups go on: each row is the old or the new one.

        Raises ValueError where it does not follow what the store has, with nothing changed.
        """
        return self._file("apply_delta", path)

    def _file(self, call: str, path: str | os.PathLike[str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._native.file(call, os.fspath(path)))
        return found

    def save_bytes(self) -> bytes:
        """All rows, as `save` writes them."""
        return self._native.save_bytes()

    def restore_bytes(self, data: bytes) -> None:
        """As `restore`, from what `save_bytes` gave."""
        self._native.restore_bytes(data)
        self._tell()

    def _tell(self) -> None:
        for tell in RESTORED:
            tell(self.name)

    @property
    def slots(self) -> int:
        """Float32 values that the optimizer keeps for a row, beside its own."""
        return _native.embedding_slots(self.options.to_json())

    def take_rows(
        self, keys: Any, step: int, out: Any = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Whole rows, for whoever keeps them for a while (a cache on a GPU).

        Gives rows float32 [n, dim + slots], values (widened) and then slots; frequencies and
        versions int64 [n]; admitted uint8 [n]. Keys without a row get one as in `lookup`. `out` is
        room for the rows, such as pinned memory.
        """
        ids = _array(keys, "keys", np.int64).reshape(-1)
        rows = _output(out, (ids.size, self.dim + self.slots), np.float32, "out")
        frequencies, versions = np.empty(ids.size, np.uint32), np.empty(ids.size, np.uint32)
        admitted = np.empty(ids.size, np.uint8)
        self._native.take_rows(
            ids.ctypes.data,
            ids.size,
            _step(step),
            rows.ctypes.data,
            rows.size,
            frequencies.ctypes.data,
            versions.ctypes.data,
            admitted.ctypes.data,
        )
        return rows, frequencies.astype(np.int64), versions.astype(np.int64), admitted

    def put_rows(self, keys: Any, rows: Any, frequencies: Any, versions: Any) -> None:
        """Write whole rows as `take_rows` gave them; rows that are not there are made."""
        ids = _array(keys, "keys", np.int64).reshape(-1)
        array = _array(rows, "rows", np.float32)
        width = self.dim + self.slots
        if array.shape != (ids.size, width):
            raise UsageError(f"rows have shape {list(array.shape)}", f"pass [{ids.size}, {width}]")
        counts = []
        for what, each in (("frequencies", frequencies), ("versions", versions)):
            count = _array(each, what, np.int64).reshape(-1)
            if count.size != ids.size or (count < 0).any() or (count >= _STEPS).any():
                raise UsageError(f"{what} do not fit", f"pass {ids.size} numbers below {_STEPS}")
            counts.append(count.astype(np.uint32))
        self._native.put_rows(
            ids.ctypes.data,
            ids.size,
            array.ctypes.data,
            array.size,
            counts[0].ctypes.data,
            counts[1].ctypes.data,
        )

    def export_rows(self, chunk: int = 65_536) -> Iterator[Rows]:
        """Every row once, values and slots: `values` [n, dim + slots], n at most `chunk`.

        Each shard is read at one instant. While others insert or remove, rows of shards that were
        not read yet may come or go; `snapshot` is of one instant.
        """
        width = self.dim + self.slots
        for shard in range(self.options.shards):
            keys, rows, frequencies, versions = self._native.export_shard(shard)
            whole = Rows(
                np.frombuffer(keys, np.int64),
                np.frombuffer(rows, np.float32).reshape(-1, width),
                np.frombuffer(frequencies, np.uint32).astype(np.int64),
                np.frombuffer(versions, np.uint32).astype(np.int64),
            )
            for start in range(0, len(whole.keys), chunk):
                yield Rows(*(part[start : start + chunk] for part in whole))

    def export(self, chunk: int = 65_536) -> Iterator[Rows]:
        """As `export_rows`, without slots: `values` [n, dim]."""
        for rows in self.export_rows(chunk):
            yield rows._replace(values=np.ascontiguousarray(rows.values[:, : self.dim]))

    def stats(self) -> dict[str, Any]:
        """Sizes and counts: rows, bytes, lookups, hit_rate, inserted, evicted and more."""
        found: dict[str, Any] = json.loads(self._native.stats())
        return found
