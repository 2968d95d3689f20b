"""Tells a rank its place in the variables of Horovod's launcher, then becomes the rank's program.

    python horovod_env.py HOST:SLOTS,... COMMAND...

Programs ask for HOROVOD_RANK before they import anything: Lightning 1.9 takes its Horovod strategy
where that is set and trains one copy per rank where it is not. torchrun and mpirun set variables of
their own only, and a rank is known only once its process has started. So with `--horovod` they
start this, which translates and calls exec: the process stays the same one. The hosts, in the order
of their ranks, are given by the launcher that knows them; "" where none does.

Standard library only, and no import of the rest of Evener: it runs before every rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

# By launcher: rank, size, local rank, local size.
_FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)


def place(rank: int, slots: Sequence[int]) -> tuple[int, int, int, int, int]:
    """(host, local rank, local size, cross rank, cross size) of `rank` on hosts of `slots`."""
    host, local = 0, rank
    while local >= slots[host]:
        local -= slots[host]
        host += 1
    peers = [count > local for count in slots]
    return host, local, slots[host], sum(peers[:host]), sum(peers)


def variables(
    rank: int, size: int, local_rank: int, local_size: int, cross: tuple[int, int] | None, host: str
) -> dict[str, str]:
    """What Horovod's launcher tells a rank. Empty `host`, no `cross`: not known."""
    found = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if cross is not None:
        found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"] = map(str, cross)
    if host:
        found["HOROVOD_HOSTNAME"] = host
    return found


def translated(env: Mapping[str, str], hosts: str) -> dict[str, str]:
    """Horovod's variables from those of torchrun or Open MPI. hosts: `gpu1:2,gpu2:2`, or ""."""
    for names in _FAMILIES:
        if all(env.get(name, "").isdecimal() for name in names):
            break
    else:
        return {}
    rank, size, local_rank, local_size = (int(env[name]) for name in names)
    pairs = [entry.rpartition(":") for entry in hosts.split(",") if entry]
    slots = [int(count) for _, _, count in pairs]
    cross, host = None, ""
    # mpirun may place ranks in another order: then only what it says itself is true.
    if sum(slots) == size:
        index, *at = place(rank, slots)
        if at[:2] == [local_rank, local_size]:
            cross, host = (at[2], at[3]), pairs[index][0]
    found = variables(rank, size, local_rank, local_size, cross, host)
    for theirs, ours in (
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", "MASTER_PORT"),
        ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"),
    ):
        if env.get(ours):
            found[theirs] = env[ours]
    return found


def main() -> None:
    hosts, command = sys.argv[1], sys.argv[2:]
    os.environ.update(translated(os.environ, hosts))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
