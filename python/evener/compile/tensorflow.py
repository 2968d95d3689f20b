"""Shape buckets for tf.function(jit_compile=True).

    from evener.compile.tensorflow import bucketed, keep
    keep()  # before TensorFlow computes anything: what XLA compiles is kept for the next process
    step = bucketed(step, mask="weights")

The function's tensors are padded along one dimension by repeating their last row, and what it gives
is cut back. A whole training step takes the mean over a batch, so it needs `mask=`: an argument
that is 1 for real rows and 0 for padding.

Before a compiled form is used, the function runs with few rows, with much padding, and with the
same rows before other padding (`independence`). A function whose rows depend on each other is left
as it is. So is one that draws random numbers, where none of that can be compared, and one that acts
outside of TensorFlow (tables, files, collectives). A function that assigns variables is compiled in
the call, because a second run in a thread would count; the check then puts all variables back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager import record as tape_record
from tensorflow.python.framework import op_def_registry, ops

from evener.base.given import given
from evener.base.log import logger
from evener.compile import branches, independence, store
from evener.compile.code import digest
from evener.compile.driver import Bucketed, WrongError
from evener.compile.independence import Filling
from evener.compile.policy import Options
from evener.errors import UsageError

# How many functions of a name and code this process has made.
_made_before: Counter[str] = Counter()
_PLAIN = (bool, int, float, str, type(None))
_TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2}
# Ops with a state that is a variable's, or that is none: by the beginning of their names.
_ASSIGNS = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStrided")
_READS = (
    "ReadVariable", "VarHandle", "VarIsInitialized", "VariableShape", "ResourceGather",
    "Placeholder", "PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case", "Assert",
    "NoOp", "DisableCopyOnRead",
)  # fmt: skip
_RANDOM = ("Random", "TruncatedNormal", "ParameterizedTruncated", "Multinomial", "StatefulRandom",
           "StatefulStandardNormal", "StatefulTruncated", "StatefulUniform", "RngReadAndSkip",
           "RngSkip", "StatelessRandomGetKeyCounter")  # fmt: skip


@given
def bucketed(
    function: Callable[..., Any],
    *,
    dim: int = 0,
    mask: str = "",
    name: str = "",
    options: Options | None = None,
    record: bool = True,
) -> Function:
    """A function that is compiled by XLA per bucket of sizes.

    function: a Python function of tensors, or a tf.function, whose Python function is taken. dim:
    the dimension that varies; each tensor that has there as much as the first one is padded. mask:
    the name of an argument that gets a float32 tensor [edge], 1 for real rows and 0 for padding
    (without padding all 1). name: of the record. record: whether shapes, and what XLA compiled, are
    kept for the next process.

    Raises UsageError for what cannot be called.
    """
    function = getattr(function, "python_function", function)
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called", "give a function of tensors")
    name = name or getattr(function, "__qualname__", type(function).__name__)
    return Function(function, dim, mask, name, options or Options(), record)


def keep() -> bool:
    """Let XLA keep what it compiles in EVENER_COMPILE_DIR, and take it from there.

    TensorFlow reads that option once, before it computes anything. `bucketed` calls this too, which
    is too late in a program that has made tensors by then. Gives whether it is kept; a warning says
    why not.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "")
    if "persistent_cache_directory" in flags:
        return True
    if getattr(context.context(), "_initialized", False):
        logger.warning(
            "compile: XLA keeps nothing for the next process: TensorFlow has started already; call "
            "evener.compile.tensorflow.keep() before it makes a tensor"
        )
        return False
    place = store.folder() / "xla"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compile: no cache in %s: %s", place, error)
        return False
    more = f"--tf_xla_persistent_cache_directory={place} --tf_xla_persistent_cache_prefix=evener"
    os.environ["TF_XLA_FLAGS"] = f"{flags} {more}".strip()
    return True


@dataclass
class _Call:
    leaves: list[Any]
    structure: Any
    padded: list[int]  # which leaves
    taped: bool = False  # a gradient tape records
    key: Hashable = None  # of the signature


class Function(Bucketed[_Call]):
    """What `bucketed` gives."""

    def __init__(
        self,
        function: Callable[..., Any],
        dim: int,
        mask: str,
        name: str,
        options: Options,
        record: bool,
    ) -> None:
        super().__init__(name, f"tensorflow {tf.__version__}", options, record)
        if record:
            keep()
        self._dim, self._mask = dim, mask
        # XLA's cache of a process takes functions of one name for the same, also after one is gone.
        # Names go by the code, so that the next process finds what this one compiled, whatever
        # order it makes functions in. Of one code there may be several, with other tensors: they
        # are numbered. Files of XLA's cache hold the program, so a wrong number finds nothing.
        code = f"{name} {digest(function, None, tf.__version__)}"
        self._code = f"{code} {_made_before[code]}"
        _made_before[code] += 1
        self._whole = tf.function(function, reduce_retracing=True)
        self._made = tf.function(function, jit_compile=True)
        self._exact = tf.function(function)
        self._reads_size = False  # it wants the number of rows while it is traced
        # For each signature and edge: which outputs are cut.
        self._cut: dict[tuple[Hashable, int], list[bool]] = {}
        self._kind = ""  # pure, assigns, random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [
            tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, tf.Variable)) else x
            for x in tf.nest.flatten((args, kwargs))
        ]
        dim = self._dim
        if not tf.executing_eagerly():
            why = "it is traced by another tf.function, and compiled as a part of that alone"
            self._say(why, once=why)
            return self._plain(_Call(leaves, (args, kwargs), []))
        sizes = [x.shape[dim] for x in leaves if tf.is_tensor(x) and x.shape.rank > dim]
        size = sizes[0] if sizes else 0
        if not size:
            if not sizes:
                why = f"it runs as it is: no argument is a tensor with a dimension {dim}"
                self._say(why, once=why)
            return self._plain(_Call(leaves, (args, kwargs), []))
        padded = [
            i
            for i, x in enumerate(leaves)
            if tf.is_tensor(x) and x.shape.rank > dim and x.shape[dim] == size
        ]
        taped = bool(tape_record.could_possibly_record())
        call = _Call(leaves, (args, kwargs), padded, taped)
        call.key = self._key(call)
        return self._run(call, int(size), call.key, lambda: self._signature(call))

    def _key(self, call: _Call) -> Hashable:
        """As `_signature`, without making a text."""
        parts: list[Any] = [call.taped, tuple(call.padded)]
        for i, x in enumerate(call.leaves):
            if tf.is_tensor(x):
                shape = x.shape.as_list()
                if i in call.padded:
                    shape[self._dim] = -1
                parts.append((x.dtype, *shape))
            else:
                parts.append(x if isinstance(x, _PLAIN) else repr(x)[:40])
                parts.append(type(x))  # 1, 1.0 and True are equal
        return tuple(parts)

    def _signature(self, call: _Call) -> str:
        parts = []
        for i, x in enumerate(call.leaves):
            if tf.is_tensor(x):
                shape = ["n" if i in call.padded and j == self._dim else s
                         for j, s in enumerate(x.shape)]  # fmt: skip
                parts.append(f"{x.dtype.name}[{','.join(map(str, shape))}]")
            else:
                parts.append(repr(x)[:40])
        return "; ".join(parts + ["tape"] * call.taped)

    # --- calls ---

    def _call(
        self, function: Any, leaves: list[Any], structure: Any, weights: tf.Tensor | None
    ) -> Any:
        args, kwargs = tf.nest.pack_sequence_as(structure, leaves)
        if self._mask:
            if weights is None:
                first = next(x for x in leaves if tf.is_tensor(x))
                weights = tf.ones([tf.shape(first)[self._dim]])
            kwargs = {**kwargs, self._mask: weights}
        return function(*args, **kwargs)

    def _plain(self, call: _Call) -> Any:
        if not self._reads_size:
            try:
                return self._call(self._whole, call.leaves, call.structure, None)
            except (TypeError, ValueError):
                # For other sizes it is traced with an unknown one. A function that wants a number
                # is traced for each; what is wrong with it otherwise shows again.
                found = self._call(self._exact, call.leaves, call.structure, None)
                self._reads_size = True
                return found
        return self._call(self._exact, call.leaves, call.structure, None)

    def _fill(
        self, call: _Call, size: int, edge: int, filling: Filling | None = None
    ) -> tuple[list[Any], tf.Tensor | None]:
        """The inputs, padded with `filling` (None: the last row), and the mask."""
        leaves = list(call.leaves)
        if size < edge:
            for i in call.padded:
                leaves[i] = tf.concat([leaves[i], self._padding(leaves[i], size, edge, filling)],
                                      self._dim)  # fmt: skip
        weights = tf.concat([tf.ones([size]), tf.zeros([edge - size])], 0) if self._mask else None
        return leaves, weights

    def _padding(self, x: tf.Tensor, size: int, edge: int, filling: Filling | None) -> tf.Tensor:
        if filling is None:
            return tf.gather(x, [size - 1] * (edge - size), axis=self._dim)
        more = tf.gather(x, filling.rows, axis=self._dim)
        if filling.wild and x.dtype.is_floating:
            more = more * tf.cast(filling.factor, x.dtype)
            more += tf.cast(filling.shift, x.dtype) * (tf.reduce_max(tf.abs(x)) + 1)
        return more

    def _padded(self, call: _Call, size: int, edge: int, filling: Filling | None = None) -> Any:
        """What the compiled form gives for the padded inputs, not cut."""
        leaves, weights = self._fill(call, size, edge, filling)
        return self._call(self._made, leaves, call.structure, weights)

    def _compiled(self, call: _Call, size: int, edge: int) -> Any:
        found = self._padded(call, size, edge)
        leaves = [
            self._short(x, size) if cut else x
            for x, cut in zip(tf.nest.flatten(found), self._cut[call.key, edge], strict=True)
        ]
        return tf.nest.pack_sequence_as(found, leaves)

    def _short(self, x: tf.Tensor, size: int) -> tf.Tensor:
        part = [slice(None)] * self._dim + [slice(0, size)]
        return x[tuple(part)]

    # --- compiling ---

    def _traced(self, call: _Call, size: int, edge: int) -> Any:
        """The compiled form for `edge`, traced: the same trace that a call takes."""
        leaves, weights = self._fill(call, size, edge)
        with _same_names(f"{self._code} {self._signature(call)} {edge}"):
            return self._call(self._made.get_concrete_function, leaves, call.structure, weights)

    def _quiet(self, call: _Call, size: int, edge: int) -> bool:
        if not self._kind:
            self._kind = kind_of(self._traced(call, size, edge).graph.as_graph_def())
        return self._kind == "pure"

    def _some(self, call: _Call, rows: range) -> _Call:
        """The call with these of its rows."""
        leaves = list(call.leaves)
        for i in call.padded:
            leaves[i] = tf.gather(leaves[i], list(rows), axis=self._dim)
        return _Call(leaves, call.structure, call.padded, call.taped, call.key)

    def _prepare(
        self, call: _Call, size: int, edge: int, known: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._quiet(call, size, edge)
        if self._kind == "random":
            raise WrongError("it draws random numbers: it cannot be compared with itself")
        if self._kind not in ("pure", "assigns"):
            raise WrongError(f"the op {self._kind} acts outside of TensorFlow's variables")
        if edge < 2:
            raise WrongError("there is nothing to pad")
        most = min(size, edge - 1)  # at least one padded row
        short = self._some(call, range(most))
        concrete = self._traced(short, most, edge)
        graph = concrete.graph.as_graph_def()
        branch = branches.on_values(graph, self._inputs(concrete, edge))
        if branch:
            raise WrongError(
                f"{branch} branches on values of its rows, and padding may take the other branch: "
                "use tf.where for each row"
            )
        code = hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()
        variables = [v for v in concrete.variables if v.dtype not in (tf.resource, tf.variant)]
        watched = list(concrete.trainable_variables)
        before = [tf.identity(v) for v in variables] if self._kind != "pure" else []
        try:
            with _same_names(f"{self._code} {self._signature(call)} {edge} run"):
                if (
                    known is not None
                    and known["code"] == code
                    and known.get("proof") == independence.PROOF
                ):
                    found = self._taped(lambda: self._padded(short, most, edge), watched, short, 0)
                    cut = known["cut"] if len(known["cut"]) == len(found[0]) else []
                else:
                    cut = []
                cut = cut or self._check(call, size, edge, watched, variables, before)
        finally:
            _put(variables, before)
        self._cut[call.key, edge] = cut
        return {"code": code, "cut": cut, "proof": independence.PROOF}

    def _inputs(self, concrete: Any, edge: int) -> list[str]:
        """The nodes of the graph that stand for padded inputs."""
        own = concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]
        return [x.op.name for x in own if x.shape.rank > self._dim and x.shape[self._dim] == edge]

    def _check(
        self,
        call: _Call,
        size: int,
        edge: int,
        watched: list[Any],
        variables: list[Any],
        before: list[Any],
    ) -> list[bool]:
        """Which outputs are cut. Raises WrongError where a real row depends on the padding."""
        cut: list[bool] | None = None
        for number, rows in enumerate(independence.samples(size, edge)):
            n, short = len(rows), self._some(call, rows)
            _put(variables, before)
            try:
                plain, right = self._taped(lambda: self._plain(short), watched, short, None)  # noqa: B023
            except Exception:
                if number == 0:
                    raise
                continue  # fewer rows than it works with
            if self._reads_size:
                raise WrongError("it reads the number of rows while it is traced")
            changed = [tf.identity(v) for v in variables] if before else []
            first: list[Any] = []
            for filling in independence.fillings(n, edge - n, bool(self._mask)):
                if number and first:
                    break  # once is enough: the padding is most of that batch
                if filling.wild and not _finite(short.leaves):
                    continue
                _put(variables, before)
                try:
                    made, second = self._taped(
                        lambda: self._padded(short, n, edge, filling),  # noqa: B023
                        watched, short, None if filling.wild else n,
                    )  # fmt: skip
                except tf.errors.OpError:
                    if filling.wild:
                        continue  # numbers outside of its domain
                    raise
                now = self._cuts(plain, made, n, edge)
                if cut is not None and now != cut:
                    raise WrongError("which outputs have a row for each input depends on the size")
                cut = now
                made = [self._short(m, n) if c else m for m, c in zip(made, cut, strict=True)]
                if filling.wild and self._mask and not (_finite(made) or not _finite(plain)):
                    continue  # zero times what is outside of its domain
                if first:
                    self._same(first, made, filling.name)
                else:
                    first = made
                    self._compare("output", plain, made, cut)
                if not filling.wild:
                    self._compare("gradient", right, second, [])
                    now_changed = [tf.identity(v) for v in variables] if before else []
                    self._compare("variable", changed, now_changed, [])
        return cut or []

    def _taped(
        self, run: Callable[[], Any], watched: list[Any], call: _Call, size: int | None
    ) -> tuple[list[Any], list[Any]]:
        """The outputs, and gradients of a weighted sum of them where the program wants some.

        `size`: how many rows are real; None if all are, 0 where no gradients are asked for.
        """
        if not call.taped:
            return tf.nest.flatten(run()), []
        inputs = [call.leaves[i] for i in call.padded if call.leaves[i].dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            found = tf.nest.flatten(run())
            short = found if not size else [
                self._short(x, size) if x.shape.rank > self._dim and x.shape[self._dim] != size
                else x for x in found
            ]  # fmt: skip
            total = sum(
                tf.reduce_sum(
                    tf.cast(x, tf.float32)
                    * tf.reshape(tf.cos(tf.range(tf.size(x), dtype=tf.float32)), tf.shape(x))
                )
                for x in short
                if x.dtype.is_floating
            )
        sources = [*watched, *inputs]
        gradients = tape.gradient(total, sources) if tf.is_tensor(total) else []
        return found, [tf.convert_to_tensor(g) for g in gradients if g is not None]

    def _cuts(self, plain: list[Any], made: list[Any], size: int, edge: int) -> list[bool]:
        cut = []
        for p, m in zip(plain, made, strict=True):
            short = p.shape != m.shape
            if short and (
                p.shape.rank != m.shape.rank
                or [d for d in range(p.shape.rank) if p.shape[d] != m.shape[d]] != [self._dim]
                or m.shape[self._dim] != edge
                or p.shape[self._dim] != size
            ):
                raise WrongError(
                    f"an output has the shape {m.shape} with padding and {p.shape} without: "
                    f"it cannot be cut in dimension {self._dim}"
                )
            cut.append(short)
        return cut

    def _depends(self, what: str, how: str) -> WrongError:
        return WrongError(
            f"{what} depends on the padding, {how}"
            + ("" if self._mask else "; give mask= where rows are not computed one by one")
        )

    def _compare(
        self, what: str, plain: Iterable[Any], made: Iterable[Any], cut: list[bool]
    ) -> None:
        for index, (p, m) in enumerate(zip(plain, made, strict=True)):
            a, b = p.numpy(), m.numpy()
            if not p.dtype.is_floating:
                far = 0.0 if np.array_equal(a, b) else float("inf")
            else:
                far = independence.apart(a, b, self._dim if cut and cut[index] else None)
            if p.dtype != m.dtype or far > _TOLERANCE.get(p.dtype.name, 2e-3):
                raise self._depends(f"{what} {index}", f"by {far:.2g} of its norm")

    def _same(self, first: list[Any], made: list[Any], filling: str) -> None:
        for index, (p, m) in enumerate(zip(first, made, strict=True)):
            if not independence.same_bits(p.numpy(), m.numpy()):
                raise self._depends(f"output {index}", f"where that is {filling}")


def _finite(leaves: list[Any]) -> bool:
    return all(
        bool(tf.reduce_all(tf.math.is_finite(x)))
        for x in leaves
        if tf.is_tensor(x) and x.dtype.is_floating
    )


@contextlib.contextmanager
def _same_names(key: str) -> Iterator[None]:
    """Functions that are traced here have the same names in every process.

    TensorFlow puts a number that counts up into each name, and XLA's cache looks for the name. So
    the next process would find nothing. Here the numbers begin at one that follows from `key`.
    """
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:5], "little")
    numbers = itertools.count(1_000_000 * (1 + start))
    before = ops.uid
    ops.uid = lambda: next(numbers)
    try:
        yield
    finally:
        ops.uid = before


def _put(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=False):
        variable.assign(value)


def kind_of(graph: Any) -> str:
    """pure, assigns, random, or the name of an op whose doing cannot be undone."""
    nodes = list(graph.node) + [node for f in graph.library.function for node in f.node_def]
    kind = "pure"
    for op in {node.op for node in nodes}:
        known = op_def_registry.get(op)
        if known is None or not known.is_stateful:
            continue
        if op.startswith(_RANDOM):
            kind = "random"
        elif op.startswith(_ASSIGNS):
            kind = "assigns" if kind == "pure" else kind
        elif not op.startswith(_READS):
            return str(op)
    return kind
