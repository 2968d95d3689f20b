"""`DistributedGradientTape`: a tape whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Average
from evener.horovod.tensorflow.compression import Compression
from evener.horovod.tensorflow.gradients import Reduction, key, options


class _Distributed(tf.GradientTape):  # type: ignore[misc]
    """Mixed into a subclass of the wrapped tape's class; takes over what it has recorded."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """Gradients of this variable stay on their rank."""
        self._reduction.local.add(key(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As of tf.GradientTape, reduced over the ranks."""
        found = super().gradient(target, sources, output_gradients, **kwargs)
        flat, of = tf.nest.flatten(found), tf.nest.flatten(sources)
        if len(flat) != len(of):  # IndexedSlices are not flattened, but a nested None may be
            flat = list(found)
        reduced = self._reduction(flat, of, use_generic_names)
        if isinstance(sources, list | tuple) and len(sources) == len(of):
            return reduced
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(variable, gradient) of those that stay on their rank, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = self._reduction.local
        return (
            [(source, gradient) for source, gradient in pairs if key(source) in local],
            [(source, gradient) for source, gradient in pairs if key(source) not in local],
        )


def DistributedGradientTape(  # noqa: N802 - upstream's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`gradtape` with gradients that are reduced over the ranks.

    sparse_as_dense: tf.IndexedSlices become dense before. groups: a number of groups that are
    reduced as one, or lists of variables. Raises ValueError for what does not fit together.
    """
    reduction = options(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    kind = type(gradtape)
    bases = (_Distributed,) if kind is tf.GradientTape else (_Distributed, kind)
    made: Any = type(kind.__name__, bases, {})
    tape = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)
    tape._reduction = reduction
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - upstream's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedGradientTape`; gradients of `local_layers` stay on their rank."""
    variables = local_variables(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape


def local_variables(local_layers: Any) -> list[Any]:
    """The weights of a layer, or of several, whose gradients stay on their rank."""
    layers = local_layers if local_layers is not None else []
    layers = [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers)
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    if unbuilt := [layer.name for layer in layers if not layer.built]:
        raise ValueError(f"local layers without weights yet: {unbuilt}; build the model first")
    return [variable for layer in layers for variable in layer.trainable_weights]
