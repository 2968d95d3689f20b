"""The map file: what is accepted, what is refused and by which name, and loads on a fabric."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.tools.fabric import Flow, MapError, load, parse_map, rail_wiring

MAP = """
version: 1
hosts:
  a:
    gpus: [n0, n1]
    nics: {n0: {speed: 100G, switch: leaf0}, n1: {speed: 100G, switch: leaf0}}
  b:
    gpus: [n0, n1]
    nics: {n0: {speed: 100G, switch: leaf1}, n1: {speed: 100G, switch: leaf1}}
switches: [leaf0, leaf1, spine0, spine1]
links:
  - {between: [leaf0, spine0], speed: 200G, count: 2}
  - {between: [leaf0, spine1], speed: 200G, count: 2}
  - {between: [leaf1, spine0], speed: 200G, count: 2}
  - {between: [leaf1, spine1], speed: 200G, count: 2}
"""


def test_speeds_and_rails() -> None:
    fabric = parse_map(MAP)
    card = fabric.hosts["a"].card("n1")
    assert card is not None
    assert (card.speed, card.switch, card.rail) == (12.5e9, "leaf0", 1)
    assert fabric.hosts["a"].nearest(1) == card
    assert fabric.hosts["a"].nearest(2) is None
    assert fabric.find("a.example.org") is fabric.hosts["a"]
    assert fabric.find("c") is None


@pytest.mark.parametrize(
    ("old", "new", "place", "fix"),
    [
        (
            "speed: 100G, switch: leaf0}, n1",
            "sped: 100G, switch: leaf0}, n1",
            "hosts.a.nics.n0",
            "speed",
        ),
        ("switches:", "switchs:", "switchs", "switches"),
        (
            "gpus: [n0, n1]\n    nics: {n0: {speed: 100G, switch: leaf0}",
            "gpus: [n0, nn1]\n    nics: {n0: {speed: 100G, switch: leaf0}",
            "hosts.a.gpus[1]",
            "n1",
        ),
        ("switch: leaf1}}", "switch: leaf9}}", "hosts.b.nics.n1.switch", "leaf"),
        (
            "{speed: 100G, switch: leaf0}, n1",
            "{speed: 100 parsecs, switch: leaf0}, n1",
            "hosts.a.nics.n0.speed",
            "100G",
        ),
        ("between: [leaf0, spine0]", "between: [leaf0, leaf0]", "links[0].between", "leaf0"),
        (
            "count: 2}\n  - {between: [leaf0, spine1]",
            "cuont: 2}\n  - {between: [leaf0, spine1]",
            "links[0]",
            "count",
        ),
        ("version: 1", "version: 2", "version", "1"),
        ("switches: [leaf0, leaf1,", "switches: [leaf0, leaf0,", "switches", "name"),
        ("  b:\n", "  a:\n", "'a'", "docs/reference/map.md"),
        ("version: 1", "version: [", "map:", "docs/reference/map.md"),
    ],
)
def test_refused_by_name(old: str, new: str, place: str, fix: str) -> None:
    assert old in MAP
    with pytest.raises(MapError) as refused:
        parse_map(MAP.replace(old, new, 1))
    assert place in refused.value.problem
    assert fix in refused.value.fix


@given(st.text(max_size=60), st.integers(0, len(MAP)), st.integers(0, 30))
def test_no_text_makes_it_raise_anything_else(text: str, at: int, cut: int) -> None:
    try:
        parse_map(MAP[:at] + text + MAP[at + cut :])
    except MapError as error:
        assert error.fix


def test_equal_paths_share_a_flow() -> None:
    fabric = parse_map(MAP)
    a, b = (fabric.hosts[h].cards[0] for h in "ab")
    result = load(fabric, [Flow(a, b, 0.5), Flow(b, a, 0.5)])
    assert result.links["leaf0", "spine0"].weight == pytest.approx(0.25)
    assert result.links["spine1", "leaf1"].weight == pytest.approx(0.25)
    assert result.links["leaf0", "spine0"].count == 2
    assert result.cards["a", "n0", "out"].weight == 0.5
    # The card is the bound: 12.5 GB/s for half of the traffic.
    assert result.bound == pytest.approx(25e9)
    assert result.crossing_share == 1
    # Hashed onto one link of a group: 25 GB/s for a quarter; the card is still less.
    assert result.one_link == pytest.approx(25e9)


def test_switches_that_nothing_joins() -> None:
    fabric = parse_map(MAP[: MAP.index("links:")])
    a, b = (fabric.hosts[h].cards[0] for h in "ab")
    assert load(fabric, [Flow(a, b, 1)]).unreachable == [("leaf0", "leaf1")]


def test_rail_wiring_moves_every_second_cable() -> None:
    fabric = parse_map(MAP)
    rewired, moves = rail_wiring(fabric)
    assert [(m.host, m.card, m.before, m.after) for m in moves] == [
        ("a", "n1", "leaf0", "leaf1"),
        ("b", "n0", "leaf1", "leaf0"),
    ]
    a, b = (rewired.hosts[h].cards[0] for h in "ab")
    assert load(rewired, [Flow(a, b, 1)]).crossing == 0
