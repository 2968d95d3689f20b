"""The engine's optimizer as torch's programs and schedulers know one."""

from __future__ import annotations

from typing import Any

import torch

from evener.errors import UsageError
from evener.zero import moments
from evener.zero.engine import Engine


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's optimizer with torch's face: groups, `step`, `zero_grad`, schedulers.

    `state_dict` and `load_state_dict` hold what torch's optimizer of that name holds, so one
    process may hand its states to torch.optim.AdamW and back (`evener.zero.moments`). They copy all
    moments at once: `save_checkpoint` is what needs no room, and keeps the float32 weights too.
    """

    def __init__(self, engine: Engine, groups: list[dict[str, Any]]) -> None:
        self._complete = False
        super().__init__(groups, engine.rule.values)
        self._complete = True
        self.engine = engine
        engine.param_groups = self.param_groups
        # Schedulers look for it, to warn of a loop that never steps; here engine.step() does.
        self._opt_called = True

    def step(self, closure: Any = None) -> Any:
        """Update the weights from the gradients of the backward passes since the last step.
        `closure`: makes them, as torch's optimizers have it; what it gives is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """While the engine is made; refused later, as the plan holds no more."""
        if self._complete:
            raise UsageError(
                "the engine holds the parameters that it was given, and takes no more",
                "give all groups to initialize; unfreeze by close() and initialize again",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Groups, and each parameter's step and moments: copies on the CPU, in their own dtype.
        With several ranks the part that this rank holds, flat, with its `range`."""
        self.engine.drain()
        state = super().state_dict()
        state["state"] = moments.collect(self.engine, self.param_groups)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, into the groups that exist: schedulers keep theirs.
        Raises UsageError, with nothing changed, where it is of another model or number of ranks."""
        self.engine.drain()
        moments.install(self.engine, self.param_groups, state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients leave the parameters as they come: there is nothing to clear after a step."""
        self.engine.zero_grad()


def take_over(optimizer: torch.optim.Optimizer, front: ZeroOptimizer) -> None:
    """The given optimizer speaks for the engine's: it steps it, and its moments go on."""
    if optimizer.state:
        moments.install(
            front.engine, front.param_groups, torch.optim.Optimizer.state_dict(optimizer)
        )
    optimizer.param_groups = front.param_groups
    given: Any = optimizer

    def step(closure: Any = None) -> Any:
        return front.step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers look for it
    given.step, given.zero_grad = step, front.zero_grad
    given.state_dict, given.load_state_dict = front.state_dict, front.load_state_dict
    given.add_param_group = front.add_param_group
    # Schedulers look for it, to warn of a loop that never steps.
    given._opt_called = True
