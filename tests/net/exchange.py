"""What the plug-in's tests in a lab share: an exchange of which every byte is compared."""

import os
from collections.abc import Callable

import pytest

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, command, merge
from evener.tools.lab import Lab

TIMEOUT = 60.0
ENGINE = "EVENER_NET_ENGINE"
# How many messages a run has is decided before, so on a busy machine it may be over too soon.
quiet = pytest.mark.skipif(
    bool(os.environ.get("CI")),
    reason="counts what a run of seconds carries: needs a quiet machine, and CI is set",
)


def exchange(
    lab: Lab,
    seconds: float,
    *faults: str,
    env: dict[str, str] | None = None,
    log: list[str] | None = None,
    when_both_begin: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """What was measured. `log` gets what was said to stderr. `when_both_begin` is called when both
    nodes are connected and at it, however busy the machine is. Skips where AF_XDP is refused."""
    job = Job(str(plugin_path()), comms=2, depth=4, sizes="262144", seconds=seconds, verify=True)
    lines: list[str] = []
    errors = [] if log is None else log
    past_kernel = bool(env and env.get(ENGINE) == "xdp")
    env = {**(env or {}), "EVENER_DRIVE_LOG": "1"}
    begun: list[int] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        (lines if stream == "stdout" else errors).append(f"{rank}@{node}: {line}"[-500:])
        if "both begin" in line:
            begun.append(rank)
            if len(begun) == 2:
                when_both_begin()

    if faults:
        lab.schedule(*faults)
    result = lab.launch(command(job), env=env, timeout=TIMEOUT, on_line=on_line)
    assert result.ok, (result, errors)
    if past_kernel:
        refused_is_skipped(errors)
    return merge([line.partition(": ")[2] for line in lines])


def refused_is_skipped(log: list[str]) -> None:
    refused = [line for line in log if "UDP is taken" in line]
    if refused:
        pytest.skip(f"no AF_XDP here: {refused}")
