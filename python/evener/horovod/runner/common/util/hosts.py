"""Hosts, slots, and who runs which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.tools.launch import hosts as launch_hosts
from evener.tools.launch.horovod_env import place


@dataclass
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse `gpu1:2`."""
        hostname, _, slots = host_string.strip().rpartition(":")
        return HostInfo(hostname, int(slots))


@dataclass
class SlotInfo:
    """The place of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """rank, size, local rank, local size, cross rank, cross size, with commas between."""
        return ",".join(
            str(value)
            for value in (
                *(self.rank, self.size, self.local_rank, self.local_size),
                *(self.cross_rank, self.cross_size),
            )
        )


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts of `gpu1:2,gpu2:4`."""
    return [HostInfo.from_string(entry) for entry in hosts_string.split(",")]


def parse_host_files(filename: str) -> str:
    """`gpu1:2,gpu2:4` from a file with lines such as `gpu1 slots=2`."""
    found = launch_hosts.parse_hostfile(Path(filename))
    return ",".join(f"{host.name}:{host.slots}" for host in found)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Names, and slots by name, of `gpu1:2,gpu2:4`."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A place for each rank, host by host; as many as there are slots, max_num_proc at most.

    Raises ValueError where there are fewer slots than min_num_proc.
    """
    total = sum(host.slots for host in hosts)
    if total < min_num_proc:
        raise ValueError(f"{min_num_proc} ranks need as many slots, and the hosts have {total}")
    left = min(total, max_num_proc or min_num_proc)
    size, used = left, []
    for host in hosts:
        count = min(host.slots, left)
        left -= count
        if count:
            used.append(HostInfo(host.hostname, count))
    slots = [host.slots for host in used]
    found = []
    for rank in range(size):
        index, local, local_size, cross, cross_size = place(rank, slots)
        name = used[index].hostname
        found.append(SlotInfo(name, rank, local, cross, size, local_size, cross_size))
    return found
