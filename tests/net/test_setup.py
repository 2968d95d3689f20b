"""`evener net setup`: what it finds, what it does, and that it puts everything back."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.errors import UsageError
from evener.net import setup
from evener.net.command import net
from evener.tools.lab import Lab, Spec, unavailable


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree as the kernel shows it: eth0 with one queue, eth1 that is down, lo."""
    core = tmp_path / "proc/sys/net/core"
    core.mkdir(parents=True)
    (core / "rmem_max").write_text("212992\n")
    (core / "wmem_max").write_text("33554432\n")
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/nr_hugepages").write_text("0\n")
    for name, flags in (("eth0", "0x1003"), ("eth1", "0x1002"), ("lo", "0x9")):
        queue = tmp_path / "sys/class/net" / name / "queues/rx-0"
        queue.mkdir(parents=True)
        (queue / "rps_cpus").write_text("00\n")
        (queue.parents[1] / "mtu").write_text("1500\n")
        (queue.parents[1] / "flags").write_text(flags + "\n")
    monkeypatch.setattr(setup, "channels", lambda _name, _wanted=None: None)
    return tmp_path


def where(changes: list[setup.Change]) -> set[str]:
    return {"/".join(change.where.split("/")[-2:]) for change in changes}


def test_only_what_is_too_little_is_changed(host: Path) -> None:
    assert setup.interfaces(host) == ["eth0"]
    changes = setup.plan(["eth0"], root=host, processors=4)
    assert where(changes) == {"core/rmem_max", "rx-0/rps_cpus"}
    assert [change.new for change in changes] == [str(16 << 20), "f"]
    changes = setup.plan(["eth0"], mtu=9000, huge_pages=64, root=host, processors=1)
    assert where(changes) == {"core/rmem_max", "eth0/mtu", "vm/nr_hugepages"}
    with pytest.raises(UsageError, match="no interface 'eth7'"):
        setup.plan(["eth7"], root=host)


@pytest.mark.parametrize(
    ("processors", "mask"),
    [(1, "1"), (4, "f"), (32, "ffffffff"), (40, "ff,ffffffff"), (64, "ffffffff,ffffffff")],
)
def test_a_set_of_processors_is_written_as_the_kernel_does(processors: int, mask: str) -> None:
    assert setup._mask(processors) == mask


def test_all_of_it_is_put_back(host: Path) -> None:
    state, said = host / "state.json", list[str]()
    changes = setup.plan(["eth0"], mtu=9000, root=host, processors=4)
    setup.apply(changes, state, said.append)
    mtu = host / "sys/class/net/eth0/mtu"
    assert mtu.read_text() == "9000" and len(said) == 3
    # Again, with another value: what was there at first is what undo wants.
    setup.apply(setup.plan(["eth0"], mtu=3498, root=host, processors=4), state, said.append)
    assert mtu.read_text() == "3498"
    assert len(setup.recorded(state)) == 3
    assert setup.undo(state, said.append, dry=True) == 3
    assert mtu.read_text() == "3498"
    assert setup.undo(state, said.append) == 3
    assert mtu.read_text() == "1500"
    assert (host / "proc/sys/net/core/rmem_max").read_text() == "212992"
    assert not state.exists() and setup.undo(state, said.append) == 0


@pytest.mark.parametrize(
    ("mode", "policy", "wanted"),
    [
        ("802.3ad 4", "layer2 0", "layer3+4"),
        ("balance-xor 2", "layer2+3 2", "layer3+4"),
        ("802.3ad 4", "encap2+3 3", "encap3+4"),
        ("802.3ad 4", "layer3+4 1", None),
        ("active-backup 1", "layer2 0", None),
    ],
)
def test_a_bond_that_sees_no_port_numbers_is_told_to(
    host: Path, mode: str, policy: str, wanted: str | None
) -> None:
    bond = host / "sys/class/net/eth0/bonding"
    bond.mkdir()
    (bond / "mode").write_text(mode + "\n")
    (bond / "xmit_hash_policy").write_text(policy + "\n")
    changes = [c for c in setup.plan(["eth0"], root=host, processors=1) if "bonding" in c.where]
    assert [(c.old, c.new) for c in changes] == ([(policy.split()[0], wanted)] if wanted else [])
    state, said = host / "state.json", list[str]()
    setup.apply(changes, state, said.append)
    # As the kernel shows what was written.
    (bond / "xmit_hash_policy").write_text(f"{wanted or policy.split()[0]} 9\n")
    assert setup.undo(state, said.append) == len(changes)
    assert (bond / "xmit_hash_policy").read_text().split()[0] == policy.split()[0]


def test_what_another_has_changed_since_is_left_alone(host: Path) -> None:
    state, said = host / "state.json", list[str]()
    setup.apply(setup.plan(["eth0"], mtu=9000, root=host, processors=1), state, said.append)
    mtu = host / "sys/class/net/eth0/mtu"
    mtu.write_text("4000")
    said.clear()
    assert setup.undo(state, said.append) == 1
    assert mtu.read_text() == "4000"
    assert any("left as it is" in line for line in said)


def test_a_change_that_fails_is_named_and_the_others_can_be_undone(host: Path) -> None:
    state = host / "state.json"
    changes = setup.plan(["eth0"], root=host, processors=4)
    missing = setup.Change(str(host / "none/at/all"), "1", "2", "no reason")
    with pytest.raises(setup.SetupError, match="none/at/all cannot be set to 2"):
        setup.apply([*changes, missing], state, lambda _: None)
    assert setup.undo(state, lambda _: None) == len(changes)


def test_a_record_of_another_kind_is_refused(host: Path) -> None:
    state = host / "state.json"
    state.write_text(json.dumps({"version": 99, "changes": []}))
    with pytest.raises(setup.SetupError, match="version 99"):
        setup.undo(state, lambda _: None)


def test_dry_run_changes_nothing_and_undo_takes_no_other_option(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    given = ["setup", "--state", str(state)]
    result = CliRunner().invoke(net, [*given, "-i", "lo", "--mtu", "1501", "--dry-run"])
    assert result.exit_code == 0 and "/lo/mtu: " in result.output
    assert Path("/sys/class/net/lo/mtu").read_text().strip() != "1501"
    assert not state.exists()
    rows = CliRunner().invoke(net, [*given, "-i", "lo", "--mtu", "1501", "--dry-run", "--json"])
    assert {"where", "old", "new", "why"} == set(json.loads(rows.output)[0])
    assert CliRunner().invoke(net, [*given, "--undo", "--mtu", "1501"]).exit_code != 0


@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_real_host_is_prepared_and_put_back() -> None:
    # Nodes have a /tmp of their own: the record lies in the working directory.
    state = Path(f".evener-setup-{os.getpid()}.json").resolve()
    try:
        with Lab(Spec.parse("2x1@100mbit")) as lab:
            node = lab.nodes[0]

            def mtu() -> str:
                return node.run(["cat", "/sys/class/net/eth0/mtu"], check=True).stdout.strip()

            before = mtu()
            evener = [str(Path(sys.executable).with_name("evener")), "net", "setup"]
            given = [*evener, "-i", "eth0", "--mtu", "1400", "--dry-run", "--json"]
            plan = json.loads(node.run(given, check=True).stdout)
            assert mtu() == before
            (row,) = [row for row in plan if row["where"].endswith("eth0/mtu")]
            assert (row["old"], row["new"]) == (before, "1400")
            # What belongs to all of the machine stays as it is: other tests use it.
            change = {"where": "/sys/class/net/eth0/mtu", "old": before, "new": "1400", "why": "-"}
            code = (
                "import sys; from pathlib import Path; from evener.net import setup;"
                f"setup.apply([setup.Change(**{change!r})], Path({str(state)!r}), print)"
            )
            node.run([sys.executable, "-c", code], check=True)
            assert mtu() == "1400"
            undo = node.run([*evener, "--undo", "--state", str(state)], check=True).stdout
            assert "1400 -> " + before in undo and mtu() == before
    finally:
        state.unlink(missing_ok=True)
