"""What comes next, and when something does not come: order, the frozen schedule, death, stalls."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import evener.horovod.torch as hvd
from evener._native import Answer
from evener.horovod.state import STATE
from tests import worlds


def any_order(rank: int, size: int) -> None:
    hvd.init()
    for round_ in range(10):
        names = [f"t{i}" for i in range(30)]
        random.Random(100 * round_ + rank).shuffle(names)
        started = {}
        for name in names:
            number = int(name[1:])
            # Shapes change now and then, so that the cache does not fit.
            value = torch.full((number + (round_ == 5),), float(rank + number))
            if number % 3 == 0:
                started[name] = hvd.allgather_async(value[: rank + 1], name=name)
            else:
                started[name] = hvd.allreduce_async(value, name=name, op=hvd.Sum)
        random.Random(rank).shuffle(names)
        for name in names:
            number = int(name[1:])
            got = hvd.synchronize(started[name])
            if number % 3:
                assert got.eq(sum(r + number for r in range(size))).all()
            elif number:
                assert got.tolist() == [r + number for r in range(size) for _ in range(r + 1)]


def test_ranks_may_submit_in_any_order() -> None:
    worlds.run([2, 1], any_order, env={"HOROVOD_CACHE_CAPACITY": "20"})


def steady(rank: int, size: int) -> None:
    hvd.init()
    small, half = torch.ones(8), torch.ones(3, dtype=torch.float16)

    def rounds(count: int) -> None:
        for _ in range(count):
            assert hvd.allreduce(small, name="a", op=hvd.Sum).eq(size).all()
            assert hvd.allreduce(half * rank, name="b", op=hvd.Max).eq(size - 1).all()
            assert hvd.allreduce(small * (rank + 1), name="c", op=hvd.Min).eq(1).all()
            assert hvd.allreduce(small * 2, name="d", op=hvd.Product).eq(2**size).all()

    assert STATE.engine._gated == (hvd.local_size() == size)
    rounds(200)
    launches = STATE.engine.frozen()[1]
    assert launches > 0
    # Another operation, another shape, another op, one rank earlier than the other: all leave it.
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
    rounds(60)
    assert hvd.allreduce(torch.ones(9), name="a", op=hvd.Sum).eq(size).all()
    rounds(60)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(torch.ones(8 + rank), name="a", op=hvd.Sum)
    rounds(60)
    if rank == 1:
        for _ in range(5):  # the other is joined, and takes part with zeros
            assert hvd.allreduce(small, name="a", op=hvd.Sum).eq(1).all()
    assert hvd.join() == 1
    rounds(60)
    assert STATE.engine.frozen()[1] >= launches


@pytest.mark.parametrize("shape", [[2], [1, 1]])
def test_a_steady_sequence_is_frozen_and_left_unharmed(shape: list[int]) -> None:
    # On one machine the flag goes through shared memory, otherwise through the collective.
    worlds.run(shape, steady, env={"EVENER_FREEZE_AFTER": "3"}, timeout=150)


def bursts(rank: int, size: int) -> None:
    hvd.init()
    engine = STATE.engine
    launch, launched = engine._launch, []

    def counted(answers: list[Answer], frozen: bool, real: bool) -> None:
        launched.append((len(answers), real))
        launch(answers, frozen, real)

    engine._launch = counted  # type: ignore[method-assign]
    for round_ in range(30):
        numbers = list(range(1, 21))
        random.Random(100 * round_ + rank).shuffle(numbers)
        tensors = {n: torch.full((n, 2), float(n + rank + round_)) for n in numbers}
        halves = {n: torch.full((3, n), n + rank, dtype=torch.float16) for n in numbers}
        started = {n: hvd.allreduce_async_(tensors[n], name=f"a{n}", op=hvd.Sum) for n in numbers}
        means = [hvd.allreduce_async(halves[n], name=f"b{n}", op=hvd.Average) for n in numbers]
        if round_ > 25:  # nobody waits
            while not all(hvd.poll(handle) for handle in [*started.values(), *means]):
                time.sleep(0.001)
        for n in numbers:
            assert hvd.synchronize(started[n]) is tensors[n]
            assert tensors[n].eq(sum(n + r + round_ for r in range(size))).all()
        for n, handle in zip(numbers, means, strict=True):
            mean = hvd.synchronize(handle)
            assert mean.shape == (3, n)
            assert mean.eq(n + (size - 1) / 2).all()
    # A launch for each dtype and round, though the ranks' orders differ from round to round; what a
    # frozen schedule discarded when it began or ended does not count.
    kept = [count for count, real in launched if real]
    assert len(kept) <= 62, launched
    assert kept.count(20) >= 58, launched
    assert engine.frozen()[1] > 20


@pytest.mark.parametrize("shape", [[2], [1, 1]])
def test_a_burst_is_launched_at_once(shape: list[int]) -> None:
    # With a cycle that no busy machine interrupts a burst for.
    env = {"EVENER_FREEZE_AFTER": "3", "HOROVOD_CYCLE_TIME": "1000"}
    worlds.run(shape, bursts, env=env)


def threads(rank: int, size: int) -> None:
    hvd.init()

    def work(number: int) -> int:
        value = torch.full((3,), float(number + rank))
        for _ in range(150):
            assert hvd.allreduce(value, name=f"t{number}", op=hvd.Sum).eq(2 * number + 1).all()
        return number

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [0, 1, 2]
    assert size == 2


def test_threads_wait_at_the_same_time() -> None:
    worlds.run([2], threads, env={"EVENER_FREEZE_AFTER": "3"}, timeout=150)


def never(rank: int, size: int) -> None:
    hvd.init()
    for _ in range(100):
        assert hvd.allreduce(torch.ones(1), name="a", op=hvd.Sum).item() == size
    assert STATE.engine.frozen() == (False, 0)


def test_freezing_can_be_turned_off() -> None:
    worlds.run([2], never, env={"EVENER_FREEZE_AFTER": "0"})


def dies_frozen(rank: int, size: int) -> None:
    hvd.init()
    while STATE.engine.frozen()[1] < 10:
        hvd.allreduce(torch.ones(4), name="a")
    if rank == 1:
        os._exit(3)
    with pytest.raises(hvd.HorovodInternalError):
        for _ in range(100):
            hvd.allreduce(torch.ones(4), name="a")
    with pytest.raises(hvd.HorovodInternalError, match="an earlier operation failed"):
        hvd.allreduce(torch.ones(1))


def test_a_rank_that_dies_in_a_frozen_schedule_is_an_error_on_the_others() -> None:
    found = worlds.outcomes([3], dies_frozen, env={"EVENER_TIMEOUT": "600"})
    assert not found[0].error, found[0].error
    assert not found[2].error, found[2].error


def leaves(rank: int, _size: int) -> None:
    hvd.init()
    hvd.barrier()
    if rank == 1:
        hvd.shutdown()
        return
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 called shutdown"):
        hvd.allreduce(torch.ones(1), name="alone")
    hvd.shutdown()


def test_a_shutdown_of_one_rank_is_an_error_for_who_waits() -> None:
    worlds.run([2], leaves)


def stalls(rank: int, _size: int) -> list[str]:
    import logging

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("evener").addHandler(Listener())
    hvd.init()
    if rank == 1:
        hvd.barrier()
        time.sleep(5)  # longer than the other one waits
        with pytest.raises(hvd.HorovodInternalError, match=r"has been shut down|earlier operation"):
            hvd.allgather(torch.ones(1), name="late")
        return []
    hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.lonely waited . s for rank 1"):
        hvd.allreduce(torch.ones(1), name="lonely")
    return said


def test_a_stall_is_warned_of_with_the_missing_ranks_and_ends() -> None:
    said, _ = worlds.run(
        [2],
        stalls,
        env={
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
        },
    )
    assert any("more than 1 s, waiting for rank 1: allreduce.lonely" in text for text in said), said
