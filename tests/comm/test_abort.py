"""Aborts, with stand-ins for NCCL's backends: no GPU is needed to see who waits for whom."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from evener.comm.world import abort, rendezvous
from evener.comm.world.ranks import Ranks
from evener.horovod.common import current
from evener.horovod.common import elastic as common
from evener.horovod.state import STATE


class Group:
    """The part of what `nccl_backends` gives that tests need."""

    group_name = "7"


class Backend:
    """Its abort returns only when every other's has begun, as CUDA makes NCCL's."""

    def __init__(self, all_begun: threading.Barrier | None = None, error: str = "") -> None:
        self.all_begun, self.error, self.calls = all_begun, error, 0
        self.release = threading.Event()

    def abort(self) -> None:
        self.calls += 1
        if self.error:
            raise RuntimeError(self.error)
        if self.all_begun is not None:
            self.all_begun.wait(30)
        else:
            self.release.wait(30)


@pytest.fixture
def world() -> Any:
    rendezvous.init_process_group(Ranks(0, 1, 0, 1, source="a test"), backend="gloo")
    yield
    rendezvous.shutdown()


def stand_in(monkeypatch: pytest.MonkeyPatch, backends: list[Any]) -> None:
    pairs = [(Group(), backend) for backend in backends]
    monkeypatch.setattr(abort, "nccl_backends", lambda: pairs)


@pytest.mark.usefixtures("world")
def test_all_flags_are_up_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(3)
    backends = [Backend(barrier) for _ in range(3)]
    stand_in(monkeypatch, backends)
    assert not abort.aborted()
    abort.end_collectives(limit=25.0)
    assert abort.aborted()
    abort.end_collectives(limit=25.0)
    assert [backend.calls for backend in backends] == [1, 1, 1]  # the second call did nothing


@pytest.mark.usefixtures("world")
def test_an_abort_that_hangs_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, refuses = Backend(), Backend(error="this communicator was never made")
    stand_in(monkeypatch, [stuck, refuses])
    try:
        with pytest.raises(abort.AbortError, match="1 of 2 communicators did not end within"):
            abort.end_collectives(limit=0.3)
    finally:
        stuck.release.set()


@pytest.mark.usefixtures("world")
def test_what_nccl_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        name = "SUCCESS"

    class Reports:
        def get_error(self) -> State:
            return State()

    stand_in(monkeypatch, [Reports()])
    assert abort.nccl_error() == ""
    monkeypatch.setattr(State, "name", "REMOTE_ERROR")
    assert abort.nccl_error() == "NCCL reports REMOTE_ERROR in group 7"


def test_a_world_that_was_aborted_is_left_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("destroy_process_group waits for what was aborted")

    abort.end_collectives()  # no world: nothing to do
    for _ in range(2):  # and the next one has the same names again
        rendezvous.init_process_group(Ranks(0, 1, 0, 1, source="a test"), backend="gloo")
        dist.new_group([0], backend="gloo")
        assert not abort.aborted()
        abort.end_collectives()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", refuse)
            rendezvous.shutdown()
        assert not dist.is_initialized()


class Steps(common.State):
    """Notes the order of what is done to it."""

    def __init__(self, notes: list[str], fails: bool = False) -> None:
        super().__init__(lambda x: notes.append("agree") or x)
        self.notes, self.fails = notes, fails

    def settle(self) -> None:
        self.notes.append("settle")
        if self.fails:
            self.fails = False
            raise common.HorovodInternalError("rank 1 has gone", "the last commit is restored")

    def save(self) -> None:
        self.notes.append("save")

    def restore(self) -> None:
        self.notes.append("restore")

    def sync(self) -> None:
        self.notes.append("sync")


def test_a_commit_keeps_what_all_ranks_have_reached() -> None:
    notes: list[str] = []
    state = Steps(notes)
    state.commit()
    assert notes == ["settle", "agree", "save"]
    state.on_hosts_updated(1.0, 2)
    with pytest.raises(common.HostsUpdatedInterrupt):
        state.commit()
    assert notes[3:] == ["settle", "agree", "save"]
    state.fails = True
    with pytest.raises(common.HorovodInternalError):
        state.commit()
    assert notes[6:] == ["settle"]  # nothing was kept


@pytest.mark.parametrize("updated", [False, True])
def test_collectives_end_before_anything_waits_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, updated: bool
) -> None:
    """updated: the peer dies while hosts are changing."""
    notes: list[str] = []
    monkeypatch.setattr(current, "_state", STATE)
    monkeypatch.setattr(abort, "end_collectives", lambda: notes.append("abort"))
    monkeypatch.setattr(abort, "wait_for_gpu", lambda: notes.append("wait"))
    state = Steps(notes, fails=updated)
    events: list[Exception | None] = [
        common.HostsUpdatedInterrupt(True)
        if updated
        else common.HorovodInternalError("rank 1 has gone", ""),
        None,
    ]

    def train(_state: common.State) -> None:
        if (event := events.pop(0)) is not None:
            raise event

    common.run_fn(train, lambda: notes.append("world"))(state)
    before = ["sync", "settle"] if updated else ["sync"]
    assert notes == [*before, "abort", "wait", "restore", "world", "sync"]
