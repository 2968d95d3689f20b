"""Rendezvous: every way makes the same group, and whoever does not come is named in time.

Ranks are real processes. `mpirun` is the real one; a way is taken out by making its library's
loader find nothing, as on a machine that lacks it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from evener.base import interfaces
from evener.base.ports import free_port
from evener.comm.world import gloo, meeting
from evener.comm.world.ranks import Ranks
from evener.comm.world.rendezvous import RendezvousError

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Two generations, so that shutdown and init again are tested by every way.
SCRIPT = """
import torch, torch.distributed as dist
from evener.comm.world import gloo, libmpi, pmix
from evener.comm.world.rendezvous import init_process_group, shutdown
{prepare}
for generation in range(2):
    ranks = init_process_group()
    x = torch.full((3,), float(ranks.rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [ranks.size * (ranks.size + 1) / 2] * 3
    assert gloo.threads()
    shutdown()
    assert not dist.is_initialized() and not gloo.threads()
print("OK", ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.cross_size)
"""


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in RANK_NAMES and not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def start(code: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    try:
        return [(p.wait(90), *p.communicate(timeout=90)) for p in processes]  # type: ignore[misc]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_master_addr_and_what_the_launcher_did_not_say_is_found_out() -> None:
    port = str(free_port())
    env = environment(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="2")
    code = SCRIPT.format(prepare="")
    results = finish(*(start(code, {**env, "RANK": str(rank)}) for rank in range(2)))
    for rank, (status, out, err) in enumerate(results):
        assert status == 0, err
        assert out.split() == ["OK", str(rank), "2", str(rank), "2", "1"]
    assert "rendezvous by MASTER_ADDR" in results[0][2]
    assert "rendezvous" not in results[1][2]  # said once, not by every rank


def test_a_process_may_end_right_after_a_collective() -> None:
    # Python's lock is almost never let go, so that Gloo's thread still asks for it at the end.
    code = """
import sys, torch, torch.distributed as dist
from evener.comm.world.rendezvous import init_process_group
sys.setswitchinterval(1000)
init_process_group()
for _ in range(20):
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    del x, work
"""
    port = str(free_port())
    env = environment(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="4")
    for status, _, err in finish(*(start(code, {**env, "RANK": str(rank)}) for rank in range(4))):
        assert status == 0, err


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set("rank/1", json.dumps(["node", 0, 1, ""]))
    with pytest.raises(RendezvousError, match=r"rank 0 of 4 waited 0\.2 s for 2 ranks \(2, 3\)"):
        meeting.check_in(Ranks(0, 4), store, 0.2, time.monotonic() + 0.2)


def test_rank_0_keeps_the_store_until_all_have_read_that_frameworks_differ() -> None:
    """It would end first, and its peer tell of a lost store."""
    store = HashStore()
    other = meeting.Entry("there", 0, 1, "", "TensorFlow")
    store.set("rank/1", json.dumps(list(vars(other).values())))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting.check_in, Ranks(0, 2), store, 9.0, time.monotonic() + 9.0)
        store.wait(["read/0"], timedelta(seconds=9))
        assert not first.done()
        store.set("read/1", "1")
        with pytest.raises(RendezvousError, match="rank 0 trains with PyTorch and rank 1 with Ten"):
            first.result(timeout=9)


def test_nobody_there_and_no_way_at_all() -> None:
    code = "from evener.comm.world.rendezvous import init_process_group; init_process_group()"
    env = environment(RANK="1", WORLD_SIZE="2", EVENER_TIMEOUT="2")
    nobody = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (first, _, waited), (second, _, no_way) = finish(start(code, nobody), start(code, env))
    assert (first, second) == (1, 1)
    assert "rank 1 waited 2 s for rank 0 at MASTER_ADDR=127.0.0.1" in waited
    assert "MASTER_ADDR is unset" in no_way
    assert "-x MASTER_ADDR" in no_way


def test_a_file_left_behind_by_another_job_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "meet.json"
    file.write_text(json.dumps(["elsewhere", ["127.0.0.1"], free_port(), "stale"]))
    env = environment(WORLD_SIZE="2", EVENER_RENDEZVOUS_FILE=str(file), EVENER_TIMEOUT="60")
    code = SCRIPT.format(prepare="")
    results = finish(*(start(code, {**env, "RANK": str(rank)}) for rank in (1, 0)))
    for status, out, err in results:
        assert status == 0, err
        assert out.startswith("OK")
    assert not file.exists()


@pytest.mark.mpi
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (package openmpi-bin)")
@pytest.mark.parametrize(
    ("way", "prepare"),
    [
        ("PMIx", ""),
        ("libmpi", "pmix.load = lambda: None"),
        ("a shared file", "pmix.load = lambda: None; libmpi.load = lambda **_: None"),
    ],
)
def test_plain_mpirun(way: str, prepare: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(prepare="import sys; sys.modules['mpi4py'] = None\n" + prepare))
    # A folder: the file in it is named by the launcher's job.
    env = environment(
        EVENER_RENDEZVOUS_FILE=str(tmp_path),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    command = ["mpirun", "-np", "2", "--oversubscribe", sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("OK")[1:])[0].split() == ["0", "2", "0", "2", "1"]
    assert f"rendezvous by {way} " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_local_and_cross_ranks_from_hosts_alone(hosts: list[int]) -> None:
    entries = [meeting.Entry(f"n{h}", None, None, "") for h in hosts]
    size = len(hosts)
    places = [meeting.complete(Ranks(rank, size), entries) for rank in range(size)]
    for host in set(hosts):
        mine = [places[rank] for rank in range(size) if hosts[rank] == host]
        assert [place.local_rank for place in mine] == list(range(len(mine)))
        assert {place.local_size for place in mine} == {len(mine)}
    for local in {place.local_rank for place in places}:
        across = [place for place in places if place.local_rank == local]
        assert [place.cross_rank for place in across] == list(range(len(across)))
        assert {place.cross_size for place in across} == {len(across)}


def test_the_launchers_local_ranks_are_believed_where_all_have_them() -> None:
    # Two simulated nodes on one host.
    entries = [meeting.Entry("n", rank % 2, 2, "") for rank in range(4)]
    place = meeting.complete(Ranks(3, 4, 1, 2), entries)
    assert (place.local_rank, place.local_size, place.cross_rank, place.cross_size) == (1, 2, 1, 2)


def test_gloos_interface_is_chosen_where_the_hosts_name_misleads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Set and deleted, so that what the code under test sets is undone.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(interfaces, "hostname_misleads", lambda: True)
    monkeypatch.setattr(interfaces, "addresses", lambda: [("lo", "127.0.0.1"), ("ib0", "10.9.0.1")])
    near = gloo.Place("a", "127.0.0.1")
    far = gloo.Place("b", "10.9.0.1")
    gloo.choose_interface(0, [near, near])
    assert os.environ["GLOO_SOCKET_IFNAME"] == ""  # one host: loopback is right
    gloo.choose_interface(1, [near, near, far])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_interfaces_know_loopback() -> None:
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_to("127.0.0.1") == "lo"
    assert interfaces.interface_to("name.invalid") is None
    assert interfaces.is_loopback("::1")
    assert not interfaces.is_loopback("10.0.0.1")
