"""The rules on a torch model: autocast, a loss scale for float16, the probe, and the ranks.

Weights, gradients and the optimizer's state stay in float32; autocast chooses what is computed in
half. What the ranks saw is reduced (one small all-reduce per step, on the CPU's backend where there
is one), so all of them switch in the same step.

On a GPU the processor must stay ahead, or the GPU waits for work. So nothing is waited for that was
queued after the forward pass: the loss is copied before the backward pass begins, and what a step
says after that (the scale was halved, the share of zeros) is read in the next one: see `later`.

That zeros among the gradients are more than in full precision is looked at in every 10th step: a
share of zeros is normal (ReLU), so it is compared with the share before the switch, and then with
full precision's of the same batch.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.base.given import given
from evener.errors import UsageError
from evener.precision.aside import aside
from evener.precision.hooks import Hooks
from evener.precision.journal import Journal
from evener.precision.later import Later
from evener.precision.rules import Event, Facts, Limits, Machine

# Steps between two looks at the gradients' zeros, and how many elements of each are looked at.
_LOOK, _SAMPLE = 10, 4096


class Policy:
    """Takes the steps of a training, in full or in half precision.

    model, optimizer: of float32. dtype: torch.float16 or torch.bfloat16; default: bfloat16, on a
    GPU without it float16. device: where the model computes; default: its parameters'. limits: of
    the rules. group: ranks that train together; default: all, where there is a default group.
    """

    @given
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        limits: Limits | None = None,
        group: Any = None,
    ) -> None:
        """Raises UsageError for a model that is not of float32."""
        self.model, self.optimizer = model, optimizer
        narrow = {str(p.dtype) for p in model.parameters() if p.dtype in _HALVES}
        if narrow:
            raise UsageError(
                f"the model has parameters of {', '.join(sorted(narrow))}",
                "keep them in float32 (model.float()): autocast chooses what is computed in half",
            )
        found = next((p.device.type for p in model.parameters()), "cpu")
        self.device = device or found
        if dtype is None:
            cuda16 = self.device == "cuda" and not torch.cuda.is_bf16_supported()
            dtype = torch.float16 if cuda16 else torch.bfloat16
        if dtype not in _HALVES:
            raise UsageError(f"dtype={dtype}", "give torch.float16 or torch.bfloat16")
        self.dtype = dtype
        self.machine = Machine(limits or Limits(), str(dtype).removeprefix("torch."))
        self.scaler = torch.amp.grad_scaler.GradScaler(self.device, enabled=dtype == torch.float16)
        self._journal = Journal(self.machine)
        self._group = group
        self._halved: Later | None = None  # whether the step before halved the scale
        self._zeros = math.nan  # share of zeros among the gradients, in full precision
        self._look: tuple[bool, Later] | None = None  # in half precision?, and the step's share
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._journal.open(rank)
        self._hooks: Hooks | None = None
        self.attach()

    @property
    def half(self) -> bool:
        """Whether the next step is in half precision."""
        return self.machine.half

    def autocast(self, half: bool | None = None) -> Any:
        """The context of a forward pass, as the state is."""
        half = self.half if half is None else half
        return torch.autocast(self.device, self.dtype, enabled=half)

    def step(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One step: the loss, backward, the optimizer's step, no gradients afterwards.

        compute: gives the loss, a scalar; it may be called again for the probe, so it must not take
        a new batch. Gives the loss, detached. Raises UsageError for what gives no such loss.
        """
        if not callable(compute):
            raise UsageError(
                f"step() was given a {type(compute).__name__}",
                "give a function: policy.step(lambda: loss_function(model(x), y))",
            )
        self.detach()
        half = self.half
        scaling = half and self.scaler.is_enabled()
        with self.autocast(half):
            loss = compute()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {list(loss.shape)}" if torch.is_tensor(loss) else repr(loss)
            raise UsageError(f"the function gave {shape}, which is no loss", "give one number")
        seen = Later(loss)
        if scaling:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        # Before the weights change, so that the probe computes with the same.
        halved = self._halved is not None and bool(self._halved.read())
        facts = self.agreed(seen.read(), halved, self._underflow(half))
        self.observe(facts, lambda: self._probe(compute), lambda: self._zeroed(compute))
        self._halved = None
        if scaling:
            one = torch.ones((), device=loss.device)
            before = self.scaler.scale(one)  # on the device: get_scale() would wait for it
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self._halved = Later(self.scaler.scale(one) < before)
        elif math.isfinite(facts.loss):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @given
    def attach(self, method: str = "forward", steps: bool = True) -> Hooks:
        """Put the hooks on: see `evener.precision.hooks`. A new policy has them.

        Raises UsageError for a method that the model does not have.
        """
        if not callable(getattr(self.model, method, None)):
            raise UsageError(
                f"{type(self.model).__name__} has no method {method!r}",
                "name the one that your loop calls, for instance forward",
            )
        self.detach()
        self._hooks = Hooks(self, method, steps)
        return self._hooks

    def detach(self) -> None:
        """Take the hooks off: from now on the program computes as its own code says.

        `step` does that first, because it does what they do.
        """
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    # --- what a step said ---

    def _underflow(self, half: bool) -> float | None:
        """What the step before said about zeros; looks at this one's gradients for the next."""
        found, self._look = self._look, None
        if self.machine.step % _LOOK == 0:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            share = _zero_share(grads)
            self._look = None if share is None else (half, Later(share))
        if found is None:
            return None
        was_half, later = found
        if not was_half:
            known = not math.isnan(self._zeros)
            self._zeros = 0.9 * self._zeros + 0.1 * later.read() if known else later.read()
            return None
        return None if math.isnan(self._zeros) or not half else later.read() - self._zeros

    def observe(
        self, facts: Facts, probe: Callable[[], float], zeros: Callable[[], float] | None
    ) -> None:
        """What follows from a step is logged, and kept in `events`."""
        self._journal.observe(facts, probe, zeros)

    def agreed(self, loss: float, halved: bool = False, underflow: float | None = None) -> Facts:
        """The facts of all ranks: the mean loss, the worst of the others."""
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return Facts(loss, halved, underflow)
        size = dist.get_world_size(self._group)
        cuda = "gloo" not in str(dist.get_backend(self._group)) and self.device == "cuda"
        rows = torch.zeros(size, 3, dtype=torch.float64, device="cuda" if cuda else "cpu")
        place = dist.get_rank(self._group)
        seen = math.nan if underflow is None else underflow
        rows[place] = torch.tensor([loss, float(halved), seen], dtype=torch.float64)
        flat = torch.nan_to_num(rows, nan=1e300, posinf=1e300, neginf=1e300)
        dist.all_reduce(flat, group=self._group)
        losses, halvings, shares = flat.cpu().unbind(1)
        mean = math.inf if bool((losses >= 1e299).any()) else float(losses.mean())
        looked = shares[shares < 1e299]
        return Facts(mean, bool(halvings.any()), float(looked.max()) if looked.numel() else None)

    @torch.no_grad()
    def _probe(self, compute: Callable[[], torch.Tensor]) -> float:
        """The relative difference of this batch's loss in half and in full precision.

        Both without dropout and with the statistics that batch normalization has, which stay as
        they are, and from the same weights as the step's.
        """
        with aside(self.model), self.autocast(True):
            half = float(compute())
        with aside(self.model), self.autocast(False):
            full = float(compute())
        if math.isfinite(full) and math.isfinite(half):
            mine = abs(half - full) / max(abs(full), 1e-12)
        else:
            mine = math.inf if math.isfinite(full) else 0.0
        return self.agreed_probe(mine)

    def _zeroed(self, compute: Callable[[], torch.Tensor]) -> float:
        """The share of this batch's gradients that are zero in half precision and not in full.

        Zeros become more as a training goes on (ReLU, a loss that vanishes), so the share before
        the switch gives a suspicion only. It is what is compared with from now on. Both drop out
        the same, and leave no statistics behind.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        quiet: Any = getattr(self.model, "no_sync", contextlib.nullcontext)
        shares = []
        for half in (True, False):
            with aside(self.model, train=True):
                with quiet(), self.autocast(half):
                    loss = compute()
                if half and self.scaler.is_enabled():
                    loss = self.scaler.scale(loss)
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            share = _zero_share([g for g in found if g is not None])
            shares.append(0.0 if share is None else float(share))
        self._zeros = shares[1]
        return self.agreed_probe(max(shares[0] - shares[1], 0.0))

    def agreed_probe(self, mine: float) -> float:
        """The largest difference on any rank."""
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return mine
        cuda = "gloo" not in str(dist.get_backend(self._group)) and self.device == "cuda"
        worst = torch.tensor([min(mine, 1e300)], dtype=torch.float64)
        worst = worst.cuda() if cuda else worst
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        return float(worst)

    # --- what is kept ---

    @property
    def events(self) -> list[Event]:
        """All that was worth a line."""
        return self._journal.events

    def report(self) -> dict[str, Any]:
        """The state, the share of half steps, and the last events."""
        return self._journal.report()

    def __str__(self) -> str:
        return json.dumps(self.report(), indent=1)


def _zero_share(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The share of zeros, by a sample of each; None where there is nothing to look at."""
    parts = []
    for gradient in gradients:
        if not gradient.is_sparse and gradient.numel():
            flat = gradient.detach().flatten()
            parts.append(flat[:: max(1, flat.numel() // _SAMPLE)])
    if not parts:
        return None
    if len({(part.dtype, part.device, type(part)) for part in parts}) == 1:
        parts = [torch.cat(parts)]  # a few kernels and not two per parameter
    zeros = torch.stack([(part == 0).sum() for part in parts]).sum()
    return zeros / sum(part.numel() for part in parts)


_HALVES = (torch.float16, torch.bfloat16)
