"""What would make a model fit that does not: each setting is planned, none is guessed.

One setting at a time; where no host memory alone is enough, GPU memory and host memory together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from evener.base import budget as budgets
from evener.zero.config import Config
from evener.zero.planner import Fit, Machine, Plan
from evener.zero.planning import plan_units
from evener.zero.profile import Profile
from evener.zero.units import Unit

_MOST = 1 << 44
_STEP = 10_000_000


def nearest(
    units: list[Unit],
    config: Config,
    machine: Machine,
    budget: budgets.Budget,
    tokens: int,
    ranks: int,
    profile: Profile | None,
    replicas: int = 1,
) -> list[Fit]:
    """Settings near to these that would fit: one of each kind, where there is one.

    `tokens`: of a micro-batch. More GPUs are taken to be in the same host, with its memory.
    """

    def made(
        given: Config = config,
        limit: budgets.Budget = budget,
        profile: Profile | None = profile,
        ranks: int = ranks,
        tokens: int = tokens,
    ) -> Plan:
        return plan_units(units, given, machine, limit, tokens, ranks, profile, replicas)

    def least(limit: budgets.Budget, kind: str) -> tuple[int, Plan] | None:
        """The smallest budget of that kind that fits, the other as it is in `limit`."""

        def of(size: int) -> Plan:
            gpu = kind == "gpu"
            return made(limit=replace(limit, gpu=size) if gpu else replace(limit, host=size))

        low, high, best = 0, _MOST, of(_MOST)
        if not best.fits:
            return None
        while high - low > _STEP:
            middle = (low + high) // 2
            found = of(middle)
            low, high, best = (low, middle, found) if found.fits else (middle, high, best)
        return high, best

    def single() -> Iterator[Fit | None]:
        host, gpu = least(budget, "host"), least(budget, "gpu")
        if host:
            size = _gb(host[0])
            words = f"{size[:-2]} GB of host memory (--host {size})"
            yield _fit(f"a host budget of {size}", words, host)
        if gpu:
            size = _gb(gpu[0])
            words = f"{size[:-2]} GB of GPU memory (--gpu {size})"
            yield _fit(f"a gpu budget of {size}", words, gpu)
        if not host:
            yield both(gpu[0] if gpu else 2 * _MOST)
        wide = made(limit=replace(budget, ssd=1 << 50))
        if wide.fits and wide.ssd_bytes:
            size = _gb(wide.ssd_bytes)
            known = wide if machine.ssd else replace(wide, step_seconds=0.0, tokens_per_second=0.0)
            yield _fit(
                f'an SSD: "ssd": "/folder:{size}" in the budget',
                f"{size[:-2]} GB of an SSD (--ssd /folder:{size})",
                (0, known),
            )
        for more in (2, 4, 8):
            shared = replace(budget, host=budget.host // more)
            if (plan := made(limit=shared, ranks=ranks * more)).fits:
                many = f"{ranks * more} GPUs in this host"
                yield _fit(many, f"{many} (--ranks {ranks * more})", (0, plan))
                break
        if config.checkpointing != "auto":
            plan = made(replace(config, checkpointing="auto"))
            if plan.fits:
                words = "activations recomputed or on the host (--checkpointing auto)"
                yield _fit('evener.checkpointing = "auto"', words, (0, plan))
        if config.moments == torch.float32:
            plan = made(replace(config, moments=torch.bfloat16))
            if plan.fits:
                words = "moments in BF16 (--moments bf16)"
                yield _fit('evener.moments = "bf16"', words, (0, plan))
        yield fewer_rows()

    def fewer_rows() -> Fit | None:
        """The largest batch, of halves and quarters and so on, that fits."""
        ways = [(config, "")]
        if config.checkpointing != "auto":
            ways.append((replace(config, checkpointing="auto"), " --checkpointing auto"))
        batch = tokens if profile is None else profile.rows
        what = "tokens" if profile is None else "rows"
        for part in (2**n for n in range(1, batch.bit_length())):
            for given, also in ways:
                less = None if profile is None else profile.scaled(batch // part)
                if made(given, profile=less, tokens=tokens // part).fits:
                    words = f"a batch of {batch // part} instead of {batch} {what}"
                    rows = 1 if profile is None else batch // part
                    option = f"--batch {rows}x{tokens // part // rows}{also}"
                    # Its times are not known: those of a profile are of all rows.
                    return Fit(words, f"{words} ({option})", 0.0, 0.0)
        return None

    def both(alone: int) -> Fit | None:
        """The least GPU memory with host memory as it takes, and the host memory beside it.

        None where GPU memory `alone` is nearly as little.
        """
        gpu = least(replace(budget, host=_MOST), "gpu")
        host = gpu and least(replace(budget, gpu=gpu[0]), "host")
        if gpu is None or host is None or alone < 2 * gpu[0]:
            return None
        one, other = _gb(gpu[0]), _gb(host[0])
        words = f"{one[:-2]} GB of GPU memory and {other[:-2]} GB of host memory"
        setting = f"a gpu budget of {one} with a host budget of {other}"
        return _fit(setting, f"{words} (--gpu {one} --host {other})", host)

    return [fit for fit in single() if fit is not None]


def _fit(setting: str, option: str, found: tuple[int, Plan]) -> Fit:
    return Fit(setting, option, found[1].step_seconds, found[1].tokens_per_second)


def _gb(size: int) -> str:
    """Rounded up to the next hundredth: what it says is enough."""
    return f"{size / 1e9 + 0.005:.2f}GB"
