"""What Evener uses of torch that torch does not promise to keep, and the versions it holds for.

torch renames and moves such things between minor versions. Each is reached through this module, so
that a new torch is looked at in one place; a name that is gone gives one line with the way out, and
no traceback from inside. Pipelining's are in `evener.pipeline.torch_names`, because importing them
takes a second that only pipelines need.

| what | 2.9 to 2.11 | 2.12 to 2.14 | 2.15 |
|---|---|---|---|
| FSDP2: parameter groups of a unit | `_fsdp_param_group` | a list, `_fsdp_param_groups` | as 2.12 |
| FSDP2: the policy of a group | `group.mp_policy` | the same | `parameter.mp_policy` |
| FSDP2: `_training_state` of a group | an enum | the same | the same |
| FSDP2: `_sharded_param_data` | flat, padded | the same | the same |
| FSDP2: dtype reduced if unset | that of the computation | the same | the gradient's |
| c10d: `_create_work_from_future` | private | private | in its stubs |
| `clip_grad._get_total_norm` | private | private | private |
| `torch.optim._muon.muon`, of lists | private | private | private |
| `_zeropower_via_newtonschulz` and `_adjust_lr` there | private | private | private |
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from evener.errors import UsageError

# The first and the last minor version that the tests ran with (docs/guide/install.md).
TRIED = ((2, 9), (2, 15))

_said = False


def version() -> tuple[int, int]:
    """torch's (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def say_untried(logger: logging.Logger) -> None:
    """One warning in a process whose torch is older or newer than those that were tried."""
    global _said
    if not _said and not TRIED[0] <= version() <= TRIED[1]:
        (a, b), (c, d) = TRIED
        logger.warning(
            "not tried with torch %s (tried: %d.%d to %d.%d)", torch.__version__, a, b, c, d
        )
    _said = True


def fsdp_group(state: Any, name: str) -> Any:
    """The parameter group of an FSDP2 unit called `name`; None for one without parameters.

    Raises UsageError for a unit whose parameters lie on several meshes, and for a torch that keeps
    its groups elsewhere.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        if not hasattr(state, "_fsdp_param_group"):
            raise _elsewhere("FSDP2's units")
        return state._fsdp_param_group
    if len(groups) > 1:
        raise UsageError(
            f"{name or 'the root'} is one unit of FSDP2 with {len(groups)} groups of parameters, "
            "on several meshes",
            "give each mesh a fully_shard() call of its own",
        )
    return groups[0] if groups else None


def fsdp_require_comms(group: Any) -> None:
    """Raise UsageError where a group has no place for what gathers and reduces."""
    for name in (
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "_all_reduce_hook",
        "force_sum_reduction_for_comms",
    ):
        if not hasattr(group, name):
            raise _elsewhere(f"FSDP2's {name}")


def fsdp_training_state(group: Any) -> str:
    """What a group is in: "FORWARD", "PRE_BACKWARD", ...; "" where this torch does not say."""
    return getattr(getattr(group, "_training_state", None), "name", "")


def fsdp_own(group: Any) -> Callable[[], torch.Tensor] | None:
    """What a group will gather of this rank: makes it, flat, on the current stream.

    None where it is not a cast of its shards, or this torch keeps them elsewhere.
    """
    shards, dtypes = [], set()
    for parameter in group.fsdp_params:
        shard = getattr(parameter, "_sharded_param_data", None)
        local = getattr(parameter, "_sharded_local_tensor", None)
        if type(shard) is not torch.Tensor or getattr(parameter, "offload_to_cpu", True):
            return None
        if hasattr(local, "fsdp_pre_all_gather"):
            return None
        shards.append(shard)
        dtypes.add(fsdp_gather_dtype(group, parameter))
    if len(dtypes) != 1:
        return None
    dtype, sizes = dtypes.pop(), [shard.numel() for shard in shards]

    def own() -> torch.Tensor:
        flat = torch.empty(sum(sizes), dtype=dtype, device=shards[0].device)
        torch._foreach_copy_(flat.split(sizes), shards)
        return flat

    return own


def fsdp_gather_dtype(group: Any, parameter: Any) -> torch.dtype:
    """The dtype in which FSDP2 gathers one of a group's parameters."""
    policy: Any = getattr(parameter, "mp_policy", None) or getattr(group, "mp_policy", None)
    if policy is None:
        raise _elsewhere("the dtype of FSDP2's gathers")
    dtype: torch.dtype = policy.param_dtype or parameter.sharded_param.dtype
    return dtype


def fsdp_reduce_dtype(group: Any, parameter: Any) -> torch.dtype:
    """The dtype in which FSDP2 reduces the gradient of one of a group's parameters.

    Raises UsageError where it follows from each gradient, and for a torch that says it elsewhere.
    """
    own: torch.dtype = parameter.sharded_param.dtype
    policy: Any = getattr(parameter, "mp_policy", None) or getattr(group, "mp_policy", None)
    if policy is None:
        raise _elsewhere("the dtype of FSDP2's reduction")
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype  # type: ignore[no-any-return]
    override = getattr(parameter, "_has_sharded_grad_dtype_override", None)
    if override is None:  # up to 2.14, whose parameters have a policy, too
        return policy.param_dtype or own
    if not override:
        return own
    if parameter.sharded_grad_dtype is None:
        raise UsageError(
            "a parameter takes gradients of any dtype (grad_dtype=None), so what FSDP2 reduces "
            "can differ from step to step",
            "set MixedPrecisionPolicy(reduce_dtype=...)",
        )
    return parameter.sharded_grad_dtype  # type: ignore[no-any-return]


def fsdp_divides_after(group: Any, dtype: torch.dtype, ranks: int) -> float:
    """By what FSDP2 divides a sum of gradients in `dtype` that its ranks have made.

    Gradients in fp16 were divided before they were added, too (`_get_gradient_divide_factors`).
    """
    factor = group.gradient_divide_factor or float(ranks)
    if dtype in (torch.float32, torch.bfloat16):
        return float(factor)
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return float(factor / before)


def fsdp_widens(group: Any, parameter: Any) -> bool:
    """Whether this torch reduces a wider dtype than 2.14 did, because reduce_dtype is unset."""
    policy = getattr(parameter, "mp_policy", None)
    if policy is None or policy.reduce_dtype is not None or policy.param_dtype is None:
        return False
    return fsdp_reduce_dtype(group, parameter).itemsize > int(policy.param_dtype.itemsize)


def work_of(future: torch.futures.Future[Any]) -> Any:
    """A c10d Work that is done when `future` is."""
    create = getattr(torch._C._distributed_c10d, "_create_work_from_future", None)
    if create is None:
        raise _elsewhere("how a Work is made of a future")
    return create(future)


def total_norm() -> Any:
    """What clip_grad_norm_ and get_total_norm take the norm by."""
    if (found := getattr(clip_grad, "_get_total_norm", None)) is None:
        raise _elsewhere("what clip_grad_norm_ takes the norm by")
    return found


MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
        "adjust_lr_fn", "has_complex")  # fmt: skip
"""What `muon` is called with, beside the lists."""


def muon() -> Any:
    """The arithmetic of torch.optim.Muon's step, of lists of matrices, gradients and momenta."""
    try:
        from torch.optim._muon import muon as found

        inspect.signature(found).bind([], [], [], **dict.fromkeys(MUON))
    except (ImportError, TypeError):
        raise _elsewhere("the arithmetic of torch.optim.Muon") from None
    return found


def newton_schulz() -> Any:
    """The products of torch.optim.Muon's step: of (matrix, coefficients, steps, eps)."""
    return _of_muon("_zeropower_via_newtonschulz", 4)


def adjusted_rate() -> Any:
    """The rate of a matrix in torch.optim.Muon's step: of (lr, adjust_lr_fn, shape)."""
    return _of_muon("_adjust_lr", 3)


def _of_muon(name: str, arguments: int) -> Any:
    try:
        found = getattr(importlib.import_module("torch.optim._muon"), name)
        inspect.signature(found).bind(*[None] * arguments)
    except (ImportError, AttributeError, TypeError):
        raise _elsewhere("the arithmetic of torch.optim.Muon") from None
    return found


def _elsewhere(what: str) -> UsageError:
    (a, b), (c, d) = TRIED
    return UsageError(
        f"torch {torch.__version__} keeps {what} in another place than Evener knows",
        f"use torch {a}.{b} to {c}.{d}, or train without Evener",
    )
