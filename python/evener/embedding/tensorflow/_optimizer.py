"""`DynamicEmbeddingOptimizer`: one of Keras or TensorFlow 1 that steps dynamic embeddings too.

It is the program's own optimizer, of a class made from its class: dense variables go the way they
went. The gradients of anchors (see `_variable`) go to the stores, which do the same kind of step
with slots of their own beside the rows. What the optimizer does to gradients before that (clipping,
loss scales, schedules of the learning rate) it does to these too.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from evener.embedding.tensorflow._variable import table_of
from evener.errors import UsageError

_log = logging.getLogger(__name__)


def DynamicEmbeddingOptimizer(  # noqa: N802
    optimizer: Any, bp_v2: bool = False, synchronous: bool = False
) -> Any:
    """`optimizer`, which from now on trains dynamic embeddings too.

    Takes SGD, Adagrad, Adam, AdamW and Ftrl of Keras 3, LossScaleOptimizer around them, and the
    GradientDescent, Adagrad, Adam and Ftrl optimizers of tf.compat.v1.train. Others, and classes
    with a step of their own, work where each table has `get_variable(optimizer=...)`: the store
    then does that step, with this optimizer's learning rate. `weight_decay` acts on the rows of a
    step. TFRA's `bp_v2` has no effect here.

    Raises UsageError for what is no optimizer, for TFRA's `synchronous` (wrap the optimizer in
    Horovod's for several processes), or where it can do what no store does (momentum,
    amsgrad, weight decay of Adagrad and Ftrl, gradient accumulation, averages of weights).
    """
    del bp_v2  # how TFRA finds gradients
    if synchronous:
        raise UsageError(
            "DynamicEmbeddingOptimizer(synchronous=True) does not reduce gradients",
            "leave it out, and wrap the optimizer: hvd.DistributedOptimizer(optimizer)",
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _derived(optimizer, _V1)
    import keras

    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer of Keras 3 or tf.compat.v1.train",
            "give one, as keras.optimizers.Adam(1e-3)",
        )
    # Keras puts a LossScaleOptimizer around by itself where the policy is mixed_float16.
    keras.optimizers.LossScaleOptimizer.check_finite = _check_finite
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        _derived(inner, _Keras)
        return optimizer
    return _derived(optimizer, _Keras)


def _derived(optimizer: Any, mixin: type) -> Any:
    own = type(optimizer)
    if not issubclass(own, mixin):
        optimizer.__class__ = _class(own, mixin)
    return optimizer


_classes: dict[tuple[Any, Any], Any] = {}


def _class(own: Any, mixin: Any) -> Any:
    """The class of optimizers `own` that train tables too; one for each."""
    if (own, mixin) not in _classes:
        # The same name, as of the module: Keras writes both into saved models.
        made = type(own.__name__, (mixin, own), {"__module__": own.__module__})
        _classes[own, mixin] = made
    return _classes[own, mixin]


def register() -> None:
    """Let Keras save its own optimizers as ones that train tables, and load them so."""
    import keras

    for name, own in vars(keras.optimizers).items():
        if isinstance(own, type) and issubclass(own, keras.optimizers.Optimizer):
            keras.saving.register_keras_serializable("evener", name)(_class(own, _Keras))


def store_optimizer(optimizer: Any, variable: Any = None) -> dict[str, Any] | None:
    """The store's options for the step that `optimizer` does, None where no store does it.

    `variable`: the anchor, which may be excluded from weight decay. Raises UsageError where an
    argument of the optimizer has no match.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        rules, module = _V1_RULES, tf.compat.v1.train
        steps = ["_resource_apply_dense", "_resource_apply_sparse"]
    else:
        import keras

        rules, steps, module = _KERAS_RULES, ["update_step"], keras.optimizers
    for name, options in rules.items():
        known = getattr(module, name)
        # A class derived from a known one may do another step.
        if isinstance(optimizer, known) and all(
            getattr(type(optimizer), step) is getattr(known, step) for step in steps
        ):
            found = options(optimizer)
            return found if rules is _V1_RULES else _decaying(optimizer, variable, found)
    return None


def _decaying(optimizer: Any, variable: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options with Keras' weight decay, which any of its optimizers may have."""
    decay = float(optimizer.weight_decay or 0.0)
    if variable is not None and not optimizer._use_weight_decay(variable):
        decay = 0.0
    if options["kind"] == "adam_w":
        return {**options, "weight_decay": decay}
    if not decay:
        return options
    if options["kind"] == "sgd":
        return {**options, "weight_decay": decay}
    if options["kind"] == "adam":
        return {**options, "kind": "adam_w", "weight_decay": decay}
    raise _refuse(optimizer, "weight_decay", decay)


def _refuse(optimizer: Any, argument: str, value: Any) -> UsageError:
    return UsageError(
        f"no dynamic embedding does the step of {type(optimizer).__name__}({argument}={value!r})",
        f"leave {argument} out, or give the tables a step: get_variable(optimizer={{'kind': ...}})",
    )


def _without(optimizer: Any, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if value:
            raise _refuse(optimizer, argument, value)


def _sgd(o: Any) -> dict[str, Any]:
    _without(o, momentum=o.momentum, nesterov=o.nesterov)
    return {"kind": "sgd"}


def _adagrad(o: Any) -> dict[str, Any]:
    # Keras takes the root of accumulator and epsilon: as if the accumulator had begun with both.
    start = float(o.initial_accumulator_value) + float(o.epsilon)
    return {"kind": "adagrad", "eps": 0.0, "initial_accumulator": start}


def _moments(o: Any) -> dict[str, Any]:
    return {
        "beta1": float(o.beta_1),
        "beta2": float(o.beta_2),
        "eps": float(o.epsilon),
        "eps_hat": True,
    }


def _adam(o: Any) -> dict[str, Any]:
    _without(o, amsgrad=o.amsgrad)
    return {"kind": "adam", **_moments(o)}


def _adamw(o: Any) -> dict[str, Any]:
    _without(o, amsgrad=o.amsgrad)
    return {"kind": "adam_w", **_moments(o)}


def _ftrl(o: Any) -> dict[str, Any]:
    _without(o, l2_shrinkage=o.l2_shrinkage_regularization_strength)
    return {
        "kind": "ftrl",
        "lr_power": float(o.learning_rate_power),
        "initial_accumulator": float(o.initial_accumulator_value),
        "l1": float(o.l1_regularization_strength),
        "l2": float(o.l2_regularization_strength),
        "beta": float(o.beta),
    }


def _v1_adagrad(o: Any) -> dict[str, Any]:
    # TensorFlow 1 divides by sqrt(a) alone.
    start = float(o._initial_accumulator_value)
    return {"kind": "adagrad", "eps": 0.0 if start > 0 else 1e-10, "initial_accumulator": start}


def _v1_adam(o: Any) -> dict[str, Any]:
    return {
        "kind": "adam",
        "beta1": _number(o, "_beta1"),
        "beta2": _number(o, "_beta2"),
        "eps": _number(o, "_epsilon"),
        "eps_hat": True,
    }


def _v1_ftrl(o: Any) -> dict[str, Any]:
    _without(o, l2_shrinkage=o._l2_shrinkage_regularization_strength)
    return {
        "kind": "ftrl",
        "lr_power": float(o._learning_rate_power),
        "initial_accumulator": float(o._initial_accumulator_value),
        "l1": float(o._l1_regularization_strength),
        "l2": float(o._l2_regularization_strength),
    }


def _number(optimizer: Any, attribute: str) -> float:
    value = getattr(optimizer, attribute)
    value = value() if callable(value) else value
    if isinstance(value, int | float):
        return float(value)
    raise _refuse(optimizer, attribute.strip("_"), value)


# By the name of the class, derived ones first.
_KERAS_RULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Ftrl": _ftrl,
}
_V1_RULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "GradientDescentOptimizer": lambda _: {"kind": "sgd"},
    "AdagradOptimizer": _v1_adagrad,
    "AdamOptimizer": _v1_adam,
    "FtrlOptimizer": _v1_ftrl,
}


def _attach(optimizer: Any, variables: list[Any]) -> None:
    """Gives the stores of the anchors the step of `optimizer`, before the first gradient comes."""
    for variable in variables:
        table = table_of(variable)
        if table is None or table.fixed_optimizer:
            continue
        options = store_optimizer(optimizer, variable)
        if options is None:
            raise UsageError(
                f"{type(optimizer).__name__} is not a step that a dynamic embedding does",
                "use SGD, Adagrad, Adam, AdamW or Ftrl, or give each table a step: "
                "get_variable(optimizer={'kind': 'lazy_adam'})",
            )
        table.use_optimizer(options)
        if options["kind"] != "sgd":  # which keeps nothing between steps
            table.stepped_by = weakref.ref(optimizer)


class _Keras:
    """For Keras 3. `_backend_update_step` is where gradients arrive as they will be applied."""

    def build(self, variables: Any) -> None:
        tables = [t for v in variables if (t := table_of(v)) is not None]
        for argument in ("gradient_accumulation_steps", "use_ema"):
            if getattr(self, argument, None) and tables:
                raise UsageError(
                    f"{type(self).__name__}({argument}=...) does not reach dynamic embeddings",
                    f"leave {argument} out",
                )
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if tables and replicas > 1:
            raise UsageError(
                f"embedding {tables[0].name!r} would be stepped by each of {replicas} replicas",
                "leave the strategy of tf.distribute out; for several processes use Horovod",
            )
        _attach(self, variables)
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        # Keras divides by the factor with `/`, which IndexedSlices do not have.
        scale, self.loss_scale_factor = getattr(self, "loss_scale_factor", None), None
        try:
            grads = list(grads)
            if scale is not None:
                grads = [_scaled(gradient, 1.0 / scale) for gradient in grads]
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            variables = trainable_variables or getattr(self, "_trainable_variables", [])
            # A step that a store refuses has changed nothing: neither other tables nor weights.
            with tf.control_dependencies(_finite(grads, variables)):
                return super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            self.loss_scale_factor = scale

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras makes IndexedSlices dense to clip them, and keys reach over all of int64.
        if getattr(self, "clipnorm", None) and self.clipnorm > 0:  # type: ignore[attr-defined]
            return [_each(g, lambda v: tf.clip_by_norm(v, self.clipnorm)) for g in grads]  # type: ignore[attr-defined]
        if getattr(self, "global_clipnorm", None) and self.global_clipnorm > 0:  # type: ignore[attr-defined]
            return tf.clip_by_global_norm(list(grads), self.global_clipnorm)[0]  # type: ignore[attr-defined]
        if getattr(self, "clipvalue", None) and self.clipvalue > 0:  # type: ignore[attr-defined]
            bound = self.clipvalue  # type: ignore[attr-defined]
            return [_each(g, lambda v: tf.clip_by_value(v, -bound, bound)) for g in grads]
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        # The stores decay their rows themselves.
        dense = [variable for variable in variables if table_of(variable) is None]
        super()._apply_weight_decay(dense)  # type: ignore[misc]

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        dense: tuple[list[Any], list[Any]] = ([], [])
        given: dict[int, Any] = {}
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            table = table_of(variable)
            if table is None:
                dense[0].append(gradient)
                dense[1].append(variable)
            elif gradient is not None:
                given[id(table)] = gradient
        for variable in self._trainable_variables:  # type: ignore[attr-defined]
            table = table_of(variable)
            if table is None:
                continue
            _sole(self, table)
            if id(table) not in given:
                _say_rest(self, table)
            # A table without a gradient counts the step too, as the iterations of Keras do.
            table.apply_gradients(
                given.get(id(table), _nothing(table.dim)),
                learning_rate=learning_rate,
                step=tf.convert_to_tensor(self.iterations),  # type: ignore[attr-defined]
            )
        if dense[1]:
            super()._backend_update_step(*dense, learning_rate)  # type: ignore[misc]


def _sole(optimizer: Any, table: Any) -> None:
    """Raises UsageError where another optimizer has taken the table over since."""
    other = table.stepped_by and table.stepped_by()
    if other is not None and other is not optimizer:
        raise UsageError(
            f"two optimizers step embedding {table.name!r}, whose rows have the slots of one",
            "let one optimizer step it, or use SGD for it",
        )


def _say_rest(optimizer: Any, table: Any) -> None:
    """Say once that a step without a gradient differs from Keras' Adam."""
    kind = table.parts[0].options["optimizer"]["kind"]
    if kind == "adam" and not table.said_rest:
        table.said_rest = True
        _log.warning(
            "embedding %r has no gradient in a step of %s: its moments decay, and those of a dense "
            "variable would rest; use AdamW, whose moments rest",
            table.name,
            type(optimizer).__name__,
        )


def _finite(grads: list[Any], variables: list[Any]) -> list[Any]:
    """Ops that raise InvalidArgumentError where a gradient of a table is not finite.

    On all ranks where tables are spread over them. Collective then.
    """
    checks: list[Any] = []
    spread: list[tuple[Any, Any]] = []
    for gradient, variable in zip(grads, variables, strict=False):
        table = table_of(variable)
        if table is None or not isinstance(gradient, tf.IndexedSlices):
            continue
        fine = tf.reduce_all(tf.math.is_finite(gradient.values))
        if table.ranks is None:
            checks.append(tf.debugging.Assert(fine, [_not_finite(table.name)]))
        else:
            spread.append((table, fine))
    if spread:
        fine = spread[0][0].ranks.agree(tf.reduce_all([fine for _, fine in spread]))
        names = ", ".join(table.name for table, _ in spread)
        checks.append(tf.debugging.Assert(fine, [_not_finite(names)]))
    return [check for check in checks if check is not None]


def _not_finite(name: str) -> str:
    return f"embedding {name!r}: a gradient is NaN or infinite: nothing was changed"


def _nothing(dim: int) -> Any:
    return tf.IndexedSlices(tf.zeros([0, dim]), tf.zeros([0], tf.int64))


def _check_finite(self: Any, grads: Any) -> Any:
    """LossScaleOptimizer's: whether a step is finite, by the values of slices; alike on all ranks
    where a table is spread over them."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    fine = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
    tables = [t for v in getattr(self, "_trainable_variables", []) if (t := table_of(v))]
    ranks = next((table.ranks for table in tables if table.ranks is not None), None)
    return fine if ranks is None else ranks.agree(fine)


class _V1:
    """For tf.compat.v1.train."""

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        pairs = list(grads_and_vars)
        sparse = [(g, t) for g, v in pairs if (t := table_of(v)) is not None]
        dense = [(g, v) for g, v in pairs if table_of(v) is None]
        given = [(g, t) for g, t in sparse if g is not None]
        if not given:
            return super().apply_gradients(dense, global_step=global_step, name=name)  # type: ignore[misc]
        _attach(self, [v for g, v in pairs if g is not None and table_of(v) is not None])
        # Read before anything moves it.
        step: Any = -1 if global_step is None else tf.identity(global_step)
        rate = _rate(self)
        done = [
            table.apply_gradients(gradient, learning_rate=rate, step=step)
            for gradient, table in given
        ]
        with tf.control_dependencies([op for op in done if op is not None]):
            if any(gradient is not None for gradient, _ in dense):
                return super().apply_gradients(  # type: ignore[misc]
                    dense, global_step=global_step, name=name
                )
            if global_step is not None:
                return tf.compat.v1.assign_add(global_step, 1)
            return tf.no_op(name=name)


def _rate(optimizer: Any) -> Any:
    for attribute in ("_learning_rate", "_lr"):
        value = getattr(optimizer, attribute, None)
        if value is not None:
            return tf.cast(tf.convert_to_tensor(value() if callable(value) else value), tf.float32)
    return -1.0


def _each(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """A gradient, or the values of IndexedSlices, changed."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def _scaled(gradient: Any, factor: float) -> Any:
    return _each(gradient, lambda values: values * tf.cast(factor, values.dtype))
