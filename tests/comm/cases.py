"""Tensors that make a kernel stumble, by name: (n, generator) to float32 [n]."""

import torch

CASES = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "equal": lambda n, _: torch.ones(n),
    "zero": lambda n, _: torch.zeros(n),
    "ties": lambda n, g: torch.randn(n, generator=g).round(),
    "denormal": lambda n, g: torch.randn(n, generator=g) * 1e-41,
    "wide": lambda n, g: torch.exp(20 * torch.randn(n, generator=g)),
    "huge": lambda n, g: torch.randn(n, generator=g) * 1e38,
    "infinite": lambda n, g: torch.where(
        torch.rand(n, generator=g) < 0.02, -torch.inf, torch.randn(n, generator=g)
    ),
    "nan": lambda n, g: torch.where(
        torch.rand(n, generator=g) < 0.02, torch.nan, torch.randn(n, generator=g)
    ),
    # All bits set: what a GPU makes of any NaN.
    "nan of a GPU": lambda n, g: torch.where(
        torch.rand(n, generator=g) < 0.02,
        torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32),
        torch.randn(n, generator=g),
    ),
}


def bits(values: torch.Tensor) -> torch.Tensor:
    """To compare bit by bit, but for which NaN it is: processors differ in that."""
    integer = torch.int16 if values.element_size() == 2 else torch.int32
    return values.cpu().masked_fill(values.cpu().isnan(), torch.nan).view(integer)
