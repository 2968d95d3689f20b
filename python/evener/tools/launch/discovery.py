"""Which hosts an elastic job may use now: a script's answer, less those where something failed.

Everything here is pure but `Script.find`: the time is an argument, so that blacklists and
cool-downs are tested without waiting.
"""

from __future__ import annotations

import errno
import random
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evener.errors import EvenerError, UsageError
from evener.tools.launch.hosts import Host, parse_hosts

_SCRIPT_TIMEOUT = 30.0


class DiscoveryError(EvenerError):
    """The host discovery script failed."""


@dataclass(frozen=True)
class Script:
    """A program that prints one line per host: `HOST:SLOTS`, or `HOST` for `slots` of them."""

    path: Path
    slots: int

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_TIMEOUT,
            )
        except OSError as error:
            if error.errno != errno.ENOEXEC or len(words) > 1:
                raise
            return self._run(["/bin/sh", *words])  # no #! line: a shell would do the same

    def find(self) -> dict[str, int]:
        """Run it. Raises DiscoveryError where it fails, or prints what is not a host."""
        try:
            done = self._run([str(self.path.absolute())])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DiscoveryError(
                f"the host discovery script {self.path} cannot be run: {error}",
                "make it an executable file that prints HOST:SLOTS lines and ends",
            ) from error
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["(nothing)"])[-1]
            raise DiscoveryError(
                f"the host discovery script {self.path} ended with status {done.returncode}: "
                f"{said}",
                "run it by hand; it must print HOST:SLOTS lines and end with status 0",
            )
        found: dict[str, int] = {}
        for line in done.stdout.splitlines():
            if not (text := line.strip()):
                continue
            try:
                host = parse_hosts(text if ":" in text else f"{text}:{self.slots}")[0]
            except UsageError as error:
                raise DiscoveryError(
                    f"the host discovery script {self.path} printed {line!r}: {error.problem}",
                    "print a line HOST:SLOTS for each host",
                ) from error
            found[host.name] = host.slots
        return found


@dataclass(frozen=True)
class Cooldown:
    """How long a host on which a worker failed stays out: longer each time, between two bounds.

    The n-th time about low * 2**n seconds, with a random part so that hosts do not come back all at
    once. (The rule of upstream's horovod/runner/elastic/discovery.py.)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= 3600:
            raise UsageError(
                f"--blacklist-cooldown-range {self.low:g} {self.high:g} cannot be",
                "give two numbers of seconds, 1 to 3600, the smaller first",
            )

    def seconds(self, times: int, chance: Callable[[], float] = random.random) -> float:
        return min(self.high, self.low * (2.0**times) + self.low * chance())


@dataclass
class Pool:
    """The hosts of the job, in the order in which they came: the oldest has the lowest ranks."""

    cooldown: Cooldown | None = None
    _slots: dict[str, int] = field(default_factory=dict)
    # When a blacklisted host may come back; infinity for never. Kept after it came back, to count.
    _until: dict[str, float] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def update(self, found: Mapping[str, int]) -> None:
        """What discovery found now. Hosts keep their places, new ones come last."""
        kept = {name: found[name] for name in self._slots if name in found}
        self._slots = kept | {name: n for name, n in found.items() if name not in kept}

    def blacklist(self, host: str, now: float) -> float:
        """`host` failed: gives the seconds for which it stays out (infinity: for good)."""
        self._times[host] = self._times.get(host, 0) + 1
        seconds = float("inf")
        if self.cooldown is not None:
            seconds = self.cooldown.seconds(self._times[host])
        self._until[host] = now + seconds
        if host in self._slots:  # when it comes back, it comes as the youngest
            self._slots[host] = self._slots.pop(host)
        return seconds

    def blacklisted(self, host: str, now: float) -> bool:
        return now < self._until.get(host, 0.0)

    def available(self, now: float, most: int | None = None) -> list[Host]:
        """The hosts that may be used, with the slots to use: `most` in all."""
        hosts, left = [], most
        for name, slots in self._slots.items():
            if self.blacklisted(name, now):
                continue
            use = slots if left is None else min(slots, left)
            if use:
                hosts.append(Host(name, use))
            left = None if left is None else left - use
        return hosts

    def hopeless(self, least: int, now: float) -> bool:
        """Whether `least` slots can only come by another discovery."""
        for name in self._slots:
            if now < self._until.get(name, 0.0) < float("inf"):
                return False
        return sum(host.slots for host in self.available(now)) < least
