"""What the plug-in's tests in a lab share: an exchange of which every byte is compared."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, command, merge
from evener.tools.lab import Lab

TIMEOUT = 120.0
ENGINE = "EVENER_NET_ENGINE"
# What a busy machine may take for what a quiet one does in a second.
PATIENCE = 60.0


def exchange(
    lab: Lab,
    seconds: float,
    *faults: str,
    env: dict[str, str] | None = None,
    log: list[str] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[dict[str, float]]:
    """What was measured. `log` gets what was said to stderr. Skips where AF_XDP is refused.

    `meanwhile` is called in a thread when both nodes are connected and at it, and the exchange goes
    on until it returns: then `seconds` is for the trial before it.
    """
    # Nodes have a /tmp of their own, and the working directory is that of all.
    over = Path(f".evener-over-{os.getpid()}").resolve()
    job = Job(
        str(plugin_path()),
        comms=2,
        depth=4,
        sizes="262144",
        seconds=seconds,
        verify=True,
        until=str(over) if meanwhile else "",
    )
    lines: list[str] = []
    errors = [] if log is None else log
    past_kernel = bool(env and env.get(ENGINE) == "xdp")
    env = {**(env or {}), "EVENER_DRIVE_LOG": "1"}
    begun: list[int] = []
    doing: list[Future[None]] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        (lines if stream == "stdout" else errors).append(f"{rank}@{node}: {line}"[-500:])
        if "both begin" in line:
            begun.append(rank)
            if len(begun) == 2 and meanwhile:
                doing.append(thread.submit(meanwhile))
                doing[0].add_done_callback(lambda _: over.touch())

    if faults:
        lab.schedule(*faults)
    try:
        with ThreadPoolExecutor(1) as thread:
            result = lab.launch(command(job), env=env, timeout=TIMEOUT, on_line=on_line)
    finally:
        over.unlink(missing_ok=True)
    for one in doing:
        one.result()
    assert result.ok, (result, errors)
    if past_kernel:
        refused_is_skipped(errors)
    return merge([line.partition(": ")[2] for line in lines])


def wait_until(what: Callable[[], bool], told: Callable[[], object] = lambda: None) -> None:
    """Wait for it; AssertionError with what is `told` if it takes too long."""
    end = monotonic() + PATIENCE
    while not what():
        assert monotonic() < end, told()
        sleep(0.1)


def refused_is_skipped(log: list[str]) -> None:
    refused = [line for line in log if "UDP is taken" in line]
    if refused:
        pytest.skip(f"no AF_XDP here: {refused}")
