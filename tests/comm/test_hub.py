"""Nodes that come and go, over real connections. The algorithm's twin is `tests/twins/nodes.py`."""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.errors import CommError
from evener.comm.hub import client, frames, server
from evener.comm.hub.client import Place, address, promise
from evener.comm.hub.token import Token, of_server
from evener.comm.options import Options
from evener.ddp import accelerate, data_shard
from evener.errors import EvenerError, UsageError
from tests import worlds
from tests.hubs import OUTER, LiveHub, Node, together, token_file, until


def _alone(function: str) -> None:
    """A process with a group of one rank."""
    found = worlds.run([1], _run, function, timeout=120)
    assert found == [True]


def _run(_rank: int, _size: int, function: str) -> bool:
    globals()[function]()
    return True


def comes_and_goes() -> None:
    hub = LiveHub(least=2)
    try:
        a, b = Node(hub, "a", 1), Node(hub, "b", 2)
        assert a.bits() != b.bits()
        together(a.begin, b.begin)
        assert a.bits()[:-13] == b.bits()[:-13]
        for _ in range(2):
            a.step()
            b.step(-0.02)
            together(a.rounds.exchange, b.rounds.exchange)
            assert a.bits() == b.bits()
        assert a.rounds.rounds == 2 and a.rounds.steps == 2
        b.die()
        until(lambda: any("b is gone" in line for line in hub.said), "the hub sees the death")
        a.step()
        waits = threading.Thread(target=a.rounds.exchange)
        waits.start()
        until(lambda: any("waiting" in line for line in hub.said), "the hub waits")
        c = Node(hub, "b", 3)
        c.begin()
        assert c.rounds.rounds == 2 and c.rounds.steps == 2
        c.step()
        c.rounds.end_round()  # unless the hub has called it in its step already
        waits.join()
        assert a.bits() == c.bits() and c.rounds.rounds == 3
        a.step()
        c.step()
        c.rounds.close()  # to its end: a goes on alone, although two must be there
        a.rounds.exchange()
        a.rounds.close()
        with mock.patch.object(server, "LINGER", 0.1):
            until(hub.hub.finished.is_set, "the hub ends")
    finally:
        hub.stop()


def a_hub_is_started_again() -> None:
    hub = LiveHub(least=2)
    a, b = Node(hub, "a", 1), Node(hub, "b", 1)
    together(a.begin, b.begin)
    for node in (a, b):
        node.step()
    together(a.rounds.exchange, b.rounds.exchange)
    hub.stop()
    a.step(0.5)
    b.step()  # nobody waits for a hub between two exchanges
    again = LiveHub(least=2, port=hub.port)
    try:
        together(a.rounds.exchange, b.rounds.exchange)
        assert a.bits() == b.bits() and a.rounds.rounds == 2
        assert again.hub.shared.round == 2
    finally:
        again.stop()
    a.step()
    with mock.patch.object(Options, "timeout", 1.0):
        a.rounds.options = Options(every=9, timeout=1.0, **OUTER)
        with pytest.raises(CommError, match="is gone for 1 s") as raised:
            a.rounds.exchange()
    assert "state_dict" in raised.value.fix
    assert a.rounds.state_dict()["rounds"] == 2


def other_programs_are_refused() -> None:
    hub = LiveHub()
    try:
        a = Node(hub, "a")
        a.begin()
        for how, said in (
            ({"width": 7}, "parameter 0.weight = torch.float32 6x4, this one has torch.float32 7"),
            ({"every": 5}, "every = 1000, this one has 5"),
            ({"overlap": 4}, "overlap = 0, this one has 4"),
            ({"wire": "int8"}, "form = exact, this one has int8"),
            ({"outer_lr": 0.5}, "outer_lr = 0.7, this one has 0.5"),
        ):
            with pytest.raises(UsageError, match="refuses this node") as raised:
                Node(hub, "b", **how).begin()
            assert said in str(raised.value), raised.value
        with pytest.raises(UsageError, match="do not send topk"):
            Node(hub, "b", wire="topk")
        with (
            mock.patch.object(client, "__version__", "9.9"),
            pytest.raises(UsageError, match=r"has Evener 9\.9"),
        ):
            Node(hub, "b").begin()
        a.step()
        a.rounds.exchange()
        assert a.rounds.rounds == 1
    finally:
        hub.stop()


def a_node_that_is_silent_comes_back_without_its_steps() -> None:
    hub = LiveHub()
    try:
        a, b = Node(hub, "a"), Node(hub, "b")
        together(a.begin, b.begin)
        for node in (a, b):
            node.step()
        together(a.rounds.exchange, b.rounds.exchange)
        b.step(3.0)
        late = next(m for m in hub.membership.members.values() if m.name == "b")
        hub.call(lambda: (setattr(late, "heard", -1e9), hub.hub.look()))
        until(lambda: any("nothing was heard" in line for line in hub.said), "b is left out")
        a.step()
        a.rounds.exchange()
        until(lambda: (b.step(3.0), b.rounds.rounds == 2)[1], "b is back")
        assert b.bits() == a.bits() and b.rounds.since == 0
    finally:
        hub.stop()


def weights_are_checked() -> None:
    hub = LiveHub()
    try:
        a, b = Node(hub, "a"), Node(hub, "b")
        together(a.begin, b.begin)
        for node in (a, b):
            node.step()
        b.rounds._shared.momentum[3] = 1.0  # a bit that fell over
        a_done = threading.Thread(target=a.rounds.exchange)
        a_done.start()
        b.rounds.exchange()
        a_done.join()
        assert any("other shared weights in round 0" in line for line in hub.said)
        assert a.bits() == b.bits() and a.rounds.rounds == b.rounds.rounds == 1
        with torch.no_grad():
            next(b.net.parameters()).fill_(float("nan"))
        b.step()
        with pytest.raises(CommError, match="not finite"):
            b.rounds.exchange()
        b.rounds.load_state_dict(b.rounds.state_dict())
        assert b.bits() == a.bits()
        b.net.load_state_dict({k: torch.ones_like(v) for k, v in b.net.state_dict().items()})
        with pytest.raises(UsageError, match="were loaded"):
            b.step()
        next(a.net.parameters()).requires_grad_(False)
        a.step()
        with pytest.raises(UsageError, match=r"0\.weight was frozen"):
            a.rounds.exchange()
    finally:
        hub.stop()


def states_begin_a_job() -> None:
    hub = LiveHub()
    a = Node(hub, "a")
    a.begin()
    for _ in range(3):
        a.step()
        a.rounds.exchange()
    state = a.rounds.state_dict()
    hub.stop()
    other = LiveHub(least=2)
    try:
        b, c = Node(other, "b", 5), Node(other, "c", 6)
        together(b.begin, c.begin)
        together(lambda: b.rounds.load_state_dict(state), lambda: c.rounds.load_state_dict(state))
        assert b.rounds.rounds == c.rounds.rounds == 3
        assert b.bits()[:12] == a.bits()[:12]
        for node in (b, c):
            node.step()
        together(b.rounds.exchange, c.rounds.exchange)
        assert b.bits() == c.bits() and other.hub.shared.round == 4
        with pytest.raises(UsageError, match="no state"):
            b.rounds.load_state_dict({"version": 0})
    finally:
        other.stop()


@pytest.mark.parametrize(
    "case",
    [
        comes_and_goes,
        a_hub_is_started_again,
        other_programs_are_refused,
        a_node_that_is_silent_comes_back_without_its_steps,
        weights_are_checked,
        states_begin_a_job,
    ],
    ids=lambda case: case.__name__,
)
def test_nodes(case: Callable[[], None]) -> None:
    _alone(case.__name__)


def _two_ranks(rank: int, size: int, variables: dict[str, str], overlap: int) -> Any:
    os.environ.update(variables)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model: Any = accelerate(DistributedDataParallel(net), optimizer, every=3, overlap=overlap)
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.evener.end_round()
    steps = model.evener.steps, model.evener.rounds, model.evener.since
    shards = data_shard()
    bits = [p.detach().flatten().tolist() for p in [*net.parameters(), *net.buffers()]]
    model.evener.close()
    return bits, steps, shards, size


@pytest.mark.parametrize("overlap", [0, 1])
def test_ranks_of_a_node_stay_equal_and_gradients_are_averaged_in_every_step(overlap: int) -> None:
    hub = LiveHub(slots=3)
    try:
        variables = {
            "EVENER_HUB": f"127.0.0.1:{hub.port}",
            "EVENER_HUB_TOKEN": token_file().read_text(encoding="utf-8"),
            "EVENER_HUB_SLOT": "1/3",
        }
        (one, steps, first, _), (two, _, second, _) = worlds.run(
            [2], _two_ranks, variables, overlap
        )
        assert one == two and steps == (8, 3, 0)
        assert (first, second) == ((1, 6), (4, 6))
    finally:
        hub.stop()


def _fails(_rank: int, _size: int, variables: dict[str, str]) -> str:
    os.environ.update(variables)
    net = nn.Linear(4, 6)
    try:
        accelerate(DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1), every=3)
    except EvenerError as error:
        return error.problem
    return ""


def test_all_ranks_of_a_node_hear_why_it_was_refused() -> None:
    hub = LiveHub()
    try:
        other = Token.read(token_file("other"))
        mine = Token.read(token_file())
        tokens = {
            "has another token": Token(mine.certificate, "guessed").text,
            "another token than this node": other.text,
        }
        for said, token in tokens.items():
            variables = {"EVENER_HUB": f"127.0.0.1:{hub.port}", "EVENER_HUB_TOKEN": token}
            found = worlds.run([2], _fails, variables)
            assert found[0] == found[1] and said in found[0], found
    finally:
        hub.stop()


# --- what strangers send --------------------------------------------------------------------------


def _raw(hub: LiveHub, data: bytes, tls: bool = True) -> bytes:
    """Send `data` to the hub, and what it answers."""

    async def talk() -> bytes:
        context = Token.read(token_file()).of_client() if tls else None
        name = "evener-hub" if tls else None
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", hub.port, ssl=context, server_hostname=name
            )
            writer.write(data)
            await writer.drain()
            if tls and writer.can_write_eof():
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 15)
        except (OSError, ssl.SSLError):
            return b""

    return asyncio.run(talk())


def _frame(fields: bytes, payload: bytes = b"", size: int | None = None, check: int = 0) -> bytes:
    found = zlib.crc32(payload, zlib.crc32(fields)) ^ check
    size = len(payload) if size is None else size
    return struct.pack(">4sIQI", b"EVH1", len(fields), size, found) + fields + payload


def test_strangers_get_nothing_and_cost_nothing() -> None:
    with mock.patch.object(server, "_HELLO", 1.0):
        hub = LiveHub()
        try:
            for data in (
                b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
                struct.pack(">4sIQI", b"EVH1", 0xFFFFFFFF, 0, 0) + bytes(100),
                _frame(b'{"is":"hello"}', size=1 << 60),
                _frame(b'{"is":"hello"}', check=1),
                _frame(b"[1, 2]"),
                _frame(b"{" * 60000),
                b"EVH1",
            ):
                assert _raw(hub, data) == b""
            assert b"refused" in _raw(hub, _frame(b'{"is":"hello"}'))
            assert _raw(hub, b"EVH1" + bytes(100), tls=False) == b""
            assert hub.membership.members == {} and hub.hub.shared is None
        finally:
            hub.stop()


def test_a_torn_or_wrong_message_costs_its_node_and_nobody_else() -> None:
    _alone("torn_messages")


def torn_messages() -> None:
    hub = LiveHub(least=1)
    try:
        a, b = Node(hub, "a"), Node(hub, "b")
        together(a.begin, b.begin)
        whole = frames.write

        async def torn(writer: Any, fields: Any, payload: Any = b"") -> None:
            if fields["is"] == "change" and threading.current_thread() is b.rounds._live._thread:
                raw = memoryview(bytearray(payload))
                real = writer.write
                writer.write = lambda data: (real(data[: len(data) // 2]), writer.transport.abort())
                await whole(writer, fields, raw)
                return
            await whole(writer, fields, payload)

        for node in (a, b):
            node.step()
        with mock.patch.object(frames, "write", torn):
            done = threading.Thread(target=b.rounds.exchange)
            done.start()
            until(lambda: any("b is gone" in line for line in hub.said), "b's connection ends")
            a.rounds.exchange()
        done.join()
        assert a.bits() == b.bits()
    finally:
        hub.stop()


# --- tokens and addresses -------------------------------------------------------------------------


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    token, _ = of_server(path)
    assert Token.read(path) == token == of_server(path)[0]
    for file in (path, tmp_path / "deep" / "token.key"):
        assert file.stat().st_mode & 0o077 == 0
    assert path.read_text(encoding="utf-8").count("\n") == 1
    for text in ("", "evener-token-1:!!", "evener-token-1:e30=", token.text[:-7] + "\0"):
        with pytest.raises(UsageError, match="holds no token"):
            Token.of(text, "it")
    with pytest.raises(UsageError, match="cannot be read"):
        Token.read(tmp_path / "nothing")
    (tmp_path / "deep" / "token.key").unlink()
    with pytest.raises(UsageError, match="key"):
        of_server(path)


def test_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no openssl command"):
        of_server(tmp_path / "token")


def test_addresses() -> None:
    assert address("gpu1:29610", "--join") == ("gpu1", 29610)
    assert address("[::1]:1", "--join") == ("::1", 1)
    for text in ("gpu1", "gpu1:", ":5", "a:b", "a:70000"):
        with pytest.raises(UsageError, match="no HOST:PORT"):
            address(text, "--join")


def test_a_launcher_is_promised_a_slot_or_told_why_not() -> None:
    hub = LiveHub(slots=2)
    try:
        assert promise(hub.place("a"), 5) == (0, 2)
        assert promise(hub.place("b"), 5) == (1, 2)
        assert promise(hub.place("a"), 5) == (0, 2)
        place = hub.place("c")
        wrong = Place(place.host, place.port, Token(place.token.certificate, "x"), "c", None)
        with pytest.raises(UsageError, match="has another token"):
            promise(wrong, 5)
    finally:
        hub.stop()
    with pytest.raises(CommError, match="does not answer"):
        promise(place, 0.1)


def test_data_shares_are_disjoint_and_complete_whatever_the_nodes_have() -> None:
    seen = []
    for slot, ranks in enumerate((1, 4, 2)):
        for rank in range(ranks):
            with (
                mock.patch.dict(os.environ, {"EVENER_HUB_SLOT": f"{slot}/3"}),
                mock.patch.object(dist, "is_initialized", return_value=True),
                mock.patch.object(dist, "get_rank", return_value=rank),
                mock.patch.object(dist, "get_world_size", return_value=ranks),
            ):
                share, count = data_shard()
            seen += list(range(share, 120, count))
    assert sorted(seen) == list(range(120))
    with (
        mock.patch.dict(os.environ, {"EVENER_HUB_SLOT": "3/3"}),
        pytest.raises(UsageError, match="EVENER_HUB_SLOT"),
    ):
        data_shard()
