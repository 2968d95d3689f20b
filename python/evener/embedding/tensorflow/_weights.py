"""A table as a weight of Keras: `get_weights`, `set_weights`, callbacks that keep the best.

Keras' `get_weights` calls `numpy()` of each variable, and `set_weights` calls `assign` with what
that gave. For a table the value is an array of zeros that carries the rows. As in Keras it is the
weights alone: slots of the optimizer stay.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.embedding.tensorflow._variable import DynamicVariable, table_of
from evener.errors import UsageError

_Variable: Any = keras.Variable


class Rows(np.ndarray):
    """Zeros of shape [dim] with the content of a table: `keys` [n] (strings for a table of strings)
    and `rows` [n, dim]. Copies and pickles keep it; what is computed from it is a plain array."""

    keys: Any
    rows: Any

    def __new__(cls, dim: int, keys: Any, rows: np.ndarray) -> Rows:
        made = np.zeros(dim, np.float32).view(cls)
        made.keys, made.rows = keys, rows
        return made

    def __array_finalize__(self, of: Any) -> None:
        whole = of is not None and getattr(of, "shape", None) == self.shape
        self.keys = getattr(of, "keys", None) if whole else None
        self.rows = getattr(of, "rows", None) if whole else None

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(x).view(np.ndarray) if isinstance(x, Rows) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __reduce__(self) -> Any:
        return Rows, (len(self), self.keys, self.rows)

    def __deepcopy__(self, memo: Any) -> Rows:
        return Rows(len(self), self.keys, self.rows)  # nobody writes to them


class Anchor(_Variable):
    """The anchor of a table in a Keras layer; its value is the table's content."""

    def numpy(self) -> Any:
        """Return zeros that carry the table's rows as they are now."""
        table = table_of(self)
        return super().numpy() if table is None else rows_of(table)

    def assign(self, value: Any) -> Any:
        """Set the table's rows to those that `value` carries.

        Raises UsageError for a value that carries none, or rows of another kind.
        """
        table = table_of(self)
        if table is None:
            return super().assign(value)
        if not isinstance(value, Rows) or value.rows is None:
            raise UsageError(
                f"the weights that are set hold no rows of embedding {table.name!r}",
                "give what get_weights() gave, not computed with; or use save_weights() and "
                "load_weights(), which hold rows",
            )
        set_rows(table, value)
        return value


def rows_of(table: DynamicVariable) -> Rows:
    """Return the content of `table` as it is now."""
    exported = [tensor.numpy() for tensor in table.export()]
    keys: Any = exported[0]
    if not table._int_keys:
        # One part knows all strings. A string that no lookup has added has a number alone.
        names = [(table.stores[0].name_of(int(key)), int(key)) for key in keys]
        keys = [key if name is None else name for name, key in names]
    return Rows(table.dim, keys, exported[1].astype(np.float32))


def set_rows(table: DynamicVariable, found: Rows) -> None:
    """Make the content of `table` what `found` carries.

    Slots of rows that stay are kept. A filter counts the keys of rows that go from 0 again.
    """
    strings = isinstance(found.keys, list)
    if strings is table._int_keys or found.rows.shape[-1] != table.dim:
        raise UsageError(
            f"the weights that are set hold rows of dim {found.rows.shape[-1]} and "
            f"{'string' if strings else 'int'} keys; embedding {table.name!r} has dim {table.dim} "
            f"and {table.key_dtype.name} keys",
            "set the weights of a model with the same layers",
        )
    keys = found.keys
    if strings:
        names = tf.constant([key for key in keys if isinstance(key, bytes)], tf.string)
        numbers = iter(table.keys(names, True).numpy())
        keys = [next(numbers) if isinstance(key, bytes) else key for key in keys]
    keys = np.asarray(keys, np.int64)
    there = table.export()[0].numpy()
    gone = there[~np.isin(there, keys)]
    if len(gone):
        table._each(tf.constant(gone), "evener_embedding_remove")
    if len(keys):
        table._each(tf.constant(keys), "evener_embedding_upsert", tf.constant(found.rows))
