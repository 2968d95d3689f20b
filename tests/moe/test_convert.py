"""Models of transformers with our experts: same outputs, same gradients, same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evener import moe
from evener.errors import UsageError
from tests import worlds

_BASE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip
_DEEPSEEK = {
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
_GLM = {
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, "router_aux_loss_coef": 0.02,
                "output_router_logits": True},
    "Qwen3Moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8,
                 "head_dim": 8},
    "Qwen2Moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8,
                 "shared_expert_intermediate_size": 40},
    "DeepseekV3": _DEEPSEEK,
    "DeepseekV2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "Olmoe": {"intermediate_size": 48, "num_experts": 8},
    "Glm4Moe": {**_GLM, "head_dim": 8},
    "Dots1": {**_GLM, "head_dim": 8},
    "HunYuanMoEV1": {"intermediate_size": 48, "num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "GraniteMoe": {"intermediate_size": 48, "num_local_experts": 4},
}  # fmt: skip


def made(kind: str) -> Any:
    transformers = pytest.importorskip(
        "transformers", minversion="5",
        reason="needs transformers 5, which Evener does not depend on",
    )  # fmt: skip
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**_BASE, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    model.config._experts_implementation = "eager"  # grouped_mm takes no float64
    return model


def trained(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.arange(40).view(2, 20) * 7 % 64
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", list(KINDS))
def test_outputs_and_gradients_are_transformers_own(kind: str) -> None:
    model = made(kind).double()
    loss, gradients = trained(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert moe.convert(model) is model
    assert any(isinstance(m, moe.Experts) for m in model.modules())
    again, ours = trained(model)
    # Routers compute in float32, so sums in another order may show there.
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-7)
    assert list(ours) == list(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    made(kind).double().load_state_dict(after)
    model.load_state_dict(before)


def over_ranks(rank: int, size: int, kind: str) -> Any:
    model = made(kind).double()
    loss, gradients = trained(model)
    early = []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moe.convert(model, ep=size)
    for module in model.modules():
        if isinstance(module, moe.Experts):
            module.register_forward_hook(
                lambda m, *_: early.append(getattr(m.parallel._mine, "own", None) is not None)
            )
    again, ours = trained(model)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-7)
    experts = dict(model.named_modules())
    for name, gradient in gradients.items():
        if ours[name].shape != gradient.shape:
            # All ranks have the same batch, so the mean over ranks is each one's own.
            gradient = gradient[experts[name.rpartition(".")[0]].parallel.mine]
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model.load_state_dict(before)
    return early


def test_spread_over_ranks_it_is_the_same_model() -> None:
    made("Mixtral")
    assert worlds.run([1, 1], over_ranks, "Mixtral") == [[False] * 2] * 2
    # DeepSeek's shared experts ran before the sums of the others had come.
    assert worlds.run([1, 1], over_ranks, "DeepseekV3") == [[True]] * 2


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
        self.act_fn, self.has_bias = nn.SiLU(), True


def test_a_form_that_ours_has_not_is_refused_and_nothing_is_changed() -> None:
    model = nn.Sequential(Biased())
    with pytest.raises(UsageError) as caught:
        moe.convert(model)
    assert "0 (Biased) has experts with a bias (has_bias=True)" in caught.value.problem
    assert type(model[0]) is Biased
    with pytest.raises(UsageError):
        moe.convert(nn.Linear(2, 2))
    model[0].has_bias = False
    assert isinstance(moe.convert(model)[0], moe.Experts)


def test_a_capacity_holds_for_our_own_experts_and_one_that_cannot_be_is_refused() -> None:
    model = moe.MoE(8, 8, 4, 2)
    assert moe.convert(model, capacity=1.5).experts.capacity == 1.5
    with pytest.raises(UsageError, match="capacity=-1"):
        moe.convert(model, capacity=-1.0)
    assert model.experts.capacity == 1.5
