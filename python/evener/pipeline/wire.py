"""What crosses a cut between two nodes: as it is, or in fewer bits where that is asked for.

`bf16` rounds float32 to half its bytes. `int8` sends 8 bits per value and a float32 scale per 1,024
(`comm.codecs.int8`: rounding is right on the mean, and the same on every run). Activations go so
forward, and their gradients backward. Integers, and tensors below 1,024 values, go as they are.

The guard: in every step the sender decodes what it sends of the first microbatch, and compares. If
a cut loses more than `LIMIT` of a tensor's length, all ranks send what crosses that cut as it is
from the next step on. It is said once. What was lost in the step itself stays lost: knowing it
before would make the host wait for the device in each transfer.
"""

from __future__ import annotations

import torch

from evener.comm.codecs import casts, int8
from evener.errors import UsageError

FORMS = ("exact", "bf16", "int8")
# Relative to the length. bf16 loses 0.2%, and int8 1% of what is spread like a normal distribution.
LIMIT = 0.05


def check(form: str) -> str:
    """The form, if there is one of that name. Raises UsageError."""
    if form not in FORMS:
        raise UsageError(f"activations={form!r} is not known", f"one of {', '.join(FORMS)}")
    return form


def ratio(form: str, dtype: torch.dtype) -> float:
    """Bytes that are sent per byte of a tensor."""
    if form == "bf16" and dtype.itemsize > 2:
        return 2 / dtype.itemsize
    if form == "int8":
        return (1 + 4 / int8.BLOCK) / dtype.itemsize
    return 1.0


class Wire:
    """One way over one cut. `seed`: differs for each cut and way; `cut`: the cut's number."""

    def __init__(self, form: str, cut: int, seed: int) -> None:
        self.form, self.cut, self.seed = form, cut, seed
        self.lost: list[torch.Tensor] = []

    def fits(self, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> bool:
        """Whether a tensor goes in this form; both ends answer alike."""
        values = torch.Size(shape).numel()
        if self.form == "exact" or not dtype.is_floating_point or values < int8.BLOCK:
            return False
        return self.form == "int8" or dtype.itemsize > 2

    def buffer(self, values: int, device: torch.device) -> torch.Tensor:
        """Empty, for what comes."""
        if self.form == "bf16":
            return torch.empty(values, dtype=torch.bfloat16, device=device)
        codes = int8.room(values)
        return torch.empty(codes + 4 * (codes // int8.BLOCK), dtype=torch.uint8, device=device)

    def encode(self, tensor: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
        """What is sent for `tensor`."""
        flat = tensor.detach().contiguous().view(-1)
        sent = self.buffer(flat.numel(), flat.device)
        if self.form == "bf16":
            casts.narrow(flat, 1.0, sent)
        else:
            codes, scales = _parts(sent)
            int8.quantize(flat, None, codes, scales, int8.key(self.seed, step, microbatch))
        if microbatch == 0:
            back = self.decode(sent, flat.shape, torch.float32)
            error = (back - flat.float()).norm() / flat.float().norm().clamp(min=1e-30)
            # What is not finite is named by the pipeline itself.
            self.lost.append(error.nan_to_num(nan=0.0, posinf=0.0))
        return sent

    def decode(
        self, sent: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor that `encode` made `sent` from, but for what was lost."""
        out = torch.empty(shape, dtype=dtype, device=sent.device)
        if self.form == "bf16":
            casts.widen(sent, 1.0, out.view(-1))
            return out
        codes, scales = _parts(sent)
        int8.dequantize_sum(codes[None], scales[None], 1.0, out.view(-1))
        return out

    def worst(self) -> float:
        """The most that a tensor of this step lost; 0 where nothing was sent so."""
        found = float(torch.stack(self.lost).max()) if self.lost else 0.0
        self.lost.clear()
        return found


def _parts(sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, in one tensor: whole blocks come first, so scales are aligned."""
    codes = sent.numel() * int8.BLOCK // (int8.BLOCK + 4)
    return sent[:codes].view(torch.int8), sent[codes:].view(torch.float32)
