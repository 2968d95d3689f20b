"""The experts of one device: outputs and gradients equal a loop over experts, dense or dropping."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from evener import moe
from evener.errors import UsageError
from evener.moe import permute
from tests.moe import dense

SHAPES = [(33, 16, 24, 5, 2), (1, 8, 8, 3, 3), (64, 8, 40, 64, 6), (7, 8, 8, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("absent", [False, True])
def test_outputs_and_gradients_equal_a_dense_loop(shape: tuple[int, ...], absent: bool) -> None:
    layer, x, chosen, weights = dense.case(*shape, torch.float64, absent=absent)
    seed = torch.randn_like(x)
    of = (x, weights, layer.gate_up_proj, layer.down_proj)
    ours = layer(x, chosen, weights)
    theirs = dense.dense(x, chosen, weights, layer)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for mine, wanted in zip(dense.gradients(ours, seed, *of),
                            dense.gradients(theirs, seed, *of), strict=True):  # fmt: skip
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("activation", [functional.gelu, functional.relu])
def test_other_activations(activation: object) -> None:
    layer, x, chosen, weights = dense.case(20, 8, 16, 4, 2, torch.float64)
    layer.activation = activation  # type: ignore[assignment]
    of = (x, weights, layer.gate_up_proj, layer.down_proj)
    seed = torch.randn_like(x)
    mine = dense.gradients(layer(x, chosen, weights), seed, *of)
    wanted = dense.gradients(dense.dense(x, chosen, weights, layer), seed, *of)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_no_tokens() -> None:
    layer, *_ = dense.case(4, 8, 8, 3, 2, torch.float32)
    x = torch.zeros(0, 8, requires_grad=True)
    out = layer(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 8) and layer.gate_up_proj.grad is not None
    assert not layer.gate_up_proj.grad.any()


def test_dropless_drops_nothing_and_capacity_drops_the_last() -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [0, -1]])
    at = permute.positions(chosen, 3)
    assert at.ends.tolist() == [4, 6, 7]
    assert sorted(r for r in at.rows.flatten().tolist() if r >= 0) == list(range(7))
    at = permute.positions(chosen, 3, capacity=2)
    assert at.ends.tolist() == [2, 4, 5]
    assert at.rows.tolist() == [[0, 2], [1, 4], [-1, 3], [-1, -1]]
    assert at.source.tolist() == [0, 2, 1, 5, 3, -1, -1, -1]


def test_a_layer_with_capacity_equals_the_dense_loop_without_what_it_dropped() -> None:
    layer, x, chosen, weights = dense.case(40, 8, 16, 4, 2, torch.float64)
    layer.capacity = 0.8
    limit = 16  # 40 x 2 / 4 x 0.8
    kept = torch.full_like(chosen, -1)
    count = [0] * 4
    for token in range(40):
        for slot in range(2):
            expert = int(chosen[token, slot])
            count[expert] += 1
            if count[expert] <= limit:
                kept[token, slot] = expert
    of = (x, weights, layer.gate_up_proj, layer.down_proj)
    seed = torch.randn_like(x)
    ours, theirs = layer(x, chosen, weights), dense.dense(x, kept, weights, layer)
    assert layer.dropped is not None
    assert int(layer.dropped) == int((kept < 0).sum()) > 0
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(dense.gradients(ours, seed, *of), dense.gradients(theirs, seed, *of),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_load_is_counted_in_training_only() -> None:
    layer, x, chosen, weights = dense.case(40, 8, 16, 4, 2, torch.float32)
    layer(x, chosen, weights)
    assert layer.load.tolist() == torch.bincount(chosen.flatten(), minlength=4).tolist()
    layer.eval()(x, chosen, weights)
    assert layer.load.sum() == 80


def test_half_precision_is_near() -> None:
    layer, x, chosen, weights = dense.case(64, 32, 64, 8, 2, torch.bfloat16)
    seed = torch.randn_like(x)
    of = (x, weights, layer.gate_up_proj, layer.down_proj)
    mine = dense.gradients(layer(x, chosen, weights), seed, *of)
    wide = layer.float()
    others = (x.detach().float().requires_grad_(), weights, wide.gate_up_proj, wide.down_proj)
    wanted = dense.gradients(dense.dense(others[0], chosen, weights, wide), seed.float(), *others)
    for one, other in zip(mine, wanted, strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()


def test_activation_checkpointing_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x, chosen, weights = dense.case(20, 8, 16, 4, 2, torch.float32)
    plain = dense.gradients(layer(x, chosen, weights), torch.ones_like(x), x, weights)
    again = checkpoint(layer, x, chosen, weights, use_reentrant=False)
    for one, other in zip(plain, dense.gradients(again, torch.ones_like(x), x, weights),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("top_k=9 of 8", {"top_k": 9}),
        ("groups=3 does not divide", {"groups": 3}),
        ("top_groups=1 of 8 groups of 1 experts cannot give 2", {"groups": 8}),
        ("MoE() was given 'tanh' (a str) as score", {"score": "tanh"}),
        ("capacity=-1", {"capacity": -1}),
        ("inner=0", {"inner": 0}),
    ],
)
def test_bad_arguments_are_named(said: str, options: dict[str, object]) -> None:
    given = {"width": 8, "inner": 8, "experts": 8, "top_k": 2, **options}
    with pytest.raises(UsageError) as caught:
        moe.MoE(**given)  # type: ignore[arg-type]
    assert said in caught.value.problem and caught.value.fix


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    layer, x, chosen, weights = dense.case(20, 8, 16, 4, 2, torch.float32)
    with pytest.raises(UsageError):
        layer(x[:3], chosen, weights)


def test_softmax_router_chooses_as_mixtral_does() -> None:
    router = moe.Router(16, 8, 2)
    x = torch.randn(30, 16)
    logits, weights, experts = router(x)
    chance = torch.softmax(x @ router.weight.t(), -1)
    top, index = chance.topk(2, -1)
    assert torch.equal(experts, index)
    torch.testing.assert_close(weights, top / top.sum(-1, keepdim=True))
    assert logits.shape == (30, 8)


def test_sigmoid_router_looks_at_the_best_groups_and_the_bias_only_chooses() -> None:
    router = moe.Router(16, 8, 2, score="sigmoid", groups=4, top_groups=1, scale=2.5)
    x = torch.randn(50, 16)
    _, weights, experts = router(x)
    assert (experts // 2 == experts[:, :1] // 2).all(), "both of one group"
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[6:] = 10.0
    _, weights, experts = router(x)
    assert (experts >= 6).all()
    scores = torch.sigmoid(x @ router.weight.t()).gather(1, experts)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_aux_loss_is_least_where_the_load_is_even() -> None:
    even = torch.arange(16).view(8, 2) % 4
    assert moe.load_balancing_loss(torch.zeros(8, 4), even).item() == pytest.approx(2.0)
    logits = torch.zeros(8, 4)
    logits[:, 0] = 5
    assert moe.load_balancing_loss(logits, torch.zeros(8, 2, dtype=torch.long)).item() > 7


def test_the_layer_trains_all_its_parts() -> None:
    layer = moe.MoE(16, 32, experts=4, top_k=2, shared=16)
    out = layer(torch.randn(2, 10, 16))
    assert out.shape == (2, 10, 16) and layer.aux_loss is not None
    (out.square().mean() + 0.01 * layer.aux_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_a_batch_without_a_token() -> None:
    """Also with groups of experts; the auxiliary loss is 0 then, not the mean of nothing."""
    layer = moe.MoE(4, 3, 4, 2, groups=2, top_groups=1)
    out = layer(torch.zeros(0, 4))
    assert out.shape == (0, 4)
    assert layer.aux_loss is not None and layer.aux_loss.item() == 0
    (out.sum() + layer.aux_loss).backward()
