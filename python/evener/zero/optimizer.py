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

    def __init__(
        self, engine: Engine, groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> None:
        self._complete = False
        super().__init__(groups, defaults)
        self._complete = True
        self.engine = engine
        engine.param_groups = self.param_groups
        # Schedulers look for it, to warn of a loop that never steps; here engine.step() does.
        self._opt_called = True
        self.together: Together | None = None
        """Set where the program gave several optimizers."""

    def step(self, closure: Any = None) -> Any:
        """Update the weights from the gradients of the backward passes since the last step.
        `closure`: makes them, as torch's optimizers have it; what it gives is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.together is not None:
            self.together.refuse()
        with self.engine.explained():
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
        if self.together is not None:
            self.together.refuse()
        self.engine.zero_grad()


class Together:
    """Several optimizers of a program, which step one after the other: the engine updates all
    weights when the last of them has been asked to. Each speaks for its own groups."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], front: ZeroOptimizer) -> None:
        self._front, self._engine = front, front.engine
        self._optimizers = optimizers
        self._asked: dict[int, list[dict[str, Any]]] = {}
        """The groups of those that were asked, as they were then: schedulers may write to them
        before the last one is asked."""
        self._came = (0, 0)
        self._groups: list[range] = []
        for number, optimizer in enumerate(optimizers):
            first = self._groups[-1].stop if self._groups else 0
            self._groups.append(range(first, first + len(optimizer.param_groups)))
            self._take(number, optimizer)

    def _take(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        mine, engine = self._groups[number], self._engine
        groups = self._front.param_groups[mine.start : mine.stop]
        state = torch.optim.Optimizer.state_dict
        if optimizer.state:
            moments.install(engine, groups, state(optimizer))
            optimizer.state.clear()
        optimizer.param_groups = groups

        def step(closure: Any = None) -> None:
            if closure is not None:
                raise UsageError(
                    "a closure, with several optimizers", "call backward(), and then each step()"
                )
            self._step(number)

        def zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001 - as torch has it
            if number not in self._asked:  # else its gradients wait for the others' steps
                engine.zero_grad(mine)

        def state_dict() -> dict[str, Any]:
            engine.drain()
            found: dict[str, Any] = state(optimizer)
            return {**found, "state": moments.collect(engine, groups)}

        def load_state_dict(given: dict[str, Any]) -> None:
            engine.drain()
            moments.install(engine, groups, given)

        given: Any = optimizer
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as in `take_over`
        given.step, given.zero_grad = step, zero_grad
        given.state_dict, given.load_state_dict = state_dict, load_state_dict
        given.add_param_group = self._front.add_param_group
        given._opt_called = True

    def _step(self, number: int) -> None:
        self._engine.flush()
        if number in self._asked:
            self._refuse(f"{self._name(number)}.step() was called twice")
        engine = self._engine
        came = engine.came(), engine.global_steps + engine.skipped_steps
        if self._asked and self._came != came:
            what = "a backward pass" if self._came[0] != came[0] else "a step of the engine"
            self._refuse(f"there was {what} before {self._name(number)}.step()")
        self._came = came
        self._asked[number] = [dict(group) for group in self._optimizers[number].param_groups]
        if len(self._asked) == len(self._optimizers):
            groups = [group for _, each in sorted(self._asked.items()) for group in each]
            self._asked.clear()
            with self._engine.explained():
                self._engine.update(groups)

    def refuse(self) -> None:
        """Raise where some have been asked and others not."""
        if self._asked:
            self._refuse("another step, or zero_grad, of all came in between")

    def _refuse(self, what: str) -> None:
        late = [self._name(n) for n in range(len(self._optimizers)) if n not in self._asked]
        raise UsageError(
            f"{what}, and {', '.join(late)}.step() was not called since the last step of all: "
            "the engine updates all weights at once",
            "call step() of all optimizers one after the other, in every step",
        )

    def _name(self, number: int) -> str:
        return type(self._optimizers[number]).__name__


def take_over(optimizers: list[torch.optim.Optimizer], front: ZeroOptimizer) -> None:
    """The given optimizers speak for the engine's: they step it, and their moments go on."""
    if len(optimizers) > 1:
        front.together = Together(optimizers, front)
    elif optimizers:
        _take_over(optimizers[0], front)


def _take_over(optimizer: torch.optim.Optimizer, front: ZeroOptimizer) -> None:
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
