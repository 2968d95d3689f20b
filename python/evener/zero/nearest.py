"""What would make a model fit that does not: each setting is planned, none is guessed.

One setting at a time; where no host memory alone is enough, GPU memory and host memory together,
and where no smaller states alone are, these with host memory.

A plan plays the traced step for each size that it tries, and a search for the least budget would
plan dozens of times: minutes for 60 blocks. So the least is computed (`planner.least_gpu`,
`Ways.least_host`), planned once, and what was played is kept (`Profile.played`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from evener.base import budget as budgets
from evener.errors import UsageError
from evener.zero.config import MOMENTS, Config
from evener.zero.in_backward import refuse
from evener.zero.planner import Fit, Machine, Plan
from evener.zero.planning import Ways, formats_of
from evener.zero.profile import Profile
from evener.zero.states import BLOCK
from evener.zero.units import LEAST, Group, Unit

_MOST = 1 << 44
TRIES = 8
"""Sizes that are planned, each a hundredth larger, until the one that was computed fits."""


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

    whole = any(group.matrices for unit in units for group in unit.groups)

    def ways(
        given: Config = config,
        profile: Profile | None = profile,
        ranks: int = ranks,
        tokens: int = tokens,
        cut: list[Unit] = units,
    ) -> Ways:
        return Ways.of(cut, given, machine, tokens, ranks, profile, replicas)

    def least(limit: budgets.Budget, kind: str, of: Ways) -> tuple[int, Plan] | None:
        """The smallest budget of that kind that fits, the other as it is in `limit`."""
        gpu = kind == "gpu"
        size = of.least_gpu(limit) if gpu else of.least_host(limit)
        for _ in range(TRIES if size is not None else 0):
            assert size is not None
            made = of.best(replace(limit, gpu=size) if gpu else replace(limit, host=size))
            if made is not None:
                return size, made
            size += size // 100  # with a chunk less on the host, pools had more holes
        return None

    def rounded(given: Config) -> tuple[Ways, budgets.Budget]:
        """With other moments. The profile is of these chunks: those of one byte would be without
        small parameters, which are taken to be on the GPU besides."""
        if given.moments != torch.int8:
            return ways(given), budget
        cut = [replace(unit, groups=[_blocks(group) for group in unit.groups]) for unit in units]
        pieces = [(g, p) for unit in units for g in unit.groups if g.trainable for p in g.pieces]
        beside = sum(
            p.numel * formats_of(config).device_bytes(len(group.rule.moments))
            for group, p in pieces
            if p.numel < LEAST
        )
        return ways(given, cut=cut), replace(budget, gpu=budget.gpu - int(beside))

    def single() -> Iterator[Fit | None]:
        here = ways()
        host, gpu = least(budget, "host", here), least(budget, "gpu", here)
        if host:
            size = _gb(host[0])
            words = f"{size[:-2]} GB of host memory (--host {size})"
            yield _fit(f"a host budget of {size}", words, host)
        if gpu:
            size = _gb(gpu[0])
            words = f"{size[:-2]} GB of GPU memory (--gpu {size})"
            yield _fit(f"a gpu budget of {size}", words, gpu)
        if not host:
            yield both(here, gpu[0] if gpu else 2 * _MOST)
        wide = here.best(replace(budget, ssd=1 << 50))
        if wide and wide.ssd_bytes:
            size = _gb(wide.ssd_bytes)
            known = wide if machine.ssd else replace(wide, step_seconds=0.0, tokens_per_second=0.0)
            yield _fit(
                f'an SSD: "ssd": "/folder:{size}" in the budget',
                f"{size[:-2]} GB of an SSD (--ssd /folder:{size})",
                (0, known),
            )
        for more in () if config.optimizer_in_backward else (2, 4, 8):
            shared = replace(budget, host=budget.host // more)
            if plan := ways(ranks=ranks * more).best(shared):
                many = f"{ranks * more} GPUs in this host"
                yield _fit(many, f"{many} (--ranks {ranks * more})", (0, plan))
                break
        free = ways(replace(config, checkpointing="auto"))
        if config.checkpointing != "auto" and (plan := free.best(budget)):
            words = "activations recomputed or on the host (--checkpointing auto)"
            yield _fit('evener.checkpointing = "auto"', words, (0, plan))
        early = replace(config, optimizer_in_backward=True)
        with contextlib.suppress(UsageError):
            refuse(early, ranks * replicas)
            if not config.optimizer_in_backward and (plan := ways(early).best(budget)):
                words = "no gradients kept, and no clipping (--optimizer-in-backward)"
                yield _fit("evener.optimizer_in_backward = true", words, (0, plan))
        yield lossy(host)
        yield fewer_rows()

    def lossy(host: tuple[int, Plan] | None) -> Fit | None:
        """The first of smaller states that fit. Where none do: the smallest, with host memory, if
        that is less than the lossless ones take (`host`)."""
        forms = [("bf16", True)] if whole else [("bf16", True), ("int8", True)]
        if not whole and config.dtype == torch.bfloat16:
            forms.append(("int8", False))
        last: tuple[str, str, str, Ways, budgets.Budget] | None = None
        for value, master in forms:
            moments = MOMENTS[value]
            if (moments.itemsize, master) >= (config.moments.itemsize, config.master):
                continue
            made, limit = rounded(replace(config, moments=moments, master=master and config.master))
            words = f"moments in {'8 bits' if value == 'int8' else 'BF16'}"
            setting, option = f'evener.moments = "{value}"', f"--moments {value}"
            if not master:
                words += " and no exact copy of the weights"
                setting, option = f"{setting}, evener.master = false", f"{option} --no-master"
            if plan := made.best(limit):
                return _fit(setting, f"{words} ({option})", (0, plan))
            last = words, setting, option, made, limit
        if host is None or last is None:
            return None
        words, setting, option, made, limit = last
        less = least(limit, "host", made)
        if less is None or less[0] >= host[0]:
            return None
        size = _gb(less[0])
        return _fit(
            f"{setting} with a host budget of {size}",
            f"{words}, and {size[:-2]} GB of host memory ({option} --host {size})",
            less,
        )

    def fewer_rows() -> Fit | None:
        """The largest batch, of halves and quarters and so on, that fits."""
        tried = [(config, "")]
        if config.checkpointing != "auto":
            tried.append((replace(config, checkpointing="auto"), " --checkpointing auto"))
        batch = tokens if profile is None else profile.rows
        what = "tokens" if profile is None else "rows"
        for part in (2**n for n in range(1, batch.bit_length())):
            for given, also in tried:
                less = None if profile is None else profile.scaled(batch // part)
                if ways(given, profile=less, tokens=tokens // part).best(budget):
                    words = f"a batch of {batch // part} instead of {batch} {what}"
                    rows = 1 if profile is None else batch // part
                    option = f"--batch {rows}x{tokens // part // rows}{also}"
                    # Its times are not known: those of a profile are of all rows.
                    return Fit(words, f"{words} ({option})", 0.0, 0.0)
        return None

    def both(here: Ways, alone: int) -> Fit | None:
        """The least GPU memory with host memory as it takes, and the host memory beside it.

        None where GPU memory `alone` is nearly as little.
        """
        gpu = least(replace(budget, host=_MOST), "gpu", here)
        host = gpu and least(replace(budget, gpu=gpu[0]), "host", here)
        if gpu is None or host is None or alone < 2 * gpu[0]:
            return None
        one, other = _gb(gpu[0]), _gb(host[0])
        words = f"{one[:-2]} GB of GPU memory and {other[:-2]} GB of host memory"
        setting = f"a gpu budget of {one} with a host budget of {other}"
        return _fit(setting, f"{words} (--gpu {one} --host {other})", host)

    return [fit for fit in single() if fit is not None]


def _blocks(group: Group) -> Group:
    """The same chunk for moments of one byte."""
    numel = sum(-(-piece.numel // BLOCK) * BLOCK for piece in group.pieces)
    return replace(group, align=BLOCK, numel=numel) if group.trainable else group


def _fit(setting: str, option: str, found: tuple[int, Plan]) -> Fit:
    return Fit(setting, option, found[1].step_seconds, found[1].tokens_per_second)


def _gb(size: int) -> str:
    """Rounded up to the next hundredth: what it says is enough."""
    return f"{size / 1e9 + 0.005:.2f}GB"
