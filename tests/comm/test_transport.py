"""The seam between the outer exchange and what carries it, with a transport made of a second Gloo
group: the same results, one order, the decision, its life, its failures."""

from __future__ import annotations

import gc
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist

from evener.comm import groups, transport, wires
from evener.comm.codecs import sums
from evener.comm.errors import CommError
from evener.comm.groups import Communicators, Group
from evener.comm.options import Options
from evener.comm.reducer import Reducer
from tests import worlds
from tests.comm.scripts import heard
from tests.comm.test_compression import TOLERANCE, Run
from tests.comm.test_staged import ENV as LOOPBACK

# Forms whose bytes are the same whatever carries them; of the others sums are rounded elsewhere.
CARRIED = [name for name in wires.names() if wires.get(name).feedback]
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class OverGloo:
    """Moves bytes by Gloo, and notes what it was asked for."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.calls: list[tuple[str, int]] = []
        self.broken, self.closed = "", 0

    def all_gather(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        self._note("gather", payload)
        assert received.is_contiguous() and received.numel() == self.size * payload.numel()
        dist.all_gather_into_tensor(
            received.view(torch.uint8), payload.view(torch.uint8), group=self.group
        )

    def all_to_all(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        self._note("exchange", payload)
        assert received.numel() == payload.numel() and payload.numel() % self.size == 0
        dist.all_to_all_single(
            received.view(torch.uint8), payload.view(torch.uint8), group=self.group
        )

    def check(self) -> None:
        if self.broken:
            raise CommError(self.broken, "look at the cable")

    def close(self) -> None:
        self.closed += 1

    def _note(self, what: str, payload: torch.Tensor) -> None:
        assert payload.is_contiguous() and not self.closed
        self.calls.append((what, payload.numel() * payload.element_size()))


class Provides:
    """What `evener.comm.staged` is. `missing`, `fails`: on which rank, -1 for none."""

    def __init__(self, missing: int = -1, fails: int = -1) -> None:
        self.missing, self.fails = missing, fails
        self.made: list[OverGloo] = []

    def unavailable(self, device: torch.device) -> str | None:
        assert device == torch.device("cpu")
        return "no such driver" if dist.get_rank() == self.missing else None

    def connect(
        self, rank: int, size: int, control: Any, device: torch.device, timeout: float
    ) -> OverGloo:
        assert (rank, size) == (dist.get_rank(control), dist.get_world_size(control))
        assert device == torch.device("cpu") and timeout == 1800.0  # of the process group
        if dist.get_rank() == self.fails:
            raise CommError("port 7 is closed", "open it")
        self.made.append(OverGloo(rank, size, control))
        return self.made[-1]


def provide(**broken: int) -> Provides:
    """In this process, one rank of a world."""
    found = Provides(**broken)
    transport.provider = lambda: found  # type: ignore[assignment]
    return found


# --- sums ---


def adds_up(rank: int, size: int) -> None:
    provide()
    made = Communicators(Options(outer="staged", algorithm="flat"), torch.device("cpu"))
    group = made.route.outer
    assert group.transport is not None
    lengths = (1, 15, 16 * size, 1000, 4099)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for n in lengths:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                generator = torch.Generator().manual_seed(n)
                every = torch.randn(size, n, generator=generator).to(dtype)
                have, want = every[rank].clone(), torch.empty(n, dtype=dtype)
                group.all_reduce(have, op)
                scale = 1.0 if op == dist.ReduceOp.SUM else 1 / size
                sums.add_reference(every, scale, want)
                assert torch.equal(have, want), (dtype, n, op)
                exact = every.double().sum(0) * scale
                assert torch.allclose(have.double(), exact, rtol=1e-2, atol=1e-2)
    groups.PIECE = 4096  # by pieces, the last one a short one
    have = torch.full((5000,), 1.0 + rank)
    group.all_reduce(have, dist.ReduceOp.SUM)
    assert (have == sum(1.0 + r for r in range(size))).all()
    with pytest.raises(ValueError, match="neither SUM nor AVG"):
        group.all_reduce(have, dist.ReduceOp.MAX)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sum_over_a_transport(ranks: int) -> None:
    """Sums of every length, in rank order, rounded once: the same bits everywhere."""
    worlds.run([1] * ranks, adds_up)


def what_a_sum_sends(rank: int, size: int) -> int:
    provided = provide()
    made = Communicators(Options(outer="staged"), torch.device("cpu"))
    made.route.outer.all_reduce(torch.ones(48 * size), dist.ReduceOp.SUM)
    sent = 0
    for what, payload in provided.made[0].calls:
        sent += payload * (size - 1) // (size if what == "exchange" else 1)
    return sent


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_sends_no_more_than_it_must(ranks: int) -> None:
    total = 4 * 48 * ranks
    assert worlds.run([1] * ranks, what_a_sum_sends) == [2 * (ranks - 1) * total // ranks] * ranks


# --- wires ---


def every_form(rank: int, size: int, dtype: str, real: bool) -> list[tuple[str, int]]:
    """Each form without and with a transport: what arrives, and that nothing is lost.

    `real`: Evener's own, over loopback.
    """
    provided = Provides() if real else provide()
    kind = getattr(torch, dtype)
    for form in wires.names():
        plain, carried = Run(rank, form, kind), Run(rank, form, kind, outer="staged")
        assert plain.reducer.communicators.route.outer.transport is None
        assert carried.reducer.communicators.route.carrier.name == "staged"
        assert "staged between nodes" in carried.reducer.describe()
        for step in range(4):
            plain.step(step)
            carried.step(step)
            for name, parameter in plain.named.items():
                want, have = parameter.grad, carried.named[name].grad
                assert want is not None and have is not None
                # Low rank sends sums itself, of which the next step's basis comes.
                summed = wires.get(form).late == "low-rank"
                # Of two ranks a narrow form adds what came in float32: one rounding fewer.
                wider = form in NARROW and NARROW[form] != kind
                same = size == 2 and not wider
                if same or (form in CARRIED and name == "weight" and step > 0 and not summed):
                    assert torch.equal(have, want), (form, name, step)
                # Another order of sums, one rounding instead of several.
                tolerance = 1e-3 if summed else TOLERANCE[NARROW.get(form, kind)]
                worst = (have.double() - want.double()).abs().max().item()
                assert worst <= tolerance * want.abs().max().item(), (form, name, step)
        if form in CARRIED:
            carried.check(carried.owed(), TOLERANCE[kind])
        for run in (plain, carried):
            run.reducer.close()
    if real:
        assert [type(made).__name__ for made in transport.live()] == ["StagedTransport"]
        return [("all", size)]
    assert len(provided.made) == 1  # one after the other, all had the same
    return provided.made[0].calls


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([1, 1], "float32"),
        ([1, 1], "bfloat16"),
        ([1, 1, 1], "float32"),
        ([1, 1, 1, 1], "float32"),
        ([1, 1, 1, 1], "float16"),
        ([2, 2], "float32"),
    ],
    ids=str,
)
def test_every_form_as_without(shape: list[int], dtype: str) -> None:
    calls = worlds.run(shape, every_form, dtype, False)
    assert calls[0] and all(other == calls[0] for other in calls)  # one order on all ranks


def test_every_form_over_the_staged_transport() -> None:
    worlds.run([1, 1, 1], every_form, "float32", True, env=LOOPBACK)


# --- the decision ---


def decides(rank: int, size: int, case: str) -> tuple[dict[str, Any], list[str], int]:
    provided = provide(
        missing=1 if case == "unavailable" else -1, fails=1 if case == "does not connect" else -1
    )
    wish = {"auto": "auto", "nccl": "nccl"}.get(case, "staged")
    if case == "no such module":
        transport.provider = lambda: __import__("evener.comm.no_such_module")  # type: ignore[assignment]
    with heard() as said:
        made = Communicators(Options(outer=wish), torch.device("cpu"))
    assert made.route.outer.transport is made.route.carrier.transport
    lines = [f"{level} {line}" for level, line in zip(said.levels, said.lines, strict=True)]
    return made.route.carrier.to_json(), lines, sum(t.closed for t in provided.made)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("auto", "on CPUs there is nothing to keep free"),
        ("nccl", "EVENER_OUTER=nccl"),
        ("unavailable", "rank 1: no such driver"),
        ("does not connect", "the staged transport does not connect: rank 1: port 7 is closed"),
        ("no such module", "this build has no staged transport"),
    ],
)
def test_without_a_transport_all_ranks_do_without(case: str, reason: str) -> None:
    found = worlds.run([1, 1], decides, case)
    for chosen, lines, closed in found:
        assert chosen["name"] == "gloo" and chosen["reason"].startswith(reason), chosen
        warned = [line for line in lines if "the exchange between nodes goes by gloo" in line]
        # Once for all, and only where something else was asked for.
        assert len(warned) == (case not in ("auto", "nccl") and lines is found[0][1]), lines
        assert all(line.startswith("WARNING") for line in warned)
        assert closed == (case == "does not connect" and chosen is found[0][0])


def wants_something_else(rank: int, size: int) -> str:
    provide()
    with pytest.raises(CommError) as caught:
        Communicators(Options(outer="staged" if rank else "auto"), torch.device("cpu"))
    return caught.value.problem


def test_ranks_that_want_different_things() -> None:
    want = "rank 0 has EVENER_OUTER=auto, rank 1 has staged"
    assert worlds.run([1, 1], wants_something_else) == [want] * 2


def measures(rank: int, size: int) -> None:
    """Times as they might be on two ranks: the slowest one's count."""
    provided = provide()
    made = Communicators(Options(outer="nccl"), torch.device("cpu"))
    outer, control, device = made.route.outer, made.control, made.device
    measured = transport._time

    left_over: list[tuple[float, str]] = []

    def decide(library: float, *staged: float, error: str = "") -> transport.Carrier:
        """`staged`: round by round, the last one from then on."""
        rounds = [*staged, *staged[-1:] * (transport._ROUNDS - len(staged))]
        left_over[:] = [time for ms in rounds for time in ((library, ""), (ms, error))]
        transport._time = lambda *_: left_over.pop(0)
        return transport._decide(
            outer, control, device, Options(timeout=1800.0), ["", ""], lambda: control.handle
        )

    def ended() -> int:
        return provided.made[-1].closed

    taken = decide(10.0, 11.4 if rank else 9.0)
    assert (taken.name, taken.library_ms, taken.staged_ms, ended()) == ("staged", 10.0, 11.4, 0)
    assert "an all-gather of 16 MiB takes 11.4 ms staged, 10.0 ms by gloo" in taken.reason
    assert len(left_over) == 2 * (transport._ROUNDS - 1)  # one round was enough
    left = decide(10.0, 11.6 if rank else 9.0)
    assert (left.name, left.transport, ended()) == ("gloo", None, 1)
    assert left.staged_ms == 11.6 and not left_over
    # Connections that are slow at first; and so slow that nobody wants to wait for more.
    later = decide(10.0, 15.0, 14.0, 11.0)
    assert (later.name, later.staged_ms, len(left_over)) == ("staged", 11.0, 2)
    slow = decide(400.0, 600.0)
    assert (slow.name, slow.staged_ms, len(left_over)) == ("gloo", 600.0, 6)
    failed = decide(10.0, 9.0, error="a peer has gone" if rank else "")
    assert (failed.name, failed.transport, ended()) == ("gloo", None, 1)
    assert failed.reason == "the measurement failed: rank 1: a peer has gone"
    # And measured, whatever comes out; a rank whose operation fails still meets the others.
    transport._time = measured
    carrier = transport._decide(
        outer, control, device, Options(timeout=1800.0), ["", ""], lambda: control.handle
    )
    assert carrier.library_ms and carrier.staged_ms
    sizes = [size for _, size in provided.made[-1].calls]
    assert sizes == [transport.MEASURED_BYTES] * len(sizes) and len(sizes) in (5, 10, 15, 20)
    calls: list[int] = []

    def operation() -> None:
        calls.append(1)
        if rank == 1:
            raise RuntimeError("connection reset")

    _, error = transport._time(operation, device, control)
    assert (len(calls), error) == ((1, "connection reset") if rank else (5, ""))


def test_auto_measures_both() -> None:
    worlds.run([1, 1], measures)


# --- its life ---


def lives(rank: int, size: int) -> None:
    provided = provide()
    options = Options(outer="staged")
    first = Communicators(options, torch.device("cpu"))
    second = Communicators(options, torch.device("cpu"))
    assert len(provided.made) == 2
    kept = first.route.outer.transport
    first.close()
    first.close()
    third = Communicators(options, torch.device("cpu"))
    assert third.route.outer.transport is kept and len(provided.made) == 2
    assert transport.live() == provided.made
    assert transport.failure() == ""
    provided.made[1].broken = "no route to host"
    assert transport.failure() == "no route to host"
    del first, second, third
    dist.destroy_process_group()
    gc.collect()
    assert [made.closed for made in provided.made] == [1, 1]
    assert not transport.live()


def test_transports_are_lent_and_end_with_the_world() -> None:
    worlds.run([1, 1], lives)


def ends(rank: int, size: int) -> None:
    from evener.comm.world import abort

    provided = provide()
    made = Communicators(Options(outer="staged"), torch.device("cpu"))
    assert made.route.outer.transport is not None
    abort.end_collectives()
    assert [made.closed for made in provided.made] == [1]
    assert not transport.live()


def test_an_abort_ends_them_too() -> None:
    worlds.run([1, 1], ends)


# --- failures ---


def fails(rank: int, size: int, when: str) -> str:
    provided = provide()
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(4)])
    reducer = Reducer(model.named_parameters(), Options(outer="staged", bucket_bytes=1))
    carried = provided.made[0]

    def backward() -> None:
        model(torch.ones(2, 16)).sum().backward()

    def step(number: int) -> None:
        if number == 1 and when == "issue":
            carried.broken = "rank 1 does not answer"
        backward()
        if number == 1 and when == "flush":
            carried.broken = "rank 1 does not answer"
        reducer.flush()
        if number == 1 and when == "wait":
            carried.broken = "rank 1 does not answer"
        for bucket in reducer.sequence:
            reducer.wait(bucket)
        if number == 1 and when == "end":
            carried.broken = "rank 1 does not answer"
        reducer._adopt(frozenset())
        reducer.end_step()

    step(0)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(before) == 4
    model.zero_grad()
    if when == "operation":  # nothing is noticed before it: the lane's thread finds it

        def broken(*_: object) -> None:
            raise CommError("rank 1 does not answer", "look at the cable")

        carried.all_gather = broken  # type: ignore[method-assign]
    with pytest.raises(CommError, match="rank 1 does not answer") as caught:
        step(1)
    reducer.close()
    assert reducer.communicators._lent  # nothing of it is lent again
    return str(caught.value)


@pytest.mark.parametrize("when", ["issue", "flush", "wait", "end", "operation"])
def test_a_dead_network_is_an_error(when: str) -> None:
    """On the host, before the result is used; in backward too, where buckets are issued."""
    for text in worlds.run([1, 1], fails, when):
        if when == "operation":
            assert "bucket 0" in text and "exchange between nodes" in text


# --- streams ---


class Event:
    def __init__(self) -> None:
        self.after: list[str] = []

    def record(self, stream: Stream) -> None:
        self.after = list(stream.done)

    def wait(self, stream: Stream) -> None:
        stream.done += [name for name in self.after if name not in stream.done]


class Stream:
    """Knows, of all that was put on it, what must have run before."""

    made: ClassVar[list[Stream]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.done: list[str] = []
        Stream.made.append(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self.done.append("host waits")


class Current:
    now = Stream()


def test_buckets_take_the_outer_streams_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.comm import lanes as module
    from evener.comm.lanes import OUTER_STREAMS, StreamLanes

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(module, "_wait", Event.wait)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Current, "now", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Current.now)
    main = Current.now = Stream()
    Stream.made.clear()
    lanes = StreamLanes(torch.device("cpu"))

    def put(name: str) -> Any:
        return lambda: Current.now.done.append(name)

    def issue(bucket: int, outer: int, inner: bool = True) -> Any:
        main.done.append(f"pack {bucket}")
        stages = [put(f"scatter {bucket}"), put(f"cross {bucket}"), put(f"gather {bucket}")]
        kept = stages if inner else [None, stages[1], None]
        return lanes.issue(f"bucket {bucket}", kept, outer)

    tickets = [issue(bucket, bucket) for bucket in range(5)]
    assert OUTER_STREAMS == 3
    outer = [lanes.streams[f"outer {i}"] for i in range(3)]
    assert [[d for d in s.done if d.startswith("cross")] for s in outer] == [  # type: ignore[attr-defined]
        ["cross 0", "cross 3"],
        ["cross 1", "cross 4"],
        ["cross 2"],
    ]
    # Before a bucket's own gather there is all that it needs, and earlier gathers; and of what
    # crosses, not what was issued later.
    for bucket, ticket in enumerate(tickets):
        after = ticket.event.after
        assert after[-1] == f"gather {bucket}"
        assert {f"scatter {bucket}", f"cross {bucket}", f"pack {bucket}"} <= set(after)
        assert [n for n in after if n.startswith("gather")] == [
            f"gather {i}" for i in range(bucket + 1)
        ]
        assert f"cross {bucket + 1}" not in after
    flat = issue(5, 0, inner=False)
    assert flat.event.after[-1] == "cross 5" and "pack 5" in flat.event.after
    flat.wait()
    assert "cross 5" in main.done and "cross 4" not in main.done
    # One lane: one after the other, as with NCCL, which needs no other stream.
    alone = [issue(bucket, 0, inner=False) for bucket in (6, 7)]
    assert "cross 6" in alone[1].event.after
    lanes.close()
    assert all(stream.done[-1] == "host waits" for stream in Stream.made)


def test_a_group_without_a_transport_calls_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls as ever, on the tensors themselves."""
    calls: list[tuple[Any, ...]] = []
    for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single"):
        monkeypatch.setattr(
            dist, name, lambda *args, _name=name, **kw: calls.append((_name, args, kw))
        )
    handle: Any = object()
    group = Group(handle, 0, 2)
    a, b = torch.ones(2), torch.ones(4)
    group.all_reduce(a, dist.ReduceOp.AVG)
    group.all_gather(b, a)
    group.all_to_all(b, b)
    group.check()
    assert [(name, len(args), kw) for name, args, kw in calls] == [
        ("all_reduce", 2, {"group": handle}),
        ("all_gather_into_tensor", 2, {"group": handle}),
        ("all_to_all_single", 2, {"group": handle}),
    ]
    assert calls[0][1][0] is a and calls[1][1][0] is b and calls[2][1][1] is b


def test_a_captured_graph_goes_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    carried: Any = object()
    group = Group(cast(Any, None), 0, 2, carried)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert group._carries(cast(Any, OnGpu())) is None
    assert group._carries(torch.ones(1)) is carried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert group._carries(cast(Any, OnGpu())) is carried


@pytest.mark.parametrize(
    ("device", "outer", "hosts", "size", "why"),
    [
        ("cuda", "auto", 2, 2, ""),
        ("cuda", "auto", 1, 2, "one host"),
        ("cuda", "auto", 2, 4, "several ranks of a host"),
        ("cpu", "auto", 2, 2, "CPUs"),
        ("cuda", "nccl", 2, 2, "EVENER_OUTER=nccl"),
        ("cuda", "staged", 2, 4, ""),
    ],
)
def test_where_the_own_transport_is_not_tried(
    device: str, outer: str, hosts: int, size: int, why: str
) -> None:
    options = Options.resolve(env={"EVENER_OUTER": outer})
    said = transport._against(torch.device(device), options, hosts, size)
    assert why in said and bool(why) == bool(said)
