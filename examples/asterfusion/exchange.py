"""The traffic of a ring all-reduce between two hosts, and its time: run by run.py inside the lab.

Each of the channels is one TCP connection in each direction. For every size both hosts send their
share over all channels at once; the time is that of host 0, from a common start until both hosts
have received everything. Ring arithmetic and hops inside a host are left out: what is measured is
what crosses between the hosts, as a GPU-rich ring would ask for it.

    exchange.py ROLE CONFIG        ROLE 0 or 1, CONFIG a JSON object (see run.py)
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

CONTROL, DATA = 5000, 5001


def connect(source: str, source_port: int, target: str, port: int) -> socket.socket:
    """A connection with a source port of our choice: the hash sees it."""
    limit = time.monotonic() + 20
    while True:
        try:
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((source, source_port))
            one.connect((target, port))
            return one
        except OSError:
            one.close()
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)


def receive(connection: socket.socket, count: int) -> None:
    """Exactly `count` bytes."""
    buffer = memoryview(bytearray(1 << 20))
    while count:
        got = connection.recv_into(buffer[: min(count, len(buffer))])
        if not got:
            raise ConnectionError("the other host closed the connection")
        count -= got


def main() -> None:
    role, config = int(sys.argv[1]), json.loads(sys.argv[2])
    mine, theirs = config["addresses"][role], config["addresses"][1 - role]
    ports = config["ports"][role]
    channels = len(ports)
    listeners = [socket.create_server((mine[i % len(mine)], DATA + i)) for i in range(channels)]
    control_listener = socket.create_server((mine[0], CONTROL)) if role == 0 else None
    out = [
        connect(mine[i % len(mine)], port, theirs[i % len(theirs)], DATA + i)
        for i, port in enumerate(ports)
    ]
    into = [listener.accept()[0] for listener in listeners]
    if control_listener is not None:
        control = control_listener.accept()[0]
    else:
        control = connect(mine[0], 0, theirs[0], CONTROL)
    block = bytes(1 << 20)

    def send(connection: socket.socket, count: int) -> None:
        while count:
            count -= connection.send(block[: min(count, len(block))])

    for size, moved, repeats in config["sizes"]:
        share = moved // channels
        best = []
        for _ in range(repeats):
            control.sendall(b"g")
            receive(control, 1)
            begin = time.perf_counter()
            work = [threading.Thread(target=send, args=(one, share)) for one in out]
            work += [threading.Thread(target=receive, args=(one, share)) for one in into]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
            control.sendall(b"d")
            receive(control, 1)
            best.append(time.perf_counter() - begin)
        if role == 0:
            print(json.dumps({"size": size, "seconds": sum(best) / len(best)}), flush=True)


if __name__ == "__main__":
    main()
