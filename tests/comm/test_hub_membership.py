"""Who is in: the state machine of `evener.comm.hub.membership`, in virtual time."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evener.comm.hub.membership import Claim, Membership

SILENCE, LATE = 20.0, 300.0


def made(least: int = 2, slots: int = 4) -> Membership:
    return Membership(least, slots, SILENCE, LATE)


def todo(membership: Membership, now: float = 0.0) -> list[Any]:
    found = []
    while (do := membership.decide(now)) is not None:
        found.append(do)
    return found


def begun(membership: Membership, *numbers: int) -> None:
    """All these are in, in round 0."""
    for number in numbers:
        membership.meets(number, f"n{number}", f"u{number}", 0.0)
        membership.asks(number, Claim(0, 7), 0.0)
    (give,) = todo(membership)
    membership.gives(give.number, Claim(0, 7))
    todo(membership)
    for number in numbers:
        membership.enters(number, Claim(0, 7), 0.0)
    assert [do.what for do in todo(membership)] == ["entered"] * len(numbers)


def test_the_first_weights_are_those_of_most_that_are_furthest() -> None:
    membership = made(least=4)
    for number, claim in enumerate([Claim(3, 1), Claim(3, 2), Claim(3, 2)]):
        membership.meets(number, f"n{number}", f"u{number}", 0.0)
        membership.asks(number, claim, 0.0)
        assert todo(membership) == []
    membership.meets(3, "n3", "u3", 0.0)
    membership.asks(3, Claim(2, 9), 0.0)
    (do,) = todo(membership)
    assert (do.what, do.number) == ("give", 1)
    membership.gives(1, Claim(3, 2))
    assert [(d.what, d.number) for d in todo(membership)] == [
        ("take", 0),
        ("keep", 1),
        ("keep", 2),
        ("take", 3),
    ]


def test_who_gives_and_dies_is_replaced() -> None:
    membership = made()
    for number in range(3):
        membership.meets(number, f"n{number}", f"u{number}", 0.0)
        membership.asks(number, Claim(0, number), 0.0)
    (do,) = todo(membership)
    membership.lost(do.number)
    (other,) = todo(membership)
    assert other.what == "give" and other.number != do.number


def test_a_round_waits_for_all_that_are_in_and_for_no_guest() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.meets(3, "n3", "u3", 0.0)
    membership.asks(3, Claim(0, 7), 0.0)
    assert [do.what for do in todo(membership)] == ["keep"]
    assert membership.brings(1, Claim(0, 7), 5, 1.0)
    assert [do.what for do in todo(membership, 1.0)] == ["call"]
    membership.brings(2, Claim(0, 7), 4, 2.0)
    (close,) = todo(membership, 2.0)
    assert close.what == "close" and close.numbers == (1, 2)
    membership.enters(3, Claim(0, 7), 2.0)  # while it is averaged
    assert todo(membership, 2.0) == []
    # The guest has weights that the average moves: it gets that, and not all weights again.
    assert membership.closed(Claim(1, 8)) == [1, 2, 3]
    assert todo(membership, 2.0) == [] and membership.members[3].place == "guest"
    membership.enters(3, Claim(1, 8), 3.0)
    assert [(do.what, do.number) for do in todo(membership, 3.0)] == [("entered", 3)]


def test_a_guest_with_other_weights_in_this_round_gets_them_again() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.meets(3, "n3", "u3", 0.0)
    membership.asks(3, Claim(0, 7), 0.0)
    assert [do.what for do in todo(membership)] == ["keep"]
    membership.enters(3, Claim(0, 9), 1.0)  # a bit has flipped since
    assert [(do.what, do.number) for do in todo(membership, 1.0)] == [("take", 3)]


def test_who_has_not_been_answered_gets_the_weights_and_no_average() -> None:
    membership = made()
    begun(membership, 1, 2)
    for number in (1, 2):
        membership.brings(number, Claim(0, 7), 5, 1.0)
    *_, close = todo(membership, 1.0)
    assert close.what == "close"
    membership.meets(3, "n3", "u3", 1.0)
    membership.asks(3, Claim(0, 9), 1.0)  # other weights than all
    assert membership.closed(Claim(1, 8)) == [1, 2]
    assert [(do.what, do.number) for do in todo(membership, 2.0)] == [("take", 3)]


def test_a_change_that_came_whole_counts_and_fewer_than_the_least_wait() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.brings(1, Claim(0, 7), 5, 1.0)
    membership.lost(1)
    membership.brings(2, Claim(0, 7), 5, 1.0)
    assert [do.what for do in todo(membership, 1.0)] == ["call"]
    assert membership.waits
    membership.meets(3, "n1", "u3", 1.0)
    membership.asks(3, Claim(0, 9), 1.0)
    membership.enters(3, Claim(0, 7), 1.0)
    todo(membership, 1.0)
    membership.brings(3, Claim(0, 7), 1, 1.0)
    (close,) = todo(membership, 1.0)
    assert close.numbers == (1, 3, 2)  # by slot: the new node has the dead one's


def test_the_same_change_over_a_new_connection_counts_once() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.brings(1, Claim(0, 7), 5, 1.0)
    membership.lost(1)
    membership.meets(3, "n1", "u1", 1.0)
    membership.enters(3, Claim(0, 7), 1.0)
    todo(membership, 1.0)
    membership.brings(3, Claim(0, 7), 5, 1.0)
    membership.brings(2, Claim(0, 7), 5, 1.0)
    assert todo(membership, 1.0)[-1].numbers == (3, 2)


def test_silence_and_lateness_leave_a_node_out() -> None:
    membership = made(least=1)
    begun(membership, 1, 2, 3)
    membership.hears(1, 15.0)
    membership.hears(2, 15.0)
    (drop,) = todo(membership, 21.0)
    assert (drop.what, drop.number) == ("drop", 3) and "20 s" in drop.why
    membership.brings(1, Claim(0, 7), 5, 30.0)
    at = 30.0
    while at < 330.0:
        assert [do.what for do in todo(membership, at)] == ["call"] * (at == 30.0)
        at += 10.0
        membership.hears(1, at)
        membership.hears(2, at)
    found = todo(membership, 331.0)
    assert [(do.what, do.number) for do in found] == [("drop", 2), ("close", 0)]
    assert found[-1].numbers == (1,)


def test_other_shared_weights_are_noticed() -> None:
    membership = made()
    begun(membership, 1, 2)
    assert not membership.brings(1, Claim(0, 6), 5, 0.0)
    (drop,) = todo(membership)
    assert drop.what == "drop" and "other shared weights" in drop.why


def test_who_came_to_its_end_is_not_missed() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.leaves(2)
    membership.brings(1, Claim(0, 7), 5, 0.0)
    assert [do.what for do in todo(membership)] == ["call", "close"]


def test_a_hub_that_was_started_again_takes_the_furthest_node_later_too() -> None:
    membership = made()
    begun(membership, 1, 2)
    membership.meets(3, "n3", "u3", 0.0)
    membership.asks(3, Claim(1, 5), 0.0)
    (give,) = todo(membership)
    assert (give.what, give.number) == ("give", 3)
    membership.gives(3, Claim(1, 5))
    assert {(do.what, do.number) for do in todo(membership)} == {
        ("take", 1),
        ("take", 2),
        ("keep", 3),
    }


def test_slots_stay_with_names_and_are_given_again() -> None:
    membership = made(slots=3)
    assert [membership.promises(name, 0.0) for name in "abc"] == [0, 1, 2]
    assert membership.promises("a", 1.0) == 0  # it asked before
    for number, name in enumerate("abc"):
        membership.meets(number, name, name, 1.0, number)
    membership.lost(1)
    assert membership.promises("d", 2.0) == 1
    assert membership.meets(9, "b", "b", 2.0) == 1  # all are taken: it shares the one it had


class Hubs(RuleBasedStateMachine):
    """Nodes that do anything, in virtual time. What must hold is in the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.membership = made(least=2, slots=3)
        self.closing: tuple[int, ...] = ()
        self.giver: int | None = None
        self.rounds: list[tuple[int, ...]] = []
        self.has: dict[int, Claim] = {}  # what each connection's node has

    def pump(self) -> None:
        while (do := self.membership.decide(self.now)) is not None:
            if do.what == "close":
                assert not self.closing
                inside = self.membership.inside
                assert all(member.brought is not None for member in inside)
                assert len(inside) >= self.membership.need
                assert {member.number for member in inside} <= set(do.numbers)
                assert len(do.numbers) == len(set(do.numbers))
                self.closing = do.numbers
            elif do.what == "give":
                self.giver = do.number
            elif do.what == "take":
                assert self.membership.shared is not None
                self.has[do.number] = self.membership.shared
            elif do.what in ("keep", "entered"):
                assert self.has[do.number] == self.membership.shared
            elif do.what == "drop":
                assert do.number not in self.membership.members

    def one(self, which: int) -> int | None:
        members = sorted(self.membership.members)
        return members[which % len(members)] if members else None

    @rule(claim=st.builds(Claim, st.integers(0, 2), st.integers(0, 1)), again=st.booleans())
    def comes(self, claim: Claim, again: bool) -> None:
        self.number += 1
        uid = "again" if again else f"u{self.number}"
        self.membership.meets(self.number, uid, uid, self.now)
        self.has[self.number] = claim
        self.membership.asks(self.number, claim, self.now)
        self.pump()

    @rule(which=st.integers(0, 5))
    def steps(self, which: int) -> None:
        if (number := self.one(which)) is not None:
            self.membership.enters(number, self.has[number], self.now)
            self.pump()

    @rule(which=st.integers(0, 5), steps=st.integers(1, 9))
    def brings(self, which: int, steps: int) -> None:
        if (number := self.one(which)) is not None:
            counted = self.membership.brings(number, self.has[number], steps, self.now)
            assert not counted or self.has[number] == self.membership.shared
            self.pump()

    @rule(which=st.integers(0, 5))
    def dies(self, which: int) -> None:
        if (number := self.one(which)) is not None:
            self.membership.lost(number)
            self.pump()

    @rule(which=st.integers(0, 5))
    def ends(self, which: int) -> None:
        if (number := self.one(which)) is not None:
            self.membership.leaves(number)
            self.pump()

    @precondition(lambda self: self.giver in self.membership.members)
    @rule()
    def gives(self) -> None:
        assert self.giver is not None
        giver, self.giver = self.giver, None
        self.membership.gives(giver, self.has[giver])
        self.pump()

    @precondition(lambda self: bool(self.closing))
    @rule()
    def closes(self) -> None:
        before = self.membership.shared
        assert before is not None
        after = Claim(before.round + 1, 10 + before.round)
        for number in self.closing:
            if number in self.membership.members:
                self.has[number] = after
        self.rounds.append(self.closing)
        self.closing = ()
        self.membership.closed(after)
        self.pump()

    @rule(seconds=st.sampled_from([0.5, 5.0, 19.0, 25.0, 301.0]), heard=st.integers(0, 7))
    def time_goes(self, seconds: float, heard: int) -> None:
        self.now += seconds
        for place, number in enumerate(sorted(self.membership.members)):
            if heard >> place & 1:
                self.membership.hears(number, self.now)
        self.pump()

    @invariant()
    def slots_are_kept(self) -> None:
        members = self.membership.members.values()
        if len(members) <= self.membership.slots:
            return
        assert all(0 <= member.slot < self.membership.slots for member in members)

    @invariant()
    def who_brought_is_in(self) -> None:
        for member in self.membership.members.values():
            assert member.brought is None or member.place == "in" or self.closing

    @invariant()
    def the_shared_weights_only_go_on(self) -> None:
        rounds = [0 if self.membership.shared is None else self.membership.shared.round]
        assert rounds[0] >= getattr(self, "seen", 0)
        self.seen = rounds[0]

    def teardown(self) -> None:
        """Whatever happened: nodes that all behave end a round."""
        if self.closing:
            self.closes()
        self.now += 1000.0
        self.giver = None
        self.pump()
        for number in (1001, 1002):
            self.membership.meets(number, f"n{number}", f"n{number}", self.now)
            self.has[number] = Claim(0, 99)
            self.membership.asks(number, Claim(0, 99), self.now)
        self.pump()
        if self.giver is not None:
            self.gives()
        before = len(self.rounds)
        for number in (1001, 1002):
            self.membership.enters(number, self.has[number], self.now)
        self.pump()
        for number in (1001, 1002):
            assert self.membership.brings(number, self.has[number], 1, self.now)
            self.pump()
        self.closes()
        assert len(self.rounds) == before + 1


Hubs.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHubs = Hubs.TestCase
