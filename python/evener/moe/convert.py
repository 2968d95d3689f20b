"""Experts of transformers' models become ours, in place: same names, same outputs to rounding.

transformers 5 keeps the experts of a layer in one module: stacked matrices `gate_up_proj` and
`down_proj`, called with tokens, choices and weights. Only that module is replaced. Router, shared
experts and all that a block does around them stay the model's own, so every architecture whose
experts have this form works; a form that ours has not is refused by name. Nothing of transformers
is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evener.base.given import given
from evener.errors import UsageError
from evener.moe.layer import Experts, MoE, check_capacity
from evener.moe.spread import spread

# What transformers says of a form of experts, what ours needs it to be, and else why not.
_FORM = {
    "has_gate": (True, "has experts without a gate"),
    "has_bias": (False, "has experts with a bias"),
    "is_transposed": (False, "keeps its matrices transposed"),
    "is_concatenated": (True, "keeps gate and up row by row, not one above the other"),
    "has_post_expert_norm": (False, "has a norm after each expert"),
}


def stacked(module: nn.Module) -> bool:
    """Whether a module holds experts as stacked matrices, as transformers 5 does."""
    down = module._parameters.get("down_proj")
    up = module._parameters.get("gate_up_proj", module._parameters.get("up_proj"))
    return down is not None and up is not None and down.dim() == up.dim() == 3


def _refuse(name: str, module: nn.Module, why: str) -> UsageError:
    return UsageError(
        f"{name} ({type(module).__name__}) {why}", "leave this model as transformers has it"
    )


def _checked(name: str, module: Any) -> Experts:
    """Our layer instead of `module`, with its own parameters."""
    for attribute, (needed, why) in _FORM.items():
        if getattr(module, attribute, needed) != needed:
            raise _refuse(name, module, f"{why} ({attribute}={not needed}), which ours cannot do")
    own = type(module).__dict__.get("_apply_gate")
    if own is not None and own.__module__ != "transformers.integrations.moe":
        raise _refuse(name, module, "has a gate of its own")
    activation = getattr(module, "act_fn", getattr(module, "activation", None))
    gate_up, down = module._parameters.get("gate_up_proj"), module.down_proj
    if gate_up is None or not callable(activation):
        raise _refuse(name, module, "has no gate_up_proj, or no act_fn")
    experts, twice, width = gate_up.shape
    if len(down) < experts and down.shape[1:] == (width, twice // 2):
        raise _refuse(name, module, f"has {experts - len(down)} of {experts} experts that give "
                      "their token back as it is, which ours cannot do")  # fmt: skip
    if down.shape == (experts, width // 2, twice):
        raise _refuse(name, module, "keeps its matrices transposed, which ours cannot do")
    if down.shape != (experts, width, twice // 2):
        raise _refuse(name, module, f"has matrices of {list(gate_up.shape)} and {list(down.shape)}")
    with torch.device("meta"):
        made = Experts(width, twice // 2, experts, activation)
    made.gate_up_proj, made.down_proj = gate_up, down
    return made.train(module.training)


@given
def convert(
    model: nn.Module, ep: int = 1, *, capacity: float | None = None, **options: Any
) -> nn.Module:
    """Give a model of transformers our experts, in place, and return it.

    The parameters stay the same objects under the same names: optimizers, checkpoints,
    save_pretrained go on as before. ep: over how many ranks the experts are spread; then they are
    new parameters, so make the optimizer afterwards, and all ranks call this. options: those of
    `spread`. capacity: see `Experts`; None drops nothing.

    Raises UsageError, with nothing changed, for a model without experts and for experts of a form
    that ours has not.
    """
    found = [(name, module) for name, module in model.named_modules() if stacked(module)]
    theirs = [(name, module) for name, module in found if not isinstance(module, Experts)]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no experts as stacked matrices",
            "give a mixture of experts of transformers 5 (Mixtral, Qwen3-MoE, DeepSeek-V3 ...)",
        )
    check_capacity(capacity)
    made = [(name, _checked(name, module)) for name, module in theirs]
    for name, ours in made:
        parent, _, last = name.rpartition(".")
        if not last or not name:
            raise UsageError("these are experts alone", "give the model that has them")
        setattr(model.get_submodule(parent), last, ours)
    for module in model.modules():
        if isinstance(module, Experts) and capacity is not None:
            module.capacity = capacity
    if ep == 1 and not options:
        return model
    spread(model, ep, **options)
    for block in model.modules():
        _shared_meanwhile(block)
    return model


def _shared_meanwhile(block: nn.Module) -> None:
    """Run a block's shared experts while its tokens travel.

    For blocks like DeepSeek's, which give them what the block was given, after the other experts.
    Where a block gives them anything else, they run when they are called.
    """
    shared, experts = getattr(block, "shared_experts", None), getattr(block, "experts", None)
    if not isinstance(shared, nn.Module) or not isinstance(experts, Experts):
        return
    if isinstance(block, MoE) or experts.parallel is None:
        return
    own, parallel = shared.forward, experts.parallel

    def before(_: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], torch.Tensor):
            parallel.meanwhile(lambda x: (x, own(x)), given[0])

    def forward(x: torch.Tensor) -> Any:
        early = parallel.done_meanwhile()
        return early[1] if early is not None and early[0] is x else own(x)

    block.register_forward_pre_hook(before)
    shared.forward = forward
