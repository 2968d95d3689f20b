"""What a row of gradients has beside its codes: norms and biases, and what is kept for later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from evener.comm.codecs import rows
from evener.comm.wires.blocks import BlockWire
from evener.comm.wires.int4 import Int4Wire
from evener.comm.wires.int8 import Int8Wire

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

KERNELS = """
import sys, torch
from evener.comm.codecs import int4, int8, rows, triton_int4, triton_int8, triton_rows
from tests.comm.cases import bits

torch.set_num_threads(1)
device = torch.device(sys.argv[1])
if device.type == "cpu":
    from tests import interpreted
    interpreted.stay()
    # Triton's interpreter cuts to bf16 what a GPU rounds, and has other numbers below the normal.
    from triton.runtime import interpreter
    import triton.language as tl

    def convert(data, kind, other, mode):
        found = torch.from_numpy(data.copy())
        if other == tl.bfloat16:
            return found.bfloat16().view(torch.int16).numpy().view("uint16")
        return found.view(torch.int16).view(torch.bfloat16).float().numpy()

    interpreter._convert_float = convert
    triton_rows.SMALL, triton_rows.BLOCK = 32, 4096

def same(have, want, *what):
    assert have.dtype == want.dtype, what
    have = have.cpu()
    assert torch.equal(have.isnan(), want.isnan()), what
    assert torch.equal(bits(have.nan_to_num(7.0)), bits(want.nan_to_num(7.0))), what

def there(*tensors):
    return [tensor.to(device, copy=True) for tensor in tensors]

every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
chance = torch.Generator().manual_seed(3)
mixed = every[torch.randperm(every.numel(), generator=chance)]
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for nodes, own in ((2, 0), (2, 1), (3, 1)):
        given = mixed[: 999 * nodes].to(dtype).view(nodes, 999)
        places = torch.randperm(999, generator=chance)[:70].sort().values
        room = 32 + 16 * (-(-70 * given.element_size() // 16))
        want, sent = given.clone(), torch.zeros(nodes, room, dtype=torch.uint8)
        have, placed, message = there(given, places, sent)
        rows.take_reference(want, own, places, sent, 32)
        triton_rows.take(have, own, placed, message, 32)
        same(have, want, dtype, nodes)
        assert torch.equal(message.cpu(), sent) and sent.any()
        for kind in (dtype, torch.float32):
            out = torch.randn(999, generator=chance).to(kind)
            out[places[3]] = float("nan")
            row, = there(out)
            triton_rows.give(message, 32, placed, have[own], row)
            rows.give_reference(sent, 32, places, given[own], out)
            same(row, out, dtype, kind)

# Every rounding to bf16: each pattern, and a quarter, a half and three quarters of a unit above it.
whole = every.view(torch.int16).to(torch.int32) << 16
for above in (0, 0x4000, 0x8000, 0xC000):
    left = (whole | above).view(torch.float32)
    left = torch.where(left.isfinite(), left, 0.0)
    for spoilt in (False, True):
        scales = torch.rand(300, generator=chance)
        scales[299] = float("nan") if spoilt else 3e38
        scales[298] = 3e38  # their sum is infinite
        want = every.clone()
        sent, said, have = there(left, scales, every)
        triton_rows.keep(sent, said, have)
        rows.keep_reference(left, scales, want)
        same(have, want, above, spoilt)
        assert torch.equal(bits(want), bits(every)) == spoilt

# Codes from what is kept in bf16, and sums with the own row.
for kind in (torch.bfloat16, torch.float32):
    for n in (1, 5001):
        values = torch.randn(n, generator=chance).to(kind)
        kept = torch.randn(n, generator=chance).bfloat16()
        values[n // 2] = float("inf")
        for codec, triton in ((int8, triton_int8), (int4, triton_int4)):
            room = codec.room(n)
            codes = torch.zeros(room, dtype=torch.int8)
            if codec is int4:
                codes = torch.zeros(room // 2, dtype=torch.uint8)
            key = (9,) if codec is int8 else ()
            scales = torch.zeros(room // codec.BLOCK)
            for narrow in (torch.float32, torch.bfloat16):
                left = torch.zeros(n, dtype=narrow)
                mine = there(values, kept, codes, scales, left)
                codec.quantize_reference(values, kept, codes, scales, *key, left=left)
                triton.quantize(*mine[:4], *key, left=mine[4])
                assert torch.equal(mine[2].cpu(), codes), (codec, kind, n)
                for have, want in zip(mine, (values, kept, codes, scales, left), strict=True):
                    same(have, want, codec, kind, n) if want.is_floating_point() else None
            want = torch.zeros(n, dtype=kind)
            have, = there(want)
            triton.dequantize_sum(mine[2][None], mine[3][None], 1.0, have, mine[0])
            codec.dequantize_sum_reference(codes[None], scales[None], 1.0, want, values)
            same(have, want, codec, kind, n)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.comm.codecs import triton_int4, triton_int8, triton_rows
constants = {"OWN": True, "FEEDBACK": True}
sizes = {triton_rows: {"BLOCK": 256}, triton_int4: {"ROWS": 8, "BLOCK": 256},
         triton_int8: {"ROWS": 4, "BLOCK": 1024}}
types = {
    "rows": "*bf16", "places": "*i64", "sent": "*u8", "came": "*u8", "own": "*bf16",
    "out": "*bf16", "left": "*bf16", "total": "*fp32", "residual": "*bf16", "kept": "*bf16",
    "values": "*bf16", "codes": "*u8", "scales": "*fp32", "factor": "fp32",
}
for module, name in ((triton_rows, "_take"), (triton_rows, "_give"), (triton_rows, "_keep"),
                     (triton_int4, "_quantize"), (triton_int4, "_dequantize_sum"),
                     (triton_int8, "_quantize"), (triton_int8, "_dequantize_sum")):
    kernel = getattr(module, name)
    known = {**constants, **sizes[module]}
    own = {n: known[n] for n in kernel.arg_names if n in known}
    given = {**types, "own": "i32"} if name == "_take" else types
    if module is triton_int8:
        given = {**given, "codes": "*i8"}
    signature = {n: "constexpr" if n in own else given.get(n, "i32") for n in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, signature, own), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8},
    )
    assert len(made.asm["cubin"]) > 1000, name
"""


def run(script: str, *words: str, **env: str) -> None:
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env={**os.environ, **env}, timeout=380,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_the_kernels_in_the_interpreter_equal_the_references() -> None:
    run(KERNELS, "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_on_a_gpu_equal_the_references() -> None:
    run(KERNELS, "cuda")


@pytest.mark.timeout(400)
def test_the_kernels_compile_for_hopper() -> None:
    run(COMPILED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [Int4Wire, Int8Wire])
def test_small_entries_arrive_exact_between_two_nodes(
    wire: type[BlockWire], dtype: torch.dtype
) -> None:
    """And they take no part in what is coded."""
    n, places = 3000, torch.tensor([0, 7, 8, 2999])
    chance = torch.Generator().manual_seed(1)
    given = torch.randn(2, n, generator=chance).to(dtype)
    given[1, places] *= 1000
    sent_to, own = given.clone(), torch.randn(n, generator=chance).to(dtype)
    room = wire.room(n)
    start = wire.size(room)
    sent = torch.zeros(2, start + 32, dtype=torch.uint8)
    rows.take(sent_to, 0, places, sent, start)
    assert torch.equal(sent_to[0], given[0]) and not sent_to[1, places].any()
    codes, scales = wire.views(sent[1:], room)
    kept, left = torch.zeros(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    wire.quantize(sent_to[1], kept, codes[0], scales[0], 5, left)
    assert scales.max() < 1
    out = torch.empty(n, dtype=dtype)
    wire.add_up(*wire.views(sent[1:], room), 1.0, out, own)
    rows.give(sent[1:], start, places, own, out)
    right = (own[places].float() + given[1, places].float()).to(dtype)
    assert torch.equal(out[places], right)
    off = out.float() + left.float() - own.float() - sent_to[1].float()
    off[places] = 0
    # What rounding to 16 bits takes, of what arrives and of what is left.
    assert off.abs().max() < 0.04


@pytest.mark.parametrize("wire", [Int4Wire, Int8Wire])
def test_a_row_that_is_not_finite_leaves_what_is_kept(wire: type[BlockWire]) -> None:
    n = 2000
    values, kept = torch.randn(n), torch.randn(n).bfloat16()
    before = kept.clone()
    room = wire.room(n)
    codes, scales = wire.views(torch.zeros(1, wire.size(room), dtype=torch.uint8), room)
    left = torch.empty_like(kept)
    for bad, stays in ((float("inf"), True), (1.0, False)):
        values[1999] = bad
        wire.quantize(values, kept, codes[0], scales[0], 5, left)
        rows.keep(left, scales[0], kept)
        assert torch.equal(kept, before) == stays
