"""Which optimizers may update a model bucket by bucket, and how one does.

May: those whose update of an entry looks at that entry alone, so that any grouping of parameters
gives the same bits. No arithmetic is written again here: `update` runs the optimizer's own `step`
with its parameter groups reduced to the parameters in question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim
from torch.autograd.profiler import record_function
from torch.optim import optimizer as _torch

ELEMENT_WISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
# A class of the user's says so of itself with `evener_elementwise = True` in its own body.
FLAG = "evener_elementwise"

# A hook of a step that changes nothing has this attribute.
OBSERVES = "evener_observes"

Group = dict[str, Any]
NOWHERE = -1


def refusal(optimizer: optim.Optimizer) -> str:
    """Why its updates can never be deferred; empty where they can."""
    kind = type(optimizer)
    if kind not in ELEMENT_WISE and not vars(kind).get(FLAG, False):
        return f"{kind.__name__} is not known to update each entry on its own ({FLAG} says so)"
    if optimizer.defaults.get("differentiable"):
        return "the optimizer is differentiable"
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return "optimizer.step was replaced"
    return ""


def at_once(optimizer: optim.Optimizer) -> str:
    """Why this step cannot be deferred; empty where it can."""
    hooks = (*_pre_hooks(optimizer), *_post_hooks(optimizer))
    if not all(hasattr(hook, OBSERVES) for hook in hooks):
        return "the optimizer has step hooks"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and _holds_tensor(value):
                return f"{name} is a tensor"
    return ""


def _pre_hooks(optimizer: optim.Optimizer) -> list[Any]:
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *_torch._global_optimizer_pre_hooks.values(),
    ]


def _post_hooks(optimizer: optim.Optimizer) -> list[Any]:
    return [
        *optimizer._optimizer_step_post_hooks.values(),
        *_torch._global_optimizer_post_hooks.values(),
    ]


def observe(optimizer: optim.Optimizer) -> None:
    """A step is deferred: tell the hooks, all of which only look (`at_once`).

    To the program the step ends here. The updates that follow (`update`) call no hook.
    """
    for hook in (*_pre_hooks(optimizer), *_post_hooks(optimizer)):
        hook(optimizer, (), {})


def innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer that steps, inside wrappers of frameworks (Accelerate's, Lightning's)."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, optim.Optimizer) else optimizer


def closure_first(optimizer: optim.Optimizer) -> bool:
    """Whether `step(closure)` is the closure, once, and then a step.

    So it is in torch's own that may be deferred; where hooks surround both, it is not.
    """
    return type(optimizer) in ELEMENT_WISE and not at_once(optimizer)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def split(optimizer: optim.Optimizer, place: Mapping[int, int]) -> dict[int, list[Group]]:
    """A snapshot of the parameter groups, cut by `place`: id of a parameter to its bucket.

    Values are those of now: what a scheduler writes into the groups later does not reach them.
    Parameters that `place` does not know are under NOWHERE.
    """
    found: dict[int, list[Group]] = {}
    for group in optimizer.param_groups:
        parts: dict[int, list[Any]] = {}
        for parameter in group["params"]:
            parts.setdefault(place.get(id(parameter), NOWHERE), []).append(parameter)
        for bucket, parameters in parts.items():
            found.setdefault(bucket, []).append({**group, "params": parameters})
    return found


def update(optimizer: optim.Optimizer, groups: list[Group]) -> None:
    """One step of the optimizer on these groups only, as outside of any autocast or inference."""
    if not groups:
        return
    device = groups[0]["params"][0].device.type
    kind = type(optimizer)
    step = _without_hooks(kind.step)
    own, optimizer.param_groups = optimizer.param_groups, groups
    try:
        with (
            torch.inference_mode(False),
            torch.autocast(device, enabled=False),
            record_function(f"Optimizer.step#{kind.__name__}.step"),
        ):
            step(optimizer)
    finally:
        optimizer.param_groups = own


def _without_hooks(step: Any) -> Any:
    """A class's step without what torch puts around it to call hooks."""
    code = getattr(step, "__code__", None)
    if hasattr(step, "hooked") and code is not None and code.co_filename == _torch.__file__:
        return step.__wrapped__
    return step
