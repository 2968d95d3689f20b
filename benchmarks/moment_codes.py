"""How far an Adam step is off when its moments have one byte each, by the code that they are in.

    python benchmarks/moment_codes.py [--steps 1500] [--json FILE]

Nothing is trained: 64 blocks of 256 elements get normal gradients, whose sizes within a block are
log-normal (`spread`: of the logarithm). Beside float32 moments run rounded ones, and their updates
are compared: root mean square of the difference over that of the update.

- `tree`: the dynamic tree code of bitsandbytes, scaled by the largest of a block, to the nearest.
- `squares`: the root in a linear code, stochastically.
- `floats`: what `evener.zero` has: 3 bits of mantissa and a shared power of two, stochastically.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch

from evener.zero.states import decode, encode

SETTINGS = ((0.95, 1.0), (0.999, 0.5), (0.999, 2.0))
"""beta2 and spread."""

Code = Callable[[str, torch.Tensor], torch.Tensor]


def _tree(signed: bool) -> torch.Tensor:
    """The values of the tree code: seven decades, each with half of the values of the next."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, count + 1)
        middle = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        found += middle.tolist()
        found += (-middle).tolist() if signed else []
    return torch.tensor(sorted(found))


def _scaled(values: dict[str, torch.Tensor], drawn: bool) -> Code:
    """Rounded to values of a table, times the largest of the block."""

    def code(place: str, x: torch.Tensor) -> torch.Tensor:
        table, largest = values[place], x.abs().amax(1, keepdim=True).clamp(min=1e-38)
        y = (x / largest).contiguous()
        above = torch.searchsorted(table, y).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        share = torch.rand_like(y) if drawn else 0.5
        return torch.where(share * (high - low) < y - low, high, low) * largest

    return code


def _floats(place: str, x: torch.Tensor) -> torch.Tensor:
    random = torch.randint(0, 1 << 16, (x.numel(),))
    return decode(place, *encode(place, x.reshape(-1), random)).view_as(x)


def _squares() -> dict[str, torch.Tensor]:
    half = (torch.arange(128) / 127).square()
    return {
        "first": torch.cat([-half.flip(0)[:-1], half]),
        "second": (torch.arange(256) / 255).square(),
    }


CODES: dict[str, Code] = {
    "tree": _scaled({"first": _tree(True), "second": _tree(False)}, drawn=False),
    "squares": _scaled(_squares(), drawn=True),
    "floats": _floats,
}


def error(code: Code, beta2: float, spread: float, steps: int) -> float:
    """Of the updates after a quarter of the steps."""
    torch.manual_seed(1)
    size = torch.exp(spread * torch.randn(64, 256))
    mean = 0.1 * size * torch.randn(64, 256)
    exact, rough = ([torch.zeros(64, 256), torch.zeros(64, 256)] for _ in range(2))
    off = whole = 0.0
    for step in range(1, steps + 1):
        gradient = mean + size * torch.randn(64, 256)
        updates = []
        for pair in (exact, rough):
            pair[0] = 0.9 * pair[0] + 0.1 * gradient
            pair[1] = beta2 * pair[1] + (1 - beta2) * gradient.square()
            root = (pair[1] / (1 - beta2**step)).sqrt()
            updates.append(pair[0] / (1 - 0.9**step) / (root + 1e-8))
        if step > steps // 4:
            off += (updates[1] - updates[0]).square().mean().item()
            whole += updates[0].square().mean().item()
        rough[:] = code("first", rough[0]), code("second", rough[1])
    return float((off / whole) ** 0.5)


def main() -> None:
    """Run all, and show the table."""
    parser = harness.arguments(__doc__, json="moment-codes.json")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    rows = [
        {"code": name, "beta2": beta2, "spread": spread,
         "error": error(code, beta2, spread, given.steps)}
        for beta2, spread in SETTINGS
        for name, code in CODES.items()
    ]  # fmt: skip
    harness.keep(given, rows=rows)
    shown = [[r["code"], str(r["beta2"]), str(r["spread"]), f"{r['error']:.3g}"] for r in rows]
    print(harness.show(["", "beta2", "spread", "error"], shown))


if __name__ == "__main__":
    main()
