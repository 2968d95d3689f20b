"""How rows cross the network: as they are, in halves, or as int8 with a scale per row."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from evener.errors import UsageError

Form = Literal["exact", "fp16", "bf16", "int8"]
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def require(form: str, name: str) -> Form:
    """`form`, or UsageError."""
    if form not in get_args(Form):
        raise UsageError(f"{name}={form!r} is no form", f"one of {', '.join(get_args(Form))}")
    return form  # type: ignore[return-value]


def width(form: Form, dim: int) -> int:
    """Bytes of a row."""
    return {"exact": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + 4}[form]


def encode(rows: torch.Tensor, form: Form) -> torch.Tensor:
    """float32 [n, dim] > uint8 [n, width].

    Halves round to nearest even; what is finite and too large for fp16 becomes its largest number,
    so that only what was not finite is not finite at the other end. int8: 127 stands for the
    largest magnitude of the row.
    """
    if form == "exact":
        return rows.contiguous().view(torch.uint8)
    if form == "int8":
        largest = rows.abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
        codes = (rows / scale).round_().nan_to_num_(0).clamp_(-127, 127).to(torch.int8)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), 1)
    if form == "fp16":
        most = torch.finfo(torch.float16).max
        rows = torch.where(rows.isfinite(), rows.clamp(-most, most), rows)
    return rows.to(_HALVES[form]).contiguous().view(torch.uint8)


def decode(codes: torch.Tensor, form: Form, dim: int) -> torch.Tensor:
    """uint8 [n, width] > float32 [n, dim]."""
    if form == "exact":
        return codes.contiguous().view(torch.float32)
    if form == "int8":
        # A copy: a single row is contiguous as it is, and its scale may lie at any byte.
        scale = codes[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return codes[:, :dim].contiguous().view(torch.int8).float() * scale
    return codes.contiguous().view(_HALVES[form]).float()
