"""Who else holds a gradient: references that a program kept, and memory that gradients share."""

from __future__ import annotations

import torch
from torch import nn

from evener.comm import holders


def parameters(shared: bool) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    storage = torch.zeros(6).untyped_storage()
    for place, parameter in enumerate(made):
        own = torch.zeros(6).untyped_storage()
        parameter.grad = torch.empty(0).set_(storage if shared else own, 2 * place, (2,))
    return made


def test_gradients_that_lie_together_are_held_by_nobody_else() -> None:
    for shared in (False, True):
        made = parameters(shared)
        here = holders.together(p.grad for p in made if p.grad is not None)
        assert [holders.is_kept(p, here) for p in made] == [False] * 3


def test_whoever_holds_a_gradient_or_its_memory_is_seen() -> None:
    made = parameters(shared=False)
    here = holders.together(p.grad for p in made if p.grad is not None)
    kept = made[0].grad
    assert [holders.is_kept(p, here) for p in made] == [True, False, False]
    assert kept is not None
    view = kept.view(1, 2)
    del kept
    assert [holders.is_kept(p, here) for p in made] == [True, False, False]
    assert view.shape == (1, 2)


def test_a_sparse_gradient_has_no_memory_to_look_at() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    here = holders.together(p.grad for p in table.parameters() if p.grad is not None)
    assert not holders.is_kept(table.weight, here)
