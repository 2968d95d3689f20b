"""Run a command on another node, as ssh would: `python -I -S agent.py HOST COMMAND...`.

A launcher inside a node cannot enter its neighbour: it does not even see its processes. The keeper
can, so this hands it the command and its own stdin, stdout and stderr over a socket that every node
finds at the same place, and ends with the command's status. Ended itself, it takes the command
along. Standard library only, for a quick start.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOCKET = "/tmp/.evener-lab/agent"


def main(arguments: list[str]) -> int:
    """Returns the command's exit status, 255 where there is none, as ssh does."""
    import socket

    import wire  # type: ignore[import-not-found]

    while arguments and arguments[0].startswith("-"):  # options for ssh, like -x
        arguments = arguments[1:]
    if len(arguments) < 2:
        sys.stderr.write("usage: agent HOST COMMAND...\n")
        return 255
    host, command = arguments[0].rpartition("@")[2], " ".join(arguments[1:])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
            keeper.connect(SOCKET)
            wire.send(keeper, {"do": "run", "node": host, "command": command}, [0, 1, 2])
            answer, _ = wire.receive(keeper)
    except (OSError, EOFError) as error:
        sys.stderr.write(f"evener lab: {host} cannot be reached: {error}\n")
        return 255
    if "error" in answer:
        sys.stderr.write(f"evener lab: {answer['error']}\n")
        return 255
    status: int = answer["status"]
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
