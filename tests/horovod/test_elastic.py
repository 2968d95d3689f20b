"""`hvd.elastic`: states and samplers in one process, and a job that loses and gains hosts.

Hosts are names that a stand-in for ssh runs here. The job decides by itself when a host comes, when
a worker dies and when a host goes, so that nothing depends on how fast it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evener.horovod.torch as hvd
from evener.horovod.common.elastic import HostUpdateResult, ObjectState, run_fn
from evener.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from evener.horovod.torch.elastic.state import (
    ModelStateHandler,
    get_handler_registry,
    set_handler_registry,
)
from evener.tools.launch.discovery import Pool
from evener.tools.launch.elastic import ElasticJob, Fixed, Limits, Worker
from evener.tools.launch.output import Output
from evener.tools.launch.plan import Wishes
from tests import worlds


def same(value: Any) -> Any:
    return value


# --- the loop ------------------------------------------------------------------------------------


class Recorder(ObjectState):
    """Notes what is called."""

    def __init__(self, **values: Any) -> None:
        self.calls: list[str] = []
        super().__init__(same, **values)

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def reset(self) -> None:
        self.calls.append("reset")


def test_what_is_called_after_each_kind_of_interruption() -> None:
    state = Recorder(step=0)
    events: list[Exception | None] = [
        HorovodInternalError("a peer has gone"),
        HostsUpdatedInterrupt(skip_sync=False),
        HostsUpdatedInterrupt(skip_sync=True),
        None,
    ]
    state.register_reset_callbacks([lambda: state.calls.append("callback")])

    def train(state: Recorder, word: str) -> str:
        state.step += 1
        state.calls.append("train")
        event = events.pop(0)
        if event is not None:
            raise event
        return word

    assert run_fn(train, lambda: state.calls.append("world"))(state, "well") == "well"
    again = ["world", "reset", "callback"]
    assert state.calls == [
        *("sync", "train"),
        *("restore", *again, "sync", "train"),  # failed: back to the commit
        *(*again, "sync", "train"),  # added: newcomers take over
        *(*again, "train"),  # removed: everybody has the state
    ]
    assert state.step == 3  # the first step was undone, the others were not


def test_other_errors_go_through() -> None:
    def train(_state: Recorder) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        run_fn(train, lambda: pytest.fail("reset"))(Recorder())


def test_notices_raise_once_and_say_whether_a_sync_is_needed() -> None:
    state = Recorder(step=0)
    state.check_host_updates()
    state.on_hosts_updated(1, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync
    state.check_host_updates()
    state.on_hosts_updated(2, HostUpdateResult.removed)
    state.on_hosts_updated(3, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync
    state.on_hosts_updated(3, HostUpdateResult.added)  # known already
    state.check_host_updates()


# --- states --------------------------------------------------------------------------------------


def states(rank: int, size: int) -> None:
    hvd.init()
    words = torch.nn.Embedding(4, 1, sparse=True)
    bag = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0))
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, float(rank + 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(list(range(16)))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=10 + rank)
    sampler.record_batch(0, 1 + rank)
    state.sync()
    assert model.weight[0, 0] == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (state.batch, sampler.processed_num) == (10, size)
    mine = list(sampler)
    assert len(mine) == len(sampler) == (16 - size) // size
    everyone = {index for part in hvd.allgather_object(mine) for index in part}
    assert everyone == set(sampler_order()[size:])

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    state.batch = 20
    state.commit()
    kept = model.weight.clone()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0] * 2] * 2
    step()
    state.batch = 30
    state.restore()
    assert torch.equal(model.weight, kept) and state.batch == 20
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0] * 2] * 2
    step()
    state.restore()  # a second time: what is kept was not written to
    assert torch.equal(model.weight, kept)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0] * 2] * 2
    # A new world, as after a change: the same optimizers reduce in it.
    point = torch.nn.Parameter(torch.zeros(2))
    adasum = hvd.DistributedOptimizer(torch.optim.SGD([point], lr=1.0), op=hvd.Adasum)

    def adasum_step() -> None:
        adasum.zero_grad()
        (point * torch.tensor([1.0, 0.0] if rank else [0.0, 1.0])).sum().backward()
        adasum.step()

    adasum_step()
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    optimizer.zero_grad()
    model(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.step()
    assert model.weight.grad.tolist() == [[sum(range(size)) / size] * 2] * 2
    adasum_step()  # gradients at right angles: their sum
    assert point.tolist() == ([-2.0, -2.0] if size == 2 else [0.0, -2.0])
    words(torch.tensor([0, 1 + rank])).sum().backward()
    bag.step()
    assert words.weight.grad.to_dense()[0].item() == 1.0
    assert words.weight.grad.to_dense()[1].item() == 1.0 / size


def sampler_order() -> list[int]:
    import random

    order = list(range(16))
    random.Random(0).shuffle(order)
    return order


@pytest.mark.parametrize("ranks", [1, 2])
def test_states(ranks: int) -> None:
    worlds.run([ranks], states)


def handlers(rank: int, size: int) -> None:
    hvd.init()

    class Counter:
        value = 0

    class CounterHandler(ModelStateHandler):
        def save(self) -> None:
            self.kept = self.value.value

        def restore(self) -> None:
            self.value.value = self.kept

        def sync(self) -> None:
            self.value.value = hvd.broadcast_object(self.value.value)

    set_handler_registry([*get_handler_registry(), (Counter, CounterHandler)])
    counter = Counter()
    state = hvd.elastic.TorchState(counter=counter)
    counter.value = 5 + rank
    state.sync()
    assert state.counter.value == 5
    state.save()
    counter.value = 6
    state.restore()
    assert counter.value == 5
    state.counter = Counter()
    state.counter.value = 7
    state.restore()  # the new object is the one that is kept
    assert state.counter.value == 0


def test_a_handler_of_ones_own() -> None:
    worlds.run([2], handlers)


# --- a job ---------------------------------------------------------------------------------------

TRAIN = """
import itertools, os, signal, sys
from pathlib import Path
import torch, horovod.torch as hvd

hosts, host = Path("hosts"), os.environ["HOROVOD_HOSTNAME"]
def now(text):
    Path("new").write_text(text)
    Path("new").rename(hosts)

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
)
state = hvd.elastic.TorchState(model, optimizer, step=0, log=[], stage=0)
state.register_reset_callbacks([lambda: print("RESET to", hvd.size())])

@hvd.elastic.run
def train(state):
    print("ENTER", hvd.rank(), hvd.size(), state.step, len(state.log))
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        state.log = [*state.log, hvd.size()]
        if state.stage == 0 and hvd.size() == 2:      # a host comes
            if hvd.rank() == 0:
                now("ha:1\\nhb:1\\nhc:1\\n")
        elif state.stage == 0 and hvd.size() == 3:    # a worker dies, after a commit
            state.stage = 1
            state.commit()
            state.step += 100                          # must be undone
            if host == "hb":
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(1))
        elif state.stage == 1 and hvd.size() == 2:    # the oldest host goes
            if hvd.rank() == 0:
                now("hb:1\\nhc:1\\n")
        elif state.stage == 1 and hvd.size() == 1:
            return state
        state.commit()

train(state)
assert state.step == len(state.log), (state.step, len(state.log))
sizes = [size for size, _ in itertools.groupby(state.log)]
print("DONE", host, sizes, bool(torch.isfinite(model.weight).all()))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("ha:1\nhb:1\n")
    for name, text in (("rsh", 'shift\nexec sh -c "$*"'), ("discover", "cat hosts")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def horovodrun(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from evener.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "horovodrun", "--rsh", "./rsh", *arguments],
        cwd=job,
        env={**os.environ, "EVENER_TIMEOUT": "60"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_a_job_goes_on_while_hosts_come_fail_and_go(job: Path) -> None:
    arguments = ["-np", "2", "--min-np", "1", "--host-discovery-script", "./discover"]
    done = horovodrun(job, *arguments, "--output-filename", "out", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DONE hc [2, 3, 2, 1] True" in done.stdout, done.stdout
    assert "rank 1 on hb (slot 0) failed (signal 9 (SIGKILL)); hb is left out for good" in (
        done.stderr
    )
    assert "back to the last commit" in done.stderr
    assert "ha is not a host of this job any more" in done.stderr
    # Nobody began anew: a survivor's log is as long as its steps, and newcomers take it over.
    entered = re.findall(r"ENTER (\d) (\d) (\d+) (\d+)", done.stdout)
    assert all(steps == length for _, _, steps, length in entered)
    assert [steps for _, size, steps, _ in entered if size != "2"] and len(entered) == 2 + 3 + 2 + 1
    assert done.stdout.count("RESET to 3") == 2  # the survivors', not the newcomer's
    assert "ENTER" in (job / "out" / "rank.0" / "stdout").read_text()


DIES_ON_ITS_WAY = """
import os, signal
from evener.comm.world import world
if os.environ["HOROVOD_HOSTNAME"] == "hc":
    # It has taken its place in the new world; the others wait for its connection.
    world.World.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
import horovod.torch as hvd
hvd.init()
print("IN", hvd.rank(), hvd.size(), float(hvd.allreduce(__import__("torch").ones(1), op=hvd.Sum)))
"""


def test_a_member_that_dies_while_the_others_connect(job: Path) -> None:
    (job / "train.py").write_text(DIES_ON_ITS_WAY)
    hosts = ["-np", "3", "--min-np", "2", "-H", "ha:1,hb:1,hc:1"]
    done = horovodrun(job, *hosts, "--gloo-timeout-seconds", "10", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hc is left out for good" in done.stderr
    assert sorted(re.findall("IN .*", done.stdout)) == ["IN 0 2 2.0", "IN 1 2 2.0"], done.stdout


def test_a_job_ends_with_the_first_failure_when_too_few_are_left(job: Path) -> None:
    script = (
        "import sys, time, horovod.torch as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: print('out of cheese', file=sys.stderr); sys.exit(7)\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "-c", script]
    done = horovodrun(job, "-np", "2", "--min-np", "2", "-H", "ha:1,hb:1", *command)
    assert done.returncode == 7, done.stderr
    assert "fewer than 2 slots (--min-np) are left" in done.stderr
    assert "out of cheese" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "2", "--min-np", "1", "-H", "ha:2"], "two hosts or more"),
        (["-np", "2", "--min-np", "3", "-H", "ha:1,hb:2"], "contradict each other"),
        (["--slots-per-host", "2", "-np", "2"], "--slots-per-host 2 is for hosts that a script"),
        (["-np", "2", "--reset-limit", "3", "-H", "ha:2"], "for elastic jobs"),
        (["-np", "2", "--min-np", "1", "--mpi", "-H", "ha:1,hb:1"], "ends all ranks"),
        (["-np", "1", "--host-discovery-script", "./rsh"], "printed|status"),
    ],
)
def test_what_cannot_be_an_elastic_job(job: Path, arguments: list[str], says: str) -> None:
    done = horovodrun(job, *arguments, "true")
    assert done.returncode != 0
    assert re.search(says, done.stderr), done.stderr


# --- requests that do not arrive whole -----------------------------------------------------------


def test_a_request_that_is_cut_off_hides_no_other() -> None:
    """Worker 0 died while it asked; 1 says what nobody understands; 2 asks as it should."""
    job = elastic_job()
    workers = {n: Worker(n, "host", n, None, []) for n in range(3)}
    job._workers = workers
    job._store.add("log", 1)
    job._store.set("ask/1/1", "{")
    job._store.set("ask/2/1", '{"sync": false}')
    job._listen()
    assert [workers[n].asked for n in range(3)] == [0, 1, 1]
    assert [workers[n].sync for n in range(3)] == [True, True, False]
    job._store.set("ask/2/2", '{"sync": true}')
    job._listen()
    assert (workers[2].asked, workers[2].sync) == (2, True)
    assert workers[1].asked == 1


def elastic_job() -> ElasticJob:
    wishes, pool = Wishes(command=("true",)), Pool(None)
    job = ElasticJob(Fixed({"host": 3}), Limits(1, 1, None, 10.0), pool, wishes, {}, Output())
    job._store = torch.distributed.HashStore()
    return job
