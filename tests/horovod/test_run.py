"""`horovod.run`: a function as a job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import pytest

from evener.base import interfaces
from evener.horovod import run
from evener.horovod.runner import channel
from evener.horovod.runner.function import RunError, listening_addresses
from evener.tools.launch.hosts import Host


def work(word: str, times: int = 1) -> Any:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item()
    if word == "fail" and hvd.rank() == 1:
        raise KeyError(word)
    hvd.barrier()
    return hvd.rank(), total, word * times


def test_results_come_in_rank_order() -> None:
    assert run(work, ("ab",), {"times": 2}, num_proc=2) == [(0, 3, "abab"), (1, 3, "abab")]


def test_an_error_comes_back_with_its_rank() -> None:
    with (
        pytest.warns(DeprecationWarning, match="np is deprecated"),
        pytest.raises(RunError, match=r"raised on rank 1:(.|\n)*KeyError: 'fail'") as caught,
    ):
        run(work, ("fail",), np=2)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rank_that_dies_is_an_error() -> None:
    with pytest.raises(RunError, match="ended with status 9"):
        run(os._exit, (9,))


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="hosts and hostfile"):
        run(work, hosts="a:1", hostfile="h")
    with pytest.raises(ValueError, match="use_gloo and use_mpi"):
        run(work, use_gloo=True, use_mpi=True)


# --- who may connect ---


def answer(connection: Connection) -> None:
    connection.send(connection.recv() + 1)


@contextmanager
def door(key: bytes = b"k") -> Iterator[tuple[str, int]]:
    opened = channel.Listener(["127.0.0.1"], key, answer)
    try:
        yield opened.places[0]
    finally:
        opened.close()


def ask(place: tuple[str, int], key: bytes = b"k") -> int:
    with channel.reach(*place, key, 5.0) as connection:
        connection.send(41)
        return int(connection.recv())


def shown_out(stranger: socket.socket) -> bool:
    """Whether the door closes the connection."""
    stranger.settimeout(20)
    with stranger, suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass
    return True


def test_silent_strangers_hold_nobody_up() -> None:
    with door() as place:
        strangers = [socket.create_connection(place) for _ in range(20)]
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert ask(place) == 42  # within its five seconds: a stranger has ten
        for stranger in strangers:
            stranger.close()


def test_silent_strangers_are_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE", 0.2)
    with door() as place:
        assert shown_out(socket.create_connection(place))


def test_strangers_beyond_a_number_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_STRANGERS", 4)
    with door() as place:
        before = threading.active_count()
        strangers = [socket.create_connection(place) for _ in range(30)]
        assert all(map(shown_out, strangers[4:]))
        assert threading.active_count() <= before + 2 * 4  # a thread and a timer each
        for stranger in strangers:
            stranger.close()
        for _ in range(200):  # until the four are seen to have gone
            try:
                assert ask(place) == 42
                break
            except (OSError, EOFError):
                time.sleep(0.05)
        else:
            pytest.fail("nobody is let in any more")


def test_a_wrong_key_gets_nothing_in_either_direction() -> None:
    with door() as place, pytest.raises((AuthenticationError, EOFError, OSError)):
        ask(place, b"other")
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        threading.Thread(target=lambda: impostor.accept()[0].sendall(b"\0" * 64)).start()
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            ask(impostor.getsockname())


def test_it_listens_where_the_ranks_come_from_and_nowhere_else() -> None:
    assert listening_addresses([Host("localhost", 2)], "") == ["127.0.0.1"]
    own = {address: name for name, address in interfaces.addresses()}
    # The kernel sends to another address of the loopback network from 127.0.0.1.
    assert listening_addresses([Host("127.0.0.2", 1), Host("localhost", 1)], "") == ["127.0.0.1"]
    for address, name in own.items():
        assert address in listening_addresses(None, f"{name},eth77")
    anywhere = listening_addresses(None, "")
    assert anywhere
    assert all(address in own for address in anywhere), "not 0.0.0.0"
    assert "127.0.0.1" not in anywhere or len(anywhere) == 1
