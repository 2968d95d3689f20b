"""Lanes of threads: order, pipelining, errors. (Lanes of streams: tests/gpu.)"""

import threading

import pytest

from evener.comm.lanes import ThreadLanes


def test_every_lane_sees_the_buckets_in_the_order_of_issue() -> None:
    lanes = ThreadLanes()
    seen: list[list[int]] = [[], [], []]
    # Some buckets skip lanes; they must not overtake.
    tickets = [
        lanes.issue(
            f"bucket {i}",
            [
                None if lane != 1 and i % 3 == 0 else lambda i=i, lane=lane: seen[lane].append(i)  # type: ignore[misc]
                for lane in range(3)
            ],
        )
        for i in range(50)
    ]
    for ticket in tickets:
        ticket.wait()
    assert seen[1] == list(range(50))
    assert seen[0] == seen[2] == [i for i in range(50) if i % 3]
    lanes.close()


def test_stages_of_different_buckets_overlap() -> None:
    """The second bucket is in the first lane while the first one is still in the second."""
    lanes = ThreadLanes()
    meet = threading.Barrier(2, timeout=20)
    first = lanes.issue("first", [None, lambda: meet.wait() and None, None])
    second = lanes.issue("second", [lambda: meet.wait() and None, None, None])
    first.wait()
    second.wait()
    lanes.close()


def test_an_error_names_bucket_and_stage_and_stops_what_follows() -> None:
    lanes = ThreadLanes()
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("connection closed by peer")

    bad = lanes.issue("bucket 3 (conv1.weight ...)", [None, fail, lambda: ran.append("gather")])
    after = lanes.issue("bucket 4", [None, lambda: ran.append("exchange"), None])
    with pytest.raises(
        RuntimeError, match=r"bucket 3 \(conv1.weight ...\), exchange between nodes: connection"
    ):
        bad.wait()
    with pytest.raises(RuntimeError):
        after.wait()
    assert ran == []
    lanes.close()


def test_close_finishes_what_was_issued_and_refuses_what_comes_later() -> None:
    lanes = ThreadLanes()
    ran: list[int] = []
    lanes.issue("one", [lambda: ran.append(1), None, lambda: ran.append(2)])
    lanes.close()
    lanes.close()
    assert ran == [1, 2]
    with pytest.raises(RuntimeError, match="after close"):
        lanes.issue("two", [None, None, None])
