"""`DynamicVariable`: a table of rows that grows, where a program had a dense `tf.Variable`.

The rows are in the store of Evener, under the variable's name. What TensorFlow sees of it is its
*anchor*: a trainable variable of shape [dim] that stays zero. Each lookup takes it as an input, and
the gradient of a lookup goes to it as `tf.IndexedSlices` of (keys, gradients). So everything that
works on gradients works here too: tapes, `tf.gradients`, clipping, accumulation, loss scales that
skip a step. `DynamicEmbeddingOptimizer` gives the slices of an anchor to the store instead of the
anchor. Nothing is remembered between lookup and update.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.training.saving import saveable_object

from evener.embedding.tensorflow import _gradients, _library, _sharded, _stores
from evener.embedding.tensorflow._options import EmbeddingVariableOption, initial
from evener.errors import UsageError

_DTYPES = {tf.float32: "f32", tf.float16: "f16", tf.bfloat16: "bf16"}
# Looked up once: a lookup of one id takes 15 us in all.
_eagerly = tf.executing_eagerly
try:
    from tensorflow.python.pywrap_tfe import TFE_Py_TapeSetIsEmpty as _no_tape
    from tensorflow.python.pywrap_tfe import TFE_Py_VariableWatcherVariableAccessed as _used
except ImportError:  # not part of TensorFlow's public names

    def _no_tape() -> bool:
        return False


_INT64 = tf.int64
_COMPOSITE = (tf.SparseTensor, tf.RaggedTensor)
_KEYS = (tf.int64, tf.int32, tf.string)

# What `get_variable` gives again for the same name, outside the graphs of TensorFlow 1.
named: dict[str, DynamicVariable] = {}

_inference = False


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Lookups that are made (or traced) inside add no rows and count nothing."""
    global _inference
    before, _inference = _inference, True
    try:
        yield
    finally:
        _inference = before


class _Part(tf.saved_model.experimental.TrackableResource):
    """One store of a variable: what checkpoints and SavedModels hold of it.

    A resource, because that is what Keras' export looks for; ops find the store by its name.
    """

    def __init__(self, name: str, options: Mapping[str, Any], device: str | None) -> None:
        super().__init__()
        self.name = name
        self.device = device
        self.options = dict(options)
        self.spread = False  # whether other ranks have rows of it too
        self.store = _stores.open_store(name, self.options)
        # What every op of this store takes.
        self.attributes = {"store": name, "options": json.dumps(self.options)}

    def use_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        _stores.use_optimizer(self.store, optimizer)
        self._know(optimizer)

    def _know(self, optimizer: Mapping[str, Any]) -> None:
        self.options["optimizer"] = dict(optimizer)
        self.attributes = {"store": self.name, "options": json.dumps(self.options)}

    def _create_resource(self) -> Any:
        return tf.constant(self.name)

    def _initialize(self) -> None:
        """The content comes with the checkpoint."""

    def _destroy_resource(self) -> None:
        """The store stays in the process until it is closed."""

    def whole(self) -> None:
        """Raise UsageError where this rank has some of the rows alone."""
        if self.spread:
            raise UsageError(
                f"this rank has its own rows of embedding {self.name!r} alone",
                "save and load it on all ranks, with evener.embedding.tensorflow.save and load",
            )

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self.whole()
        with tf.device("CPU:0"):
            saved = _library.ops().evener_embedding_save(**self.attributes)
        return {"snapshot": saved.snapshot, "made_with": saved.made_with}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        self.whole()
        # Traced by tf.saved_model.save, this is what a server runs: there the store only serves.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        with tf.device("CPU:0"):
            done = _library.ops().evener_embedding_restore(
                restored["snapshot"],
                restored["made_with"],
                freeze=isinstance(graph, tf.__internal__.FuncGraph),
                **self.attributes,
            )
        if graph is None:
            # It may have brought its optimizer along.
            self.store = _stores.find(self.name)
            self._know(self.store.options.to_dict()["optimizer"])
        return done


class _V1Saveable(saveable_object.SaveableObject):
    """The same for `tf.compat.v1.train.Saver`."""

    def __init__(self, part: _Part) -> None:
        self.part = part
        saved = part._serialize_to_tensors()
        specs = [
            saveable_object.SaveSpec(tensor, "", f"{part.name}-{what}", dtype=tf.uint8)
            for what, tensor in saved.items()
        ]
        super().__init__(saved["snapshot"].op, specs, part.name)

    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        """The op that replaces the store's content."""
        names = ("snapshot", "made_with")
        return self.part._restore_from_tensors(dict(zip(names, restored_tensors, strict=True)))


class DynamicVariable(tf.__internal__.tracking.AutoTrackable):
    """A table of rows [dim], by int64 or string keys; made by `get_variable`.

    Attributes: `name`, `dim`, `key_dtype`, `value_dtype`, `trainable`, `anchor` (see the module),
    `devices`. With several devices the rows are spread over one store per device by key. `ranks`:
    those over which rows are spread (`_sharded`), None where each has all. Then what is not a
    lookup (`size`, `export`, `remove`, `evict`) is of this rank's own rows.
    """

    def __init__(
        self,
        name: str,
        *,
        dim: int,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        initializer: Any = None,
        seed: int | None = None,
        trainable: bool = True,
        devices: Sequence[str] = (),
        parts: int = 1,
        init_size: int = 0,
        ev_option: EmbeddingVariableOption | None = None,
        optimizer: Mapping[str, Any] | None = None,
        checkpoint: bool = True,
        anchor: Any = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        _library.ops()
        self.ranks = _ranks(name, key_dtype, parts) if shard else None
        self.name = name
        self.dim = int(dim)
        self.key_dtype = tf.as_dtype(key_dtype)
        self.value_dtype = tf.as_dtype(value_dtype)
        self.trainable = trainable
        self.devices = tuple(devices)
        self._int_keys = self.key_dtype != tf.string
        if self.key_dtype not in _KEYS:
            raise UsageError(
                f"key_dtype {self.key_dtype.name} of embedding {name!r} cannot be",
                "use tf.int64, tf.int32 or tf.string",
            )
        if self.value_dtype not in _DTYPES:
            raise UsageError(
                f"value_dtype {self.value_dtype.name} of embedding {name!r} cannot be",
                "use tf.float32, tf.float16 or tf.bfloat16",
            )
        self._whole = self.value_dtype == tf.float32
        option = ev_option or EmbeddingVariableOption()
        init, own_seed = initial(
            option.init_option.initializer if initializer is None else initializer
        )
        if seed is None:
            seed = own_seed if own_seed is not None else zlib.crc32(name.encode())
        self.seed = seed
        options: dict[str, Any] = {
            "dim": self.dim,
            "dtype": _DTYPES[self.value_dtype],
            "keys": "string" if self.key_dtype == tf.string else "int",
            "init": init,
            "seed": seed,
            "reserve": init_size // parts,
            **option.options(),
        }
        self.fixed_optimizer = optimizer is not None
        self.said_rest = False  # that moments decay in a step without a gradient
        self.stepped_by: Any = None  # a weak reference to the optimizer whose slots the rows have
        if optimizer is not None:
            options["optimizer"] = dict(optimizer)
        # A part's name does not depend on what else is in the graph: checkpoints go by it.
        names = [name] if parts == 1 else [f"{name}/part_{index}" for index in range(parts)]
        places = list(devices) if len(devices) == parts else [None] * parts
        self.parts = [
            _Part(part, options, place) for part, place in zip(names, places, strict=True)
        ]
        for part in self.parts:
            part.spread = self.ranks is not None and self.ranks.size > 1
        self.anchor = anchor if anchor is not None else self._make_anchor()
        _set_table(self.anchor, self)
        inner = getattr(self.anchor, "value", None)
        self._watched = inner if isinstance(inner, tf.Variable) else self.anchor
        self._still: Any = None  # what stands for the anchor where no tape records
        self._lookup_op = _library.ops().evener_embedding_lookup
        if checkpoint and graph_of_v1() is not None:
            for part in self.parts:
                graph_of_v1().add_to_collection(
                    tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, _V1Saveable(part)
                )

    def _make_anchor(self) -> Any:
        if graph_of_v1() is None:
            with tf.init_scope():
                return tf.Variable(
                    tf.zeros([self.dim]), trainable=self.trainable, name=f"{self.name}/anchor"
                )
        # variable_scope is not entered again: the name has it already.
        return tf.compat.v1.Variable(
            tf.zeros([self.dim]),
            trainable=self.trainable,
            name=f"{self.name}/anchor",
            use_resource=True,
        )

    # Keys

    def keys(self, ids: Any, insert: bool | None = None) -> Any:
        """`ids` as int64 keys of the store, same shape. UsageError for what cannot be ids."""
        # Compared by identity first: TensorFlow's == of types takes a microsecond.
        if getattr(ids, "dtype", None) is _INT64 and self._int_keys and isinstance(ids, tf.Tensor):
            return ids
        insert = self.adds(insert)
        if isinstance(ids, _COMPOSITE):
            kind = "sparse" if isinstance(ids, tf.SparseTensor) else "ragged"
            raise UsageError(
                f"the ids of embedding {self.name!r} are {kind}",
                "use embedding_lookup_sparse, for ragged ids with ids.to_sparse()",
            )
        try:
            ids = ids if isinstance(ids, tf.Tensor) else tf.convert_to_tensor(ids)
        except ValueError as error:
            raise UsageError(
                f"the ids of embedding {self.name!r} are no tensor: {error}",
                "make all rows of the ids equally long, or use tf.ragged and to_sparse()",
            ) from None
        if ids.dtype == tf.string:
            if self.key_dtype != tf.string:
                raise self._wrong(ids.dtype)
            return self._intern(ids, insert)
        if ids.dtype not in (tf.int64, tf.int32) or self.key_dtype == tf.string:
            raise self._wrong(ids.dtype)
        return ids if ids.dtype == tf.int64 else tf.cast(ids, tf.int64)

    def _wrong(self, found: Any) -> UsageError:
        return UsageError(
            f"the ids of embedding {self.name!r} are {found.name}, its keys are "
            f"{self.key_dtype.name}",
            f"cast them to {self.key_dtype.name}, or make the embedding with key_dtype="
            f"tf.{found.name}"
            if found in _KEYS
            else f"cast them to {self.key_dtype.name}",
        )

    def _intern(self, strings: Any, insert: bool) -> Any:
        # One part knows all strings: which part has a row is decided by the key that it gives.
        with tf.device("CPU:0"):
            return _library.ops().evener_embedding_intern(
                strings, insert=insert, **self.parts[0].attributes
            )

    def _by_part(self, keys: Any) -> tuple[list[Any], list[Any]]:
        """(keys of each part, their positions in the flat keys)."""
        flat = tf.reshape(keys, [-1])
        count = len(self.parts)
        owner = tf.cast(tf.math.floormod(flat, count), tf.int32)
        return (
            tf.dynamic_partition(flat, owner, count),
            tf.dynamic_partition(tf.range(tf.size(flat)), owner, count),
        )

    # Rows

    def lookup(self, ids: Any, *, insert: bool | None = None, name: str | None = None) -> Any:
        """The rows of `ids`: shape of ids, then dim, in `value_dtype`.

        `insert`: whether keys without a row get one, by the table's admission (default: if the
        variable is trainable and not inside `inference()`). Raises UsageError.
        """
        return self.lookup_keys(self.keys(ids, insert), insert=insert, name=name)

    def adds(self, insert: bool | None) -> bool:
        """Whether a lookup adds rows."""
        return self.trainable and not _inference if insert is None else insert

    def lookup_keys(self, keys: Any, *, insert: bool | None = None, name: str | None = None) -> Any:
        """`lookup` of what `keys` made of ids."""
        adds = self.adds(insert)
        if self.ranks is None:
            rows = self.rows_here(keys, adds, name)
        else:
            asked = _sharded.Asked(self, tf.reshape(keys, [-1]), adds)
            flat = _sharded.look([asked])[0]
            rows = tf.reshape(flat, tf.concat([tf.shape(keys), [self.dim]], 0), name=name)
            rows.set_shape(keys.shape.concatenate([self.dim]))
        return rows if self._whole else tf.cast(rows, self.value_dtype)

    def rows_here(self, keys: Any, adds: bool, name: str | None = None) -> Any:
        """float32 rows of this process's stores, whose gradient goes to the anchor."""
        anchor = self._watched
        op = self._lookup_op
        outside = None if _eagerly() else _gradients.outside()
        if outside is not None:
            op = functools.partial(_gradients.lookup_inside, _library.ops(), outside)
        if len(self.parts) == 1:
            part = self.parts[0]
            if part.device is None and _eagerly():
                if _no_tape():
                    # Nobody asks for a gradient: spare the reading of the variable. But
                    # tf.recompute_grad wants to know which variables it will ask gradients of.
                    _used(anchor)
                    if self._still is None:
                        self._still = tf.zeros([self.dim])
                    anchor = self._still
                rows = op(keys, anchor, insert=adds, name=name, **part.attributes)
            else:
                with _on(part):
                    rows = op(keys, anchor, insert=adds, name=name, **part.attributes)
        else:
            shares, places = self._by_part(keys)
            found = []
            for part, share in zip(self.parts, shares, strict=True):
                with _on(part):
                    found.append(op(share, anchor, insert=adds, **part.attributes))
            flat = tf.dynamic_stitch(places, found)
            rows = tf.reshape(flat, tf.concat([tf.shape(keys), [self.dim]], 0), name=name)
            rows.set_shape(keys.shape.concatenate([self.dim]))
        return rows

    def apply_gradients(self, slices: Any, *, learning_rate: Any = -1.0, step: Any = -1) -> Any:
        """One step of the store's optimizer with `slices` (tf.IndexedSlices of keys and gradients).

        Duplicates are summed first. `learning_rate` below 0: the one of the options. `step`: the
        program's count, -1 for one more than the last. Gives the op (None in eager mode).
        InvalidArgumentError, with nothing changed, where a gradient is not finite.
        """
        if not isinstance(slices, tf.IndexedSlices):
            raise UsageError(
                f"the gradient of embedding {self.name!r} is a dense tensor of shape "
                f"{getattr(slices, 'shape', '?')}",
                "take it from tape.gradient or tf.gradients of a lookup, as tf.IndexedSlices",
            )
        gradients = tf.cast(slices.values, tf.float32)
        rate = tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)
        step = tf.cast(tf.convert_to_tensor(step), tf.int64)
        op = _library.ops().evener_embedding_apply
        if len(self.parts) == 1:
            with _on(self.parts[0]):
                return op(slices.indices, gradients, rate, step, **self.parts[0].attributes)
        shares, places = self._by_part(slices.indices)
        done = []
        for part, share, place in zip(self.parts, shares, places, strict=True):
            with _on(part):
                done.append(op(share, tf.gather(gradients, place), rate, step, **part.attributes))
        return None if tf.executing_eagerly() else tf.group(*done)

    def upsert(self, ids: Any, values: Any) -> Any:
        """Sets the rows of `ids` [n] to `values` [n, dim]; the last of equal ids counts."""
        keys = tf.reshape(self.keys(ids, True), [-1])
        values = tf.cast(tf.convert_to_tensor(values), tf.float32)
        return self._each(keys, "evener_embedding_upsert", values)

    def remove(self, ids: Any) -> Any:
        """Removes the rows of `ids`; an int64 scalar: how many there were."""
        keys = tf.reshape(self.keys(ids, False), [-1])
        return self._total(self._each(keys, "evener_embedding_remove"))

    def clear(self) -> Any:
        """Removes all rows."""
        return self._all("evener_embedding_clear")

    def size(self, name: str | None = None) -> Any:
        """How many rows there are, int64 scalar."""
        return self._total(self._all("evener_embedding_size"))

    def export(self, name: str | None = None) -> tuple[Any, Any]:
        """(keys [n], rows [n, dim]), in no order."""
        keys, rows, _, _ = self.export_with_meta()
        return keys, rows

    def export_with_meta(self) -> tuple[Any, Any, Any, Any]:
        """(keys [n], rows [n, dim], frequencies [n], versions [n]): how often and when each row was
        updated."""
        found = self._all("evener_embedding_export")
        found = [found] if len(self.parts) == 1 else found
        keys, rows, frequencies, versions = (
            tf.concat(list(column), 0) for column in zip(*found, strict=True)
        )
        keys.set_shape([None])
        return (
            keys,
            tf.reshape(tf.cast(rows, self.value_dtype), [-1, self.dim]),
            frequencies,
            versions,
        )

    def evict(self, step: Any = -1) -> Any:
        """Evicts by the table's evict option, as of `step` (-1: the last update).

        An int64 scalar: how many rows went.
        """
        step = tf.cast(tf.convert_to_tensor(step), tf.int64)
        op = _library.ops().evener_embedding_evict
        gone = []
        for part in self.parts:
            with _on(part):
                gone.append(op(step, **part.attributes))
        return tf.add_n(gone)

    def save_to_file_system(self, dirpath: str) -> None:
        """Writes each store whole, at one instant, into the folder `dirpath`; made at need.

        Weights, optimizer slots, frequencies, versions. Eager: it acts at once.
        """
        folder = Path(dirpath)
        self._all_here()
        folder.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            _stores.save(part.store, folder)

    def load_from_file_system(self, dirpath: str) -> None:
        """Replaces the content by what `save_to_file_system` wrote, from either framework."""
        self._all_here()
        for part in self.parts:
            _stores.restore(part.store, Path(dirpath))

    def _all_here(self) -> None:
        for part in self.parts:
            part.whole()

    def close(self) -> None:
        """Gives the memory back. The variable and graphs that use it must not run again."""
        if named.get(self.name) is self:
            del named[self.name]
        for part in self.parts:
            _stores.close(part.name)

    # What optimizers need

    def use_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        """Takes `optimizer` (as the store's options) unless `get_variable` was given one."""
        if not self.fixed_optimizer:
            for part in self.parts:
                part.use_optimizer(optimizer)

    @property
    def stores(self) -> list[Any]:
        """The `evener.embedding.Store`s behind it: statistics, deltas, PyTorch."""
        return [part.store for part in self.parts]

    @property
    def shape(self) -> Any:
        """[unknown, dim]."""
        return tf.TensorShape([None, self.dim])

    def __repr__(self) -> str:
        return (
            f"<DynamicVariable {self.name!r} dim={self.dim} keys={self.key_dtype.name} "
            f"values={self.value_dtype.name}>"
        )

    def _all(self, op: str) -> Any:
        done = []
        for part in self.parts:
            with _on(part):
                done.append(getattr(_library.ops(), op)(**part.attributes))
        return done[0] if len(done) == 1 else done

    def _each(self, keys: Any, op: str, values: Any = None) -> Any:
        run = getattr(_library.ops(), op)
        if len(self.parts) == 1:
            with _on(self.parts[0]), tf.control_dependencies(self._own(keys, values)):
                given = [keys] if values is None else [keys, values]
                return run(*given, **self.parts[0].attributes)
        shares, places = self._by_part(keys)
        done = []
        for part, share, place in zip(self.parts, shares, places, strict=True):
            with _on(part):
                given = [share] if values is None else [share, tf.gather(values, place)]
                done.append(run(*given, **part.attributes))
        return done

    def _own(self, keys: Any, values: Any) -> list[Any]:
        """What raises where values are set of rows that other ranks have."""
        if self.ranks is None or values is None:
            return []
        own = tf.reduce_all(tf.equal(self.ranks.owner(keys), self.ranks.rank))
        words = (
            f"embedding {self.name!r}: other ranks own some of these keys; give each rank its own"
        )
        check = tf.debugging.Assert(own, [words])
        return [] if check is None else [check]

    def _total(self, counts: Any) -> Any:
        return tf.add_n(counts) if isinstance(counts, list) else counts


def _on(part: _Part) -> Any:
    """The device of a part: where the program said, else the CPU of wherever the op is put."""
    return tf.device(part.device or "CPU:0")


def _ranks(name: str, key_dtype: Any, parts: int) -> _sharded.Ranks:
    """Those that rows are spread over. Raises UsageError for what cannot be spread."""
    if tf.as_dtype(key_dtype) == tf.string:
        raise UsageError(
            f"embedding {name!r} has string keys, whose numbers each rank makes by itself",
            "hash strings to int64 before: tf.strings.to_hash_bucket_fast(strings, 2**62)",
        )
    if parts > 1 or graph_of_v1() is not None:
        raise UsageError(
            f"embedding {name!r} cannot have shard=True beside devices, partitioners and graphs of "
            "TensorFlow 1",
            "leave them out: each rank is a part",
        )
    return _sharded.Ranks.found(name)


def graph_of_v1() -> Any:
    """The graph of a TensorFlow 1 program, None elsewhere."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return None if isinstance(graph, tf.__internal__.FuncGraph) else graph


_TABLE = "_evener_dynamic_variable"


def _set_table(anchor: Any, table: DynamicVariable) -> None:
    setattr(anchor, _TABLE, table)
    # Keras gives optimizers the tf.Variable inside its own.
    inner = getattr(anchor, "value", None)
    if isinstance(inner, tf.Variable):
        setattr(inner, _TABLE, table)


def table_of(variable: Any) -> DynamicVariable | None:
    """The dynamic variable whose anchor `variable` is, or None."""
    found = getattr(variable, _TABLE, None)
    if found is None:
        inner = getattr(variable, "value", None)
        if isinstance(inner, tf.Variable):
            found = getattr(inner, _TABLE, None)
    return found if isinstance(found, DynamicVariable) else None
