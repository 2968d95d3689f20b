"""`evener.comm.world.store` and torch's TCPStore understand each other, whichever end is whose."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from evener.comm.world.store import Client, Host, Prefixed, StoreError

LONG = timedelta(minutes=10)  # longer than a test may take


def torchs(port: int) -> Any:
    return TCPStore("localhost", port, None, False, LONG, wait_for_workers=False)


def torch_host() -> Any:
    return TCPStore("localhost", 0, None, True, LONG, wait_for_workers=False)


def ours() -> Any:
    return Host("localhost", 0, LONG)


@pytest.mark.parametrize("host", [torch_host, ours])
def test_both_clients_see_the_same(host: Any) -> None:
    served = host()
    port = served.port
    plain, theirs = Client("localhost", port, LONG), torchs(port)
    mine, other = Prefixed("part", plain), PrefixStore("part", theirs)
    mine.set("a", "one")
    assert other.get("a") == b"one"
    other.set("b", b"two\0")
    assert mine.multi_get(["a", "b"]) == [b"one", b"two\0"]
    assert list(other.multi_get(["a", "b"])) == [b"one", b"two\0"]
    assert [mine.add("n", 3), other.add("n", 4), mine.add("n", -7)] == [3, 7, 0]
    assert mine.check(["a", "b"]) and other.check(["a", "b"])
    assert not mine.check(["a", "c"]) and not other.check(["a", "c"])
    for store in (mine, other):
        with pytest.raises(RuntimeError):
            store.wait(["never"], timedelta(seconds=0.3))
    assert other.get("a") == b"one"  # it goes on after a wait that was given up
    later = threading.Timer(0.2, lambda: other.set("late", "x"))
    later.start()
    assert mine.get("late") == b"x"
    waiting = threading.Timer(0.2, lambda: mine.set("later", "y"))
    waiting.start()
    assert other.get("later") == b"y"


def test_what_is_no_store_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(StoreError, match=f"port {port}"):
            Client("127.0.0.1", port, timedelta(seconds=0.3))
