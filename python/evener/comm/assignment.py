"""Which route each bucket takes, and in which form: `exchanges`, one for each bucket.

Three have a say:

    options     what was asked for, where a bucket is worth it (`wires.choose`)
    a planner   (algorithm, form) for each bucket (`choose`), within what is `permitted`
    the guard   where a form had to go: there nothing harsher comes back (`use`)

In the first step, whose layout of buckets is a guess, forms that keep a residual send exactly;
`settle` ends that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from evener.comm import wires
from evener.comm.buckets import Bucket, Buckets
from evener.comm.exchange import Exchange
from evener.comm.groups import Communicators, Route
from evener.comm.options import Options
from evener.comm.parts import Parts
from evener.comm.rows import RowsExchange
from evener.comm.wires import Wire


class Assignment:
    """How one reducer's buckets are assigned."""

    def __init__(
        self, names: Sequence[str], options: Options, communicators: Communicators, parts: Parts
    ) -> None:
        """`names`: of the parameters, by index."""
        self.exchanges: list[Exchange] = []
        self._names = names
        self._options = options
        self._communicators = communicators
        self._parts = parts
        self._buckets: Buckets | None = None
        self._settled = False
        self._choices: tuple[tuple[str, str], ...] | None = None
        self._fallen: dict[int, str] = {}  # by the guard's verdict: bucket to form
        self._wires: dict[tuple[int, str], Wire] = {}

    def lay_out(self, buckets: Buckets) -> None:
        """These are the buckets from now on, and nothing is known of them."""
        self._buckets = buckets
        self._fallen = {}
        self._make()

    def settle(self) -> None:
        """The first step is over: the next layout, or `refresh`, may keep residuals."""
        self._settled = True

    def refresh(self) -> None:
        """The layout stays as it is, and each bucket takes the form that it is to have."""
        for exchange in self.exchanges:
            exchange.wire = self._wire(
                exchange.route, self._first_form(exchange.route, exchange.bucket)
            )

    def choose(self, choices: Sequence[tuple[str, str]]) -> bool:
        """A planner's (algorithm, form) for each bucket; `apply` makes it so.

        Whether what a bucket keeps has to move to other ranks, by a checkpoint, for that.
        """
        self._choices = tuple(choices)
        return any(
            exchange.state.residual is not None or exchange.state.velocity is not None
            for exchange in self.exchanges
            if exchange.route.levels != self._route_of(exchange.bucket).levels
        )

    def apply(self, *, keep: bool) -> None:
        """What was chosen holds from the next step on. `keep`: and all keep what they remember."""
        before = self.exchanges
        self._make()
        if keep:
            for exchange, same in zip(self.exchanges, before, strict=True):
                exchange.state = same.state
        # Those that no bucket uses any more hold scratch memory.
        used = {id(exchange.wire) for exchange in self.exchanges}
        self._wires = {key: wire for key, wire in self._wires.items() if id(wire) in used}

    def use(self, bucket: int, form: str) -> None:
        """From the next step on, exchange `bucket` in `form`, or what a planner finds milder.

        Between steps, on all ranks alike.
        """
        exchange = self.exchanges[bucket]
        self._fallen[bucket] = form
        exchange.wire = self._wire(exchange.route, form)

    def permitted(self, index: int, form: str) -> bool:
        """Whether a planner may send this bucket in `form`.

        Not norms, not small shards, and not what the guard has fallen back from.
        """
        exchange = self.exchanges[index]
        fallen = self._fallen.get(index)
        if fallen is not None and wires.milder(form, fallen) != form:
            return False
        options = dataclasses.replace(self._options, wire=form)
        return wires.choose(options, exchange.route, exchange.bucket) == form

    @property
    def compresses(self) -> bool:
        """Whether any bucket is sent in another form than exact now."""
        return any(exchange.wire.name != "exact" for exchange in self.exchanges)

    def why_exact(self) -> str:
        """Where a lossy form was asked for and some buckets go exact: a line that says why."""
        form, forms = self._options.wire, self.forms()
        exact = forms.count("exact")
        if form == "exact" or not exact:
            return ""
        levels = self._communicators.route.levels
        if levels.nodes == 1 or not levels.crosses:
            why = "nothing crosses a network"
        else:
            why = "norms, biases and gradients of 16 bits do"
            if wires.get(form).sparse:
                why += f", and what is below LIGHT_TOPK_THRESHOLD ({self._options.topk_min_bytes})"
        return f"{exact} of {len(forms)} buckets go exact and not in {form}: {why}"

    def forms(self) -> list[str]:
        """By bucket, the form that it is to have once the layout is settled."""
        return [self._form(exchange.bucket, exchange.route) for exchange in self.exchanges]

    # --- one bucket ---

    def _make(self) -> None:
        assert self._buckets is not None
        self.exchanges = []
        for bucket in self._buckets:
            route = self._route_of(bucket)
            wire = self._wire(route, self._first_form(route, bucket))
            names = [self._names[slot.index] for slot in bucket.slots]
            kind = RowsExchange if bucket.by_rows else Exchange
            self.exchanges.append(kind(bucket, route, wire, self._options, names))

    def _route_of(self, bucket: Bucket) -> Route:
        communicators = self._communicators
        if bucket.by_rows:
            return communicators.flat()
        algorithm = "" if self._choices is None else self._choices[bucket.index][0]
        if algorithm in ("own", "ddp"):
            return communicators.library()
        if algorithm == "flat" or bucket.bytes > self._options.two_level_max_bytes:
            return communicators.flat()
        return communicators.route

    def _form(self, bucket: Bucket, route: Route) -> str:
        """The planner's choice, else what was asked for; never harsher than the guard's verdict."""
        if self._choices is not None and route.levels.nodes > 1:
            # What is sent now and then only is for the planner nothing: it goes as the rows do.
            rarely = not bucket.by_rows and self._parts.expects_none(bucket)
            chosen = self._choices[bucket.parts[-1] if rarely else bucket.index][1]
            form = wires.suitable(chosen, bucket)
        else:
            form = wires.choose(self._options, route, bucket)
        fallen = self._fallen.get(bucket.index)
        return form if fallen is None else wires.milder(fallen, form)

    def _first_form(self, route: Route, bucket: Bucket) -> str:
        form = self._form(bucket, route)
        return form if self._settled or not wires.get(form).feedback else "exact"

    def _wire(self, route: Route, form: str) -> Wire:
        """Buckets of one route and form share the wire, and so its scratch memory."""
        key = (id(route), form)
        if key not in self._wires:
            self._wires[key] = wires.get(form)(route, self._options)
        return self._wires[key]
