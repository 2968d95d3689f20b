"""When to compute in half precision and when not: a state machine of what each step said. No torch.

    WARM   full precision, until the loss has settled
    HALF   half precision
    HOLD   full precision again, for a while that doubles each time

From WARM (or HOLD, when its time is over) to HALF: the loss was finite and did not rise for
`settle` steps. From HALF to HOLD, each for a reason that is named:

    halvings    the loss scale was halved 3 times in 100 steps
    underflow   over 5% more of the same batch's gradients are exactly zero than in full precision
    loss        the loss is not finite; or its fast average has been more than 4 standard deviations
                above its slow one for 3 steps; and the probe says that precision is the cause

The *probe* computes the loss of the same batch in full precision. Precision is the cause if the
two differ by more than the half format can tell apart (its epsilon: 2^-10 for float16, 2^-7 for
bfloat16), which is what rounding alone may do to a small batch, and by a tenth of the rise at
least. Otherwise the data are the cause: that is reported, and nothing is switched. So data that
drift do not switch anything.

All inputs are the same on all ranks (`Facts` are reduced first), so all ranks decide the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from evener.base.given import fields


class State(Enum):
    """What the steps are computed in, and why."""

    WARM = "fp32, warming up"
    HALF = "half"
    HOLD = "fp32, holding"


@fields
@dataclass(frozen=True)
class Limits:
    """The numbers of the rules.

    settle: steps without trouble before half precision. hold: steps of the first return to full
    precision; it doubles up to longest_hold, and is forgiven after `forgive` steps of half.
    fast, slow: lengths of the averages, in steps. sigmas, for_steps: of the loss rule. difference:
    relative, of the probe; None: the half format's epsilon. explains: how much of a rise that
    difference must be. halvings, window: of the scale rule. underflow: share of gradients. quiet:
    steps in which the same cause is not reported again.
    """

    settle: int = 200
    hold: int = 200
    longest_hold: int = 3200
    forgive: int = 2000
    fast: int = 5
    slow: int = 50
    sigmas: float = 4.0
    for_steps: int = 3
    difference: float | None = None
    explains: float = 0.1
    halvings: int = 3
    window: int = 100
    underflow: float = 0.05
    quiet: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")


@dataclass(frozen=True)
class Facts:
    """What a step said. loss: the mean over the ranks.

    halved: the loss scale was halved on some rank, and the step skipped. underflow: by how much
    more of the gradients is zero than in full precision; None where it was not looked at.
    """

    loss: float
    halved: bool = False
    underflow: float | None = None


@dataclass(frozen=True)
class Event:
    """Something worth a line. switched: the state is another one from the next step on."""

    step: int
    before: State
    after: State
    cause: str
    text: str

    @property
    def switched(self) -> bool:
        """Whether the precision has changed."""
        return (self.before is State.HALF) != (self.after is State.HALF)


# The relative difference between a batch's loss in half and in full precision; inf where only the
# one in full precision is finite, 0 where neither is.
Probe = Callable[[], float]

# The distance from 1 to the next number of each half format.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass
class Machine:
    """The state, and what it remembers. dtype: of half precision, a name in EPSILON."""

    limits: Limits = field(default_factory=Limits)
    dtype: str = "bfloat16"
    state: State = State.WARM
    step: int = 0
    half_steps: int = 0
    switches: int = 0

    def __post_init__(self) -> None:
        self._hold = self.limits.hold
        self._since = 0  # steps in this state without trouble
        self._left = 0  # steps of HOLD that are left
        self._high = 0
        self._halvings: deque[int] = deque()
        self._fast = self._slow = self._variance = math.nan
        self._seen = 0
        self._said: dict[str, int] = {}

    @property
    def half(self) -> bool:
        """Whether the next step is in half precision."""
        return self.state is State.HALF

    @property
    def suspects(self) -> bool:
        """Whether the last loss looked too high: the probe may be asked for soon."""
        return self._high > 0

    def observe(
        self, facts: Facts, probe: Probe, zeros: Callable[[], float] | None = None
    ) -> list[Event]:
        """What follows from a step.

        probe: called where the loss alone does not tell the cause. zeros: called where underflow
        is suspected; the share of gradients that are zero in half precision and not in full, of
        the same batch. Without it the suspicion is enough.
        """
        self.step += 1
        self.half_steps += self.half
        rises = self._average(facts.loss)
        if self.half:
            return self._in_half(facts, rises, probe, zeros)
        return self._in_full(facts, rises)

    def _average(self, loss: float) -> bool:
        """Take the loss into the averages; whether it is far above them now."""
        if not math.isfinite(loss):
            return False
        limits = self.limits
        if self._seen == 0:
            self._fast = self._slow = loss
            self._variance = 0.0
        self._seen += 1
        # From the fast one: a loss that falls is no noise. At most 3 deviations upwards, or a jump
        # that is not noticed in its first step would make itself look usual.
        gap, beyond = loss - self._fast, loss - self._slow
        if self._seen > limits.slow:
            most = 3 * math.sqrt(self._variance) + 1e-3 * abs(self._slow)
            gap, beyond = min(gap, most), min(beyond, most)
        # The slow one and its spread are of the steps before, or a jump would hide itself.
        self._fast += (loss - self._fast) / min(self._seen, limits.fast)
        spread = math.sqrt(self._variance) / math.sqrt(limits.fast)
        floor = 1e-3 * abs(self._slow) + 1e-12
        rises = (
            self._seen > limits.slow
            and (self._fast - self._slow) / max(spread, floor) > limits.sigmas
        )
        self._high = self._high + 1 if rises else 0
        rate = 1 / min(self._seen, limits.slow)
        if not rises:
            self._variance += rate * (gap**2 - self._variance)
            self._slow += rate * beyond
        elif self._high >= 4 * limits.fast:
            # It stays up here: this is the level now.
            self._slow, self._high = self._fast, 0
        return rises

    def _in_full(self, facts: Facts, rises: bool) -> list[Event]:
        events = []
        trouble = not math.isfinite(facts.loss)
        if trouble or self._high == self.limits.for_steps:
            what = "is not finite" if trouble else "has jumped"
            events += self._report("data", f"the loss {what} in full precision")
        self._since = 0 if trouble or rises else self._since + 1
        self._left = max(self._left - 1, 0)
        if self._left == 0 and self._since >= self.limits.settle:
            events.append(self._enter(State.HALF, "settled", f"{self._since} quiet steps"))
        return events

    def _in_half(
        self, facts: Facts, rises: bool, probe: Probe, zeros: Callable[[], float] | None
    ) -> list[Event]:
        limits = self.limits
        self._since += 1
        if self._since > limits.forgive:
            self._hold = limits.hold
        if facts.halved:
            self._halvings.append(self.step)
        while self._halvings and self._halvings[0] <= self.step - limits.window:
            self._halvings.popleft()
        if len(self._halvings) >= limits.halvings:
            count = len(self._halvings)
            return [
                self._leave("halvings", f"{count} halvings of the scale in {limits.window} steps")
            ]
        if facts.underflow is not None and facts.underflow > limits.underflow:
            share = facts.underflow if zeros is None else zeros()
            if share > limits.underflow:
                text = f"{share:.1%} of the gradients have become zero"
                return [self._leave("underflow", text)]
        wrong = not math.isfinite(facts.loss)
        # A skipped step's loss is not finite where the scale was only too high.
        if (wrong and not facts.halved) or (rises and self._high == limits.for_steps):
            difference = probe()
            what = "is not finite" if wrong else "has jumped"
            if self._precision_is_the_cause(difference, facts.loss):
                text = f"the loss {what}; in full precision it differs by {difference:.2g}"
                return [self._leave("loss", text)]
            return self._report("data", f"the loss {what}, in full precision too")
        return []

    def _precision_is_the_cause(self, difference: float, loss: float) -> bool:
        """difference: of the probe, relative to full precision. loss: in half precision."""
        least = self.limits.difference or EPSILON[self.dtype]
        if difference <= least:
            return False
        if not math.isfinite(loss) or not math.isfinite(difference):
            return True
        # In the loss's own unit: of two losses the one in half is here, the other one is not.
        by = abs(loss) * difference / (1 + difference)
        return by >= self.limits.explains * (self._fast - self._slow)

    def _report(self, cause: str, text: str) -> list[Event]:
        if self.step - self._said.get(cause, -self.limits.quiet) < self.limits.quiet:
            return []
        self._said[cause] = self.step
        return [Event(self.step, self.state, self.state, cause, text)]

    def _leave(self, cause: str, text: str) -> Event:
        self._left, self._hold = self._hold, min(2 * self._hold, self.limits.longest_hold)
        return self._enter(State.HOLD, cause, f"{text}; full precision for {self._left} steps")

    def _enter(self, state: State, cause: str, text: str) -> Event:
        before, self.state = self.state, state
        self._since, self._high = 0, 0
        self._fast = self._slow  # what the other precision has left in it says nothing
        self._halvings.clear()
        self.switches += 1
        return Event(self.step, before, state, cause, text)
