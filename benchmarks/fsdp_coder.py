"""How fast a GPU turns weights into differences and back, beside a public entropy coder for GPUs.

    python benchmarks/fsdp_coder.py [--size 350m] [--steps 30] [--rates 3e-4,3e-5] [--json FILE]
    pip install nvidia-nvcomp-cu13      # the peer: ANS of nvCOMP

A GPT of hsdp.py trains on random words with AdamW in bf16 weights and float32 masters, as FSDP2
does; the last step's weights, old and new, are what is coded. GB/s are bytes of bf16 weights per
second of the device, medians of 20 calls: `encode` chooses the parameters and writes, `decode`
turns the old weights into the new ones. The peer codes the bytes of the same differences in two
planes, low bytes and high ones, which are made before its time begins; its `decode` gives these
planes back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import fsdp_bits
import harness
import hsdp
import torch

from evener.comm.codecs import differences


def pair(size: str, steps: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """New and old weights of the last step; bf16 [n] on the GPU."""
    layers, width, heads, length, rows, words = hsdp.SIZES[size]
    torch.manual_seed(0)
    model = hsdp.GPT(layers, width, heads, words).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    old = fsdp_bits.weights(model)
    for _ in range(steps):
        old = fsdp_bits.weights(model)
        batch = torch.randint(0, words, (rows // 2, length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return fsdp_bits.weights(model), old


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """The median time that the device takes."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def evener(new: torch.Tensor, old: torch.Tensor) -> dict[str, Any]:
    headers = differences.plan(new, old)
    words = int(differences.size(headers))
    message = torch.empty(words, dtype=torch.int32, device="cuda")

    said = torch.empty(1, dtype=torch.int64, device="cuda")

    def encode() -> None:
        headers = differences.plan(new, old)
        differences.write(new, old, headers, differences.places(headers, said), message)

    encode()
    there = old.clone()
    differences.read(message, there)
    assert torch.equal(there.view(torch.int16), new.view(torch.int16))
    took, back = seconds(encode), seconds(lambda: differences.read(message, there))
    return {
        "bits": 32 * words / new.numel(),
        "encode_GBps": 2e-9 * new.numel() / took,
        "decode_GBps": 2e-9 * new.numel() / back,
    }


def nvcomp(z: torch.Tensor) -> dict[str, Any]:
    """ANS over both planes of the differences; they must come back as they were."""
    from nvidia import nvcomp as peer  # type: ignore[import-not-found]

    low = (z & 0xFF).to(torch.uint8)
    high = (z.clamp(max=0xFFFF) >> 8).to(torch.uint8)
    codec = peer.Codec(algorithm="ANS")
    planes = [peer.as_array(plane) for plane in (low, high)]
    coded = [codec.encode(plane) for plane in planes]
    for plane, each in zip((low, high), coded, strict=True):
        back = torch.as_tensor(codec.decode(each), device="cuda").view(torch.uint8)
        assert torch.equal(back, plane)
    took = seconds(lambda: [codec.encode(plane) for plane in planes])
    back = seconds(lambda: [codec.decode(each) for each in coded])
    return {
        "bits": 8 * sum(each.size for each in coded) / z.numel(),
        "encode_GBps": 2e-9 * z.numel() / took,
        "decode_GBps": 2e-9 * z.numel() / back,
    }


def main() -> None:
    """A row for each coder and rate."""
    parser = harness.arguments(__doc__, json="fsdp-coder.json")
    parser.add_argument("--size", choices=hsdp.SIZES, default="350m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rates", default="3e-4,3e-5")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rate in map(float, given.rates.split(",")):
        new, old = pair(given.size, given.steps, rate)
        z = fsdp_bits.zigzag(new, old)
        known = {"rate": rate, "weights": new.numel(), "entropy": fsdp_bits.entropy(z)}
        rows.append({"coder": "evener", **known, **evener(new, old)})
        try:
            rows.append({"coder": "nvcomp ANS", **known, **nvcomp(z)})
        except Exception as error:  # noqa: BLE001 - a peer that does not run is a row too
            rows.append(
                {"coder": "nvcomp ANS", **known, "failed": f"{type(error).__name__}: {error}"}
            )
        del z, new, old
        torch.cuda.empty_cache()
    keys = ("coder", "rate", "bits", "entropy", "encode_GBps", "decode_GBps", "failed")
    print(harness.show(list(keys), [[row.get(key) for key in keys] for row in rows]))
    harness.keep(given, ("nvidia-nvcomp-cu13",), rows=rows)


if __name__ == "__main__":
    main()
