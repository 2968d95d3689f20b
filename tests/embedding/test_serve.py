"""`evener embedding serve` and `stats`: what is answered, refused, and taken in meanwhile."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.embedding import Constant, Options, Store, forget
from evener.embedding.serve import Follower, Served, Server, opened
from evener.errors import UsageError

EVENER = (sys.executable, "-m", "evener", "embedding")
DIM, KEYS = 16, np.arange(-500, 500)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """A trainer's store and its folder: all values of a row are the number of its version."""
    store = Store("trainer", Options(DIM, init=Constant(-1.0)))
    store.upsert(KEYS, np.zeros((1000, DIM), np.float32), 1)
    store.snapshot(tmp_path)
    yield store, tmp_path
    forget("trainer")


@pytest.fixture
def server(trained: tuple[Store, Path]) -> Iterator[Server]:
    store = opened(trained[1], "served")
    store.frozen = True
    served = Served()
    follower = Follower(store, trained[1], served, 0.01)
    follower.once()
    made = Server(store, served, ("127.0.0.1", 0), 4, "5ecret")
    follower.start()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    follower.stop()
    made.server_close()
    forget("served")


def ask(
    server: Server, body: bytes | None, path: str = "/lookup", token: str = "5ecret", **how: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    headers = {"Authorization": f"Bearer {token}", **how}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_rows_as_bytes_and_as_json(server: Server) -> None:
    status, body = ask(server, np.array([3, 2**62], "<i8").tobytes())
    rows = np.frombuffer(body, "<f4").reshape(2, DIM)
    assert status == 200
    assert (rows[0] == 0).all() and (rows[1] == -1).all()
    text = json.dumps({"keys": [3, 2**62]}).encode()
    answer = json.loads(ask(server, text, **{"Content-Type": "application/json"})[1])
    assert answer["found"] == [True, False] and answer["values"][1] == [-1.0] * DIM
    assert len(server.store) == 1000  # nothing was inserted


@pytest.mark.parametrize(
    ("body", "how", "status", "words"),
    [
        (b"1234567", {}, 400, "8 bytes each"),
        (b"[1]", {"Content-Type": "application/json"}, 400, "keys"),
        (b'{"keys": [1.5]}', {"Content-Type": "application/json"}, 400, "flat list"),
        (b'{"keys": [99999999999999999999]}', {"Content-Type": "application/json"}, 400, "64-bit"),
        (b"", {"Content-Length": "99999999999"}, 413, "a body of 0 to"),
        (b"", {"path": "/lookups"}, 404, "POST /lookup"),
        (b"", {"token": "wrong"}, 401, "Bearer"),
        (None, {"path": "/nothing"}, 404, "/metrics"),
    ],
)
def test_what_is_refused(server: Server, body: Any, how: Any, status: int, words: str) -> None:
    found, text = ask(server, body, **how)
    assert found == status
    assert words in json.loads(text)["error"]


def test_a_full_queue_is_said_at_once(server: Server) -> None:
    for _ in range(server.queue):
        server.places.acquire()
    status, text = ask(server, b"")
    for _ in range(server.queue):
        server.places.release()
    assert status == 503 and b"4 requests are in work" in text
    assert ask(server, b"")[0] == 200


def test_no_answer_mixes_two_versions_of_a_row(trained: tuple[Store, Path], server: Server) -> None:
    """Deltas arrive while clients ask: each row is one version, and versions never go back."""
    store, folder = trained
    wrong: list[str] = []
    end = threading.Event()

    def client() -> None:
        newest = np.full(1000, -1.0)
        while not end.is_set():
            status, body = ask(server, KEYS.astype("<i8").tobytes())
            rows = np.frombuffer(body, "<f4").reshape(-1, DIM)
            if status == 200:
                if (rows != rows[:, :1]).any():
                    wrong.append("a row is of two versions")
                if (rows[:, 0] < newest).any():
                    wrong.append("a row went back")
                newest = rows[:, 0]

    clients = [threading.Thread(target=client) for _ in range(2)]
    for each in clients:
        each.start()
    for version in range(1, 21):
        store.upsert(KEYS, np.full((1000, DIM), version, np.float32), version)
        store.delta(folder)
    deadline = time.monotonic() + 20
    while server.served.deltas < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    end.set()
    for each in clients:
        each.join()
    assert not wrong
    assert server.served.deltas == 20 and not server.served.problem
    assert (server.store.lookup_infer(KEYS) == 20).all()


def test_a_newer_snapshot_and_a_broken_file(trained: tuple[Store, Path], server: Server) -> None:
    store, folder = trained
    (folder / "delta-000002.evs").write_bytes(b"EVENEREM not whole")
    deadline = time.monotonic() + 20
    while not server.served.problem and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "delta-000002" in server.served.problem
    assert ask(server, KEYS.astype("<i8").tobytes())[0] == 200  # the rows before it stay
    (folder / "delta-000002.evs").unlink()
    store.upsert(KEYS, np.full((1000, DIM), 7, np.float32), 2)
    store.snapshot(folder)
    while (server.store.lookup_infer(KEYS) != 7).any() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (server.store.lookup_infer(KEYS) == 7).all()


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENER, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_the_command_serves_until_it_is_told_to_end(trained: tuple[Store, Path]) -> None:
    _, folder = trained
    process = subprocess.Popen(
        [*EVENER, "serve", str(folder), "--address", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving 1,000 rows of dim 16 (step ")
        url = line.split()[-1]
        table = json.loads(command("stats", url, "--json").stdout)
        assert table[0]["store"]["rows"] == 1000
        assert (
            'evener_embedding_rows{embedding="served"} 1000'
            in command("stats", url, "--prometheus").stdout
        )
        assert "1,000" in command("stats", url).stdout
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert "full-000001.evs" in command("stats", str(folder), "--json").stdout


def test_what_the_command_refuses(trained: tuple[Store, Path], tmp_path: Path) -> None:
    folder = str(trained[1])
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, words in (
        (("serve", folder, "--address", "0.0.0.0:0"), "there is no token"),
        (("serve", folder, "--address", "nowhere"), "write it as 127.0.0.1:8400"),
        (("serve", str(empty)), "no snapshot in"),
        (("stats", "http://127.0.0.1:1"), "does not answer"),
        (("stats", str(empty)), "no records of embedding"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert words in done.stderr and "fix: " in done.stderr


def test_a_follower_of_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no snapshot in"):
        opened(tmp_path, "nothing")
