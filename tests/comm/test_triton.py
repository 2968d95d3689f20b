"""The Triton kernels where there is no GPU: interpreted, and compiled for Hopper.

Both run in a process of their own: Triton chooses its interpreter when it is imported.
"""

import os
import subprocess
import sys

import pytest

# Half a minute of processor time; the bound is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(600)

INTERPRETED = """
import torch
from tests import interpreted
from evener.comm.codecs import chunks, int4, int8, sums, topk
from evener.comm.codecs.payload import Payload
from evener.comm.codecs import triton_casts, triton_chunks, triton_int4
from evener.comm.codecs import triton_int8, triton_sums, triton_topk
from tests.comm.cases import CASES, bits

interpreted.stay()
torch.set_num_threads(1)
triton_topk.PROGRAMS = 4
triton_topk.SAMPLES, triton_topk.SAMPLES_EACH = 512, 128
notes = triton_topk.notes

def same(have, want, *what):
    assert torch.equal(bits(have), bits(want)), what

def check_topk(case, n, k, sent, noted=notes, ties=64):
    triton_topk.notes, triton_topk.TIES = noted, ties
    generator = torch.Generator().manual_seed(n)
    have = torch.randn(n, generator=generator)
    want = have.clone()
    for step in range(2):
        what = (case, n, k, sent, ties, step)
        gradient = CASES[case](n, generator)
        wanted = torch.empty(k, dtype=sent), torch.empty(k, dtype=torch.int32)
        topk.select_reference(gradient, want, *wanted)
        values = torch.full((k,), 7.0, dtype=sent)
        indices = torch.full((k,), -1, dtype=torch.int32)
        triton_topk.select(gradient, have, values, indices)
        order = torch.argsort(indices)
        assert torch.equal(indices[order], wanted[1]), what
        same(values[order], wanted[0], *what)
        same(have, want, *what)
    out, total = torch.zeros(n), torch.zeros(n)
    triton_topk.add_entries(out, values, indices, 0.25)
    total[wanted[1].long()] = wanted[0].float() * 0.25
    assert torch.equal(out.nan_to_num(), total.nan_to_num()), (case, n, k)
    # What a network that has failed left behind goes nowhere.
    around = torch.zeros(n + 4)
    wild = torch.tensor([-1, n, -(2**31), 2**31 - 1, 0], dtype=torch.int32)
    triton_topk.add_entries(around[2:-2], torch.ones(5), wild, 1.0)
    assert around.nonzero().flatten().tolist() == [2]

def check_chunks(case, n, k):
    generator = torch.Generator().manual_seed(n)
    have = torch.randn(n, generator=generator)
    want, raws = have.clone(), torch.zeros(2, Payload.size(n, k), dtype=torch.uint8)
    total, out = torch.zeros(n), torch.empty(n)
    for raw in raws:
        gradient = CASES[case](n, generator)
        a = Payload.of(raw, n, k)
        b = Payload.of(torch.zeros_like(raw), n, k)
        triton_chunks.select(gradient, have, a.scales, a.values, a.indices)
        chunks.select_reference(gradient, want, b)
        assert torch.equal(a.indices.int(), b.indices.int()), (case, n, k)
        same(a.scales, b.scales, case, n, k)
        same(a.values, b.values, case, n, k)
        same(have, want, case, n, k)
        chunks.add_reference(b, 0.5, total)
    triton_chunks.add_in_order(raws, k, 0.5, out)
    same(out, total, case, n, k)

def check_int8(case, n, feedback):
    generator = torch.Generator().manual_seed(n)
    room = int8.room(n)
    values, kept = CASES[case](n, generator), torch.randn(n, generator=generator)
    residuals = (kept.clone(), kept.clone()) if feedback else (None, None)
    a = torch.ones(2, room, dtype=torch.int8), torch.ones(2, room // int8.BLOCK)
    b = torch.zeros(2, room, dtype=torch.int8), torch.zeros(2, room // int8.BLOCK)
    for rank, key in enumerate((int8.key(7), 1)):
        triton_int8.quantize(values, residuals[0], a[0][rank], a[1][rank], key)
        int8.quantize_reference(values, residuals[1], b[0][rank], b[1][rank], key)
        assert torch.equal(a[0][rank], b[0][rank]), (case, n)
        same(a[1][rank], b[1][rank], case, n)
        if feedback:
            same(*residuals, case, n)
    out, total = torch.empty(n), torch.empty(n)
    triton_int8.dequantize_sum(*a, 0.5, out)
    int8.dequantize_sum_reference(*b, 0.5, total)
    same(out, total, case, n)

def check_int4(case, n, dtype):
    generator = torch.Generator().manual_seed(n)
    room = int4.room(n)
    values, kept = CASES[case](n, generator).to(dtype), torch.randn(n, generator=generator)
    residuals = kept.clone(), kept.clone()
    a = torch.ones(2, room // 2, dtype=torch.uint8), torch.ones(2, room // int4.BLOCK)
    b = torch.zeros(2, room // 2, dtype=torch.uint8), torch.zeros(2, room // int4.BLOCK)
    for rank in range(2):
        triton_int4.quantize(values, residuals[0], a[0][rank], a[1][rank])
        int4.quantize_reference(values, residuals[1], b[0][rank], b[1][rank])
        assert torch.equal(a[0][rank], b[0][rank]), (case, n)
        same(a[1][rank], b[1][rank], case, n)
        same(*residuals, case, n)
    out, total = torch.empty(n), torch.empty(n)
    triton_int4.dequantize_sum(*a, 0.5, out)
    int4.dequantize_sum_reference(*b, 0.5, total)
    same(out, total, case, n)

def check_sums(case, ranks, n, dtype):
    generator = torch.Generator().manual_seed(n)
    parts = torch.stack([CASES[case](n, generator) for _ in range(ranks)]).to(dtype)
    have, want = parts.new_empty(n), parts.new_empty(n)
    for scale in (1.0, 1 / ranks):
        triton_sums.add_in_order(parts, scale, have)
        sums.add_reference(parts, scale, want)
        same(have, want, case, ranks, n, dtype)

for case, make in CASES.items():
    if case != "huge":  # numpy warns of the overflow
        check_sums(case, 1, 1, torch.float32)
        check_sums(case, 2, 4099, torch.float32)
        check_sums(case, 3, 2050, torch.float16)
    for n, k in ((1, 1), (5001, 50)):
        check_topk(case, n, k, torch.float32)
    check_topk(case, 5001, 50, torch.float16, ties=2)
    # What happens beside the usual way depends on how many values are equal; so the kinds that
    # differ in that are checked in several programs' worth of entries, the others in fewer.
    n, k = (5001, 50) if case in ("normal", "equal", "ties", "nan") else (1201, 12)
    check_topk(case, n, k, torch.float32, lambda n, k: (1, k))  # too few are noted
    check_topk(case, n, k, torch.float16, lambda n, k: (99, k), 2)  # no room for the notes
    check_topk(case, n * 2 // 5, n * 2 // 5, torch.float32)
    for n, k in ((1, 1), (33, 40), (4097, 41)):
        check_chunks(case, n, k)
    for n in (1, 5001):
        check_int8(case, n, n == 5001)
        if case != "huge":
            check_int4(case, n, torch.float32)
            check_int4(case, n, torch.bfloat16)
    values, out = make(4099, torch.Generator()), torch.empty(4099, dtype=torch.float16)
    if case != "huge":  # numpy warns of the overflow
        triton_casts.cast(values, 0.25, out)
        same(out, (values * 0.25).half(), case)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.comm.codecs import triton_casts, triton_chunks, triton_int4, triton_int8, triton_sums
from evener.comm.codecs import triton_topk

constants = {
    triton_topk: {
        "BLOCK": 4096, "BINS": 256, "SAMPLES": 16384, "EACH": 512, "TIES": 4096, "PROGRAMS": 512,
        "WIDTH": 256,
    },
    triton_chunks: {"CHUNK": 4096, "PLACES": 64, "FIRST": 1 << 22, "EACH": 1},
    triton_int8: {"ROWS": 4, "BLOCK": 1024, "FEEDBACK": True, "OWN": False},
    triton_int4: {"ROWS": 8, "BLOCK": 256, "OWN": False},
    triton_casts: {"BLOCK": 4096},
    triton_sums: {"BLOCK": 2048, "RANKS": 2},
}
kernels = {
    triton_topk: [
        "_sample", "_accumulate", "_count_digit", "_take", "_count_ties", "_take_ties", "_settle",
        "_add_entries",
    ],
    triton_chunks: ["_select", "_add_in_order"],
    triton_int8: ["_quantize", "_dequantize_sum"],
    triton_int4: ["_quantize", "_dequantize_sum"],
    triton_casts: ["_cast"],
    triton_sums: ["_add_in_order"],
}
types = {
    "gradient": "*bf16", "residual": "*fp32", "sampled": "*i32", "counts": "*i32", "tied": "*i32",
    "state": "*i32", "noted": "*fp32", "noted_at": "*i32", "values": "*fp16", "out": "*fp32",
    "parts": "*bf16", "scale": "fp32", "factor": "fp32", "scales": "*fp32", "codes": "*i8",
    "kept": "*fp32", "own": "*fp32",
}
for module, names in kernels.items():
    for name in names:
        kernel = getattr(module, name)
        for digit in ((23, 31), (0, 7)) if name == "_count_digit" else ((0, 0),):
            known = {**constants[module], "SHIFT": digit[0], "ABOVE": digit[1]}
            if name == "_accumulate":
                known["EACH"] = 1
            own = {n: known[n] for n in kernel.arg_names if n in known}
            given = {**types, "indices": "*i16" if module is triton_chunks else "*i32"}
            if module is triton_int4:
                given |= {"codes": "*u8", "values": "*bf16"}
            signature = {
                n: "constexpr" if n in own else given.get(n, "i32") for n in kernel.arg_names
            }
            source = ASTSource(kernel, signature, own)
            made = triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}
            )
            assert len(made.asm["cubin"]) > 1000, name
"""


def run(script: str, **env: str) -> None:
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, **env}, timeout=580
    )


def test_the_kernels_in_the_interpreter_equal_the_references() -> None:
    run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_hopper() -> None:
    """No GPU is needed to compile: what the interpreter accepts, the compiler may not."""
    run(COMPILED)
