"""What describes a lab: read, written back, refused; and the layout that follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.base.units import parse_rate, parse_time, show_rate, show_time
from evener.errors import UsageError
from evener.tools.lab import Event, Spec, show
from evener.tools.lab.faults import Action, Target
from evener.tools.lab.layout import Layout, Shape

specs = st.builds(
    Spec,
    nodes=st.integers(1, 48),
    slots=st.integers(1, 64),
    link=st.none() | st.integers(16 * 10**6, 10**12).map(show_rate),
    nics=st.integers(1, 8),
    paths=st.integers(1, 16),
    flow_cap=st.none() | st.integers(10**6, 10**11).map(show_rate),
    queue=st.integers(1000, 10**10).map(show_time),
    delay=st.none() | st.integers(0, 10**10).map(show_time),
    loss=st.none() | st.sampled_from(["1%", "0.5%", "0.01"]),
    mtu=st.integers(576, 65535),
    congestion=st.sampled_from(["cubic", "reno", "bbr"]),
    hash_seed=st.integers(1, 2**32 - 1),
)


@given(specs)
def test_the_short_form_reads_back(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec


@given(st.integers(1, 10**14))
def test_rates_and_times_read_back(number: int) -> None:
    assert parse_rate(show_rate(number)) == number
    assert parse_time(show_time(number)) == number


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (Spec.parse, parse_rate, parse_time, Action.parse):
        try:
            parse(text)
        except UsageError as error:
            assert error.fix


@pytest.mark.parametrize(
    ("text", "bits"),
    [("25gbit", 25 * 10**9), ("25 Gb/s", 25 * 10**9), ("1.5G", 15 * 10**8), ("500mbit", 5 * 10**8)],
)
def test_rates_as_people_write_them(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


def test_defaults_of_the_short_form() -> None:
    assert Spec.parse("2x2") == Spec(nodes=2, slots=2, link=None)
    assert Spec.parse("2x2@none").link is None
    assert Spec.parse("4x1@10gbit,paths=4,cap=5gbit,nics=2,queue=1ms") == Spec(
        nodes=4, slots=1, link="10gbit", paths=4, flow_cap="5gbit", nics=2, queue="1ms"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "describes no lab"),
        ("2", "describes no lab"),
        ("2+", "describes no lab"),
        ("2+0", "2+0 has no slot"),
        ("2+65", "slots=65"),
        ("2x2@fast", "link 'fast' is not a rate"),
        ("0x2", "nodes=0"),
        ("2x2,paths=17", "paths=17"),
        ("2x2,paths=two", "paths='two'"),
        ("2x2,lanes=4", "lanes=4"),
        ("2x2,paths=2,paths=3", "stands twice"),
        ("2x2,queue=2", "queue '2' is not a time"),
        ("2x2,delay=40", "delay '40' is not a time"),
        ("2x2,delay=11s", "delay=11s is above 10s"),
        ("2x2,loss=2", "loss '2' is not a share"),
        ("2x2,congestion=no such", "congestion="),
        ("2x2@10mbit,paths=16", "too slow"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Spec.parse(text)
    assert said in str(refused.value)
    assert refused.value.fix


def test_uneven_nodes() -> None:
    spec = Spec.parse("3+1+2@1gbit")
    assert (spec.nodes, spec.slots, spec.world_size) == (3, 3, 6) and str(spec) == "3+1+2@1gbit"
    assert [spec.place(rank) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert [list(spec.ranks(node)) for node in range(3)] == [[0, 1, 2], [3], [4, 5]]
    # As Horovod counts: among the nodes that have this slot.
    assert [spec.cross(*spec.place(rank)) for rank in range(6)] == [
        (0, 3), (0, 2), (0, 1), (1, 3), (2, 3), (1, 2)
    ]  # fmt: skip
    assert Spec.parse("2+2@1gbit") == Spec.parse("2x2@1gbit")
    assert "ranks 0-2" in show.as_text(Layout(spec)) and "of 3 + 1 + 2 slots" in show.as_text(
        Layout(spec)
    )


@given(specs)
def test_no_address_is_given_twice(spec: Spec) -> None:
    layout = Layout(spec)
    addresses = [a for nic in layout.nics for a in (nic.address, nic.gateway)]
    uplinks = [uplink for nic in layout.nics for uplink in nic.uplinks]
    addresses += [a for u in uplinks for a in (u.leaf_address, u.spine_address)]
    assert len(set(addresses)) == len(addresses)
    assert all(0 < int(part) + 1 <= 256 for a in addresses for part in a.split("."))
    devices = [uplink.spine_device for uplink in uplinks]
    assert max(map(len, devices)) <= 15  # the kernel's limit
    assert layout.hosts().count("\n") == 2 + spec.nodes * (1 + 2 * spec.nics)


def test_a_shallow_queue_gets_packets_that_fit() -> None:
    shallow, deep = Shape.of(10**8, 2_000_000), Shape.of(10**10, 2_000_000)
    assert (shallow.limit, shallow.burst) == (25_000, 15_000)
    assert deep.limit == 2_500_000 and deep.burst >= 131_072


def test_targets() -> None:
    spec = Spec(nodes=2, paths=2, nics=2)
    assert Target.parse("path1", spec) == Target(None, None, 1)
    assert Target.parse("node1.eth0.path1", spec) == Target(1, 0, 1)
    assert Target.parse("node0", spec).includes(0, 1, 1)
    assert not Target.parse("node0", spec).includes(1, 0, 0)


@pytest.mark.parametrize(
    "text", ["", "path", "path2", "node2", "node0.eth7", "node0path1", ".eth0"]
)
def test_what_a_lab_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Target.parse(text, Spec(nodes=2, paths=2, nics=2))


def test_events() -> None:
    spec = Spec(paths=2)
    event = Event.parse("12s:path1:blackhole", spec)
    assert (event.at_ns, event.target, event.action) == (12 * 10**9, "path1", "blackhole")
    assert Event.parse("0.5s:path0:rate:1gbit", spec).action == "rate 1gbit"
    assert str(event) == "12s:path1:blackhole"
    for text in ("path1:blackhole", "12:path1:down", "1s:path1:explode", "1s:path1:rate"):
        with pytest.raises(UsageError):
            Event.parse(text, spec)


def test_actions() -> None:
    assert Action.parse("rate 1gbit").value == 10**9
    assert Action.parse("loss 1%").value == pytest.approx(0.01)
    assert Action.parse("flap").value == 10**9
    with pytest.raises(UsageError):
        Action.parse("loss 101%")
