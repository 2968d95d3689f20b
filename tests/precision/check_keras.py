"""Run by test_keras.py: `FollowPrecision` in Keras's fit."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest

from evener.errors import UsageError
from evener.precision import Limits, State
from evener.precision.keras import FollowPrecision

QUICK = Limits(settle=20, hold=60, longest_hold=240)


@keras.saving.register_keras_serializable()
class Fragile(keras.layers.Layer):
    """Wrong in half precision alone: times `factor`, a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        if self.compute_dtype == "float32":
            return x
        return x * keras.ops.cast(self.factor, x.dtype)


def data(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(steps * 32, 8)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def made(callback: FollowPrecision, **compiled: Any) -> tuple[Any, Fragile]:
    keras.utils.set_random_seed(0)
    fragile = Fragile()
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(), fragile]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"], **compiled)
    fit(model, callback, 70)
    assert callback.machine.half
    return model, fragile


def fit(model: Any, callback: FollowPrecision, steps: int, seed: int = 0) -> Any:
    x, y = data(steps, seed)
    return model.fit(x, y, batch_size=32, shuffle=False, verbose=0, callbacks=[callback])


def it_learns_and_is_mostly_half() -> None:
    callback = FollowPrecision(limits=QUICK)
    model, _ = made(callback)
    assert callback.machine.half_steps == 70 - QUICK.settle
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    assert all(layer.dtype_policy.name == "float32" for layer in model.layers)
    x, y = data(4, 9)
    assert ((model.predict(x, verbose=0) > 0) == y).mean() > 0.85
    assert "train_step" not in vars(model)
    drifting_data_switch_nothing(callback, model)
    ranks_agree(callback, model)


def a_spike_is_noticed(factor: float) -> None:
    callback = FollowPrecision(limits=QUICK)
    model, fragile = made(callback)
    fragile.factor.assign(factor)
    history = fit(model, callback, 20, seed=1)
    assert callback.machine.state is State.HOLD, callback.report()
    assert callback.events[-1].cause == "loss"
    assert callback.events[-1].step <= 70 + 20
    for variable in [*model.variables, *model.optimizer.variables]:
        if variable is fragile.factor:
            continue
        assert np.isfinite(keras.ops.convert_to_numpy(variable)).all(), variable.path
    assert np.isfinite(history.history["loss"][0])


def drifting_data_switch_nothing(callback: FollowPrecision, model: Any) -> None:
    switches = callback.machine.switches
    x, y = data(60, 2)
    model.fit(x, 1 - y, batch_size=32, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.machine.switches == switches, callback.report()
    assert callback.events[-1].cause == "data"


def ranks_agree(callback: FollowPrecision, model: Any) -> None:
    """Another rank has a loss that is not finite: this one switches too."""
    wrong = np.array([[np.nan, np.inf]])
    rows: list[np.ndarray] = []

    def agree(row: np.ndarray) -> np.ndarray:
        rows.append(row)
        return np.concatenate([row, wrong if len(rows) == 3 else row])

    callback._agree = agree
    before = callback.machine.step
    fit(model, callback, 5, seed=1)
    assert callback.machine.state is State.HOLD
    assert callback.events[-1].step == before + 3


def what_cannot_be() -> None:
    with pytest.raises(UsageError, match="no loss scale"):
        FollowPrecision(dtype="float16")
    with pytest.raises(UsageError, match="each step"):
        made(FollowPrecision(limits=QUICK), run_eagerly=True)


def main() -> None:
    it_learns_and_is_mostly_half()
    a_spike_is_noticed(-40.0)
    a_spike_is_noticed(float("inf"))
    what_cannot_be()
    assert "torch" not in sys.modules
    print("all right")


if __name__ == "__main__":
    main()
