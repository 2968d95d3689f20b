"""Who is in, whom the others wait for, and when a round ends. No sockets, no clock, no weights.

A node that is let in stands in one of these places:

    met     it has said who it is
    asks    it says what it has (round and digest), and waits to hear what it is to go on from
    guest   it has the shared weights of this round and has not taken a step from them yet, because
            it still loads data or compiles: nobody waits for it
    in      it has taken a step: the others wait for its change
    gone    nobody waits for it any more

A round ends when all that are in have brought their change, and they are enough. The first change
that comes calls the others: each brings what it has after its next step, so a slow node holds
nobody up by more than a step, and its change counts by the steps it took. A change that came whole
counts, whatever became of its node meanwhile.

Before the first round, and when a hub was started again, there are no shared weights. Then the hub
waits for as many nodes as must be there, and takes the weights of the one that is furthest; among
those as far, what most of them have.

Every call gives the present, in seconds of a clock that never goes back; `decide` says what is to
be done, until it says nothing.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

PROMISED = 300.0
"""Seconds for which a slot is kept for a node whose program still starts."""


@dataclass(frozen=True)
class Claim:
    """Shared weights that a node has: of which round, and their digest."""

    round: int
    digest: int


_NOTHING = Claim(0, -1)


@dataclass(frozen=True)
class Do:
    """What the hub is to do. `what`: "give" (ask `number` for its shared weights), "take" (send it
    the hub's), "keep" (it has them), "entered", "drop" (`why`), "call" (all; or `number`, which
    was not in when the others were called), or "close" (average the changes of `numbers`, in this
    order).
    """

    what: str
    number: int = 0
    why: str = ""
    numbers: tuple[int, ...] = ()


@dataclass
class Member:
    """One connection of a node. `heard`: when it was, last. `brought`: steps of its change.
    `told`: the shared weights that it has, or will have from what was sent to it.
    """

    number: int
    name: str
    uid: str
    slot: int
    heard: float
    place: str = "met"
    claim: Claim | None = None
    enters: bool = False
    brought: int | None = None
    told: Claim | None = None


@dataclass
class Membership:
    """See the module. `least`: nodes that must be in. `slots`: shares of the data. `silence`,
    `late`: seconds without a word, and seconds that the others wait for one that lives.
    """

    least: int
    slots: int
    silence: float
    late: float
    shared: Claim | None = None
    members: dict[int, Member] = field(default_factory=dict)
    done: int = 0  # nodes that came to the end of their training
    # Changes that came whole, from nodes that are gone since.
    left: dict[int, Member] = field(default_factory=dict)
    _giver: int | None = None
    _first: float | None = None  # when this round's first change came
    _called: bool = False
    _closing: bool = False
    _names: dict[str, int] = field(default_factory=dict)  # the slot that a name had last
    # By name the slot of a node that is to come, and until when it is kept for it.
    _promised: dict[str, tuple[int, float]] = field(default_factory=dict)
    _todo: collections.deque[Do] = field(default_factory=collections.deque)

    # --- what happens ---

    def meets(self, number: int, name: str, uid: str, now: float, wants: int | None = None) -> int:
        """A node is let in; its slot. `wants`: the one that it was promised."""
        for other in [m for m in self.members.values() if m.uid == uid]:
            self._goes(other)  # its old connection, which nobody has missed yet
        slot = self.promises(name, now) if wants is None else wants % self.slots
        self._promised.pop(name, None)
        self._names[name] = slot
        self.members[number] = Member(number, name, uid, slot, now)
        return slot

    def promises(self, name: str, now: float) -> int:
        """A slot for a node that is to come: the one that its name had, if that is free, or the
        first free one. Where all are taken, slots are shared.
        """
        for late in [n for n, (_, until) in self._promised.items() if until < now or n == name]:
            del self._promised[late]
        taken = collections.Counter(member.slot for member in self.members.values())
        taken.update(slot for slot, _ in self._promised.values())
        had = self._names.get(name)
        kept = {slot for other, slot in self._names.items() if other != name}
        slots = range(self.slots)
        slot = min(slots, key=lambda slot: (taken[slot], slot != had, slot in kept, slot))
        self._names[name] = slot
        self._promised[name] = slot, now + PROMISED
        return slot

    def asks(self, number: int, claim: Claim, now: float) -> None:
        """It says what it has, and waits."""
        member = self._heard(number, now)
        if member.brought is not None:
            member.brought = None  # of weights that it does not have any more
        member.claim, member.place, member.enters = claim, "asks", False

    def enters(self, number: int, claim: Claim, now: float) -> None:
        """It has taken the first step from what it got."""
        self.asks(number, claim, now)
        self.members[number].enters = True

    def hears(self, number: int, now: float) -> None:
        """Bytes came from it."""
        self._heard(number, now)

    def brings(self, number: int, claim: Claim, steps: int, now: float) -> bool:
        """Its change came whole, of `steps` steps; whether it counts."""
        member = self._heard(number, now)
        if member.place != "in" or self._closing or self.shared is None:
            return False
        if claim != self.shared:
            if claim.round == self.shared.round:
                why = f"it has other shared weights in round {claim.round} than the hub"
                self._drop(member, why)
            else:
                self.asks(number, claim, now)
            return False
        for gone in [n for n, old in self.left.items() if old.uid == member.uid]:
            del self.left[gone]  # the same change again, over a new connection
        member.brought = steps
        self._first = now if self._first is None else self._first
        return True

    def gives(self, number: int, claim: Claim) -> None:
        """The shared weights came from it; they are the hub's now."""
        if number == self._giver:
            self._giver = None
        for member in self.inside:  # their changes are from weights that are not shared any more
            member.brought, member.claim = None, _NOTHING
        self._begins(claim)

    def closed(self, claim: Claim) -> list[int]:
        """The average of the last round was made. Who is to have it: all who were told of the
        weights that it moves, those too who are not in yet.
        """
        knows = [m for m in self.members.values() if m.told is not None and m.told == self.shared]
        for member in knows:
            member.told = claim
        self._closing = False
        self._begins(claim)
        return [member.number for member in knows]

    def leaves(self, number: int) -> None:
        """It came to the end of its training."""
        if (member := self.members.get(number)) is not None:
            self.done += 1
            self._goes(member)

    def lost(self, number: int) -> None:
        """Its connection ended."""
        if (member := self.members.get(number)) is not None:
            self._goes(member)

    # --- what is to be done ---

    def decide(self, now: float) -> Do | None:
        """The next thing to do; None: nothing now."""
        if self._todo:
            return self._todo.popleft()
        self._look(now)
        return self._todo.popleft() if self._todo else None

    @property
    def need(self) -> int:
        """Nodes that must be in: those that came to their end are not missed."""
        return max(1, self.least - self.done)

    @property
    def inside(self) -> list[Member]:
        """Those that are in."""
        return [member for member in self.members.values() if member.place == "in"]

    @property
    def waits(self) -> bool:
        """Whether changes are there and nodes are too few."""
        return self._first is not None and len(self.inside) < self.need

    def _look(self, now: float) -> None:
        for member in list(self.members.values()):
            if now - member.heard > self.silence:
                self._drop(member, f"nothing was heard of it for {self.silence:g} s")
        if self._closing:
            return
        asking = [member for member in self.members.values() if member.claim is not None]
        if self._giver is not None and self._giver not in self.members:
            self._giver = None
        if self.shared is None:
            if self._giver is None and len(asking) >= self.need:
                self._choose(asking)
            return
        for member in asking:
            self._answer(member)
        self._end(now)

    def _choose(self, asking: list[Member]) -> None:
        """Whose weights are the shared ones."""
        furthest = max(member.claim.round for member in asking if member.claim)
        there = [m for m in asking if m.claim and m.claim.round == furthest]
        most = collections.Counter(member.claim for member in there)
        first = max(there, key=lambda m: (most[m.claim], -m.slot, -m.number))
        self._giver = first.number
        self._todo.append(Do("give", first.number))

    def _answer(self, member: Member) -> None:
        claim = member.claim
        assert claim is not None and self.shared is not None
        if claim.round > self.shared.round:
            # It was there when the hub that is gone ended a round of which this one has not heard.
            if self._giver is None:
                self._giver = member.number
                self._todo.append(Do("give", member.number))
            return
        member.claim = None
        same = claim == self.shared
        if claim.round < self.shared.round and member.told == self.shared:
            member.place = "guest"  # it said so before what was sent to it arrived
            return
        member.told = self.shared
        member.place = "in" if same and member.enters else "guest"
        what = ("entered" if member.enters else "keep") if same else "take"
        self._todo.append(Do(what, member.number))
        if what == "entered" and self._called:
            self._todo.append(Do("call", member.number))

    def _end(self, now: float) -> None:
        inside = self.inside
        missing = [member for member in inside if member.brought is None]
        if self._first is None:
            return
        if not self._called:
            self._called = True
            self._todo.append(Do("call"))
        if missing and now - self._first > self.late:
            for member in missing:
                self._drop(member, f"the others waited {self.late:g} s for its change")
            return
        if missing or len(inside) < self.need or self._giver is not None:
            return
        there = sorted([*inside, *self.left.values()], key=lambda m: (m.slot, m.number))
        self._closing = True
        self._todo.append(Do("close", numbers=tuple(member.number for member in there)))

    # ---

    def _heard(self, number: int, now: float) -> Member:
        member = self.members[number]
        member.heard = now
        return member

    def _begins(self, claim: Claim) -> None:
        self.shared = claim
        self._first, self._called, self.left = None, False, {}
        for member in self.members.values():
            member.brought = None

    def _drop(self, member: Member, why: str) -> None:
        self._goes(member)
        self._todo.append(Do("drop", member.number, why))

    def _goes(self, member: Member) -> None:
        del self.members[member.number]
        member.place = "gone"
        if member.brought is not None and not self._closing:
            self.left[member.number] = member
