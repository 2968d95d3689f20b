"""net: NCCL's reader polls buffers while they fill, over networks with unequal, lossy paths.

A program is a network and the messages that go over it. Evener carries them between two hosts of a
lab; the reader is crates/engine/examples/lines.rs, and the plain reference is what was sent: every
line is there when its flag is, and all of a message's are when its request is finished. The engines
stay up between programs.

The faults are those of crates/proto/src/faults.rs, which the example is built with.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from evener.tools.lab import Lab, Spec
from tests.twins.harness import Twin

ROOT = Path(__file__).parents[2]
READER = ROOT / "target/release/examples/lines"
SPEC = "2x1@200mbit,paths=4,delay=0ms"
PORT = 7130
# Seconds of a job: a busy machine may take long; after 90 s the reader says what it misses.
LIMIT = 200.0
ENGINES = tuple(os.environ.get("EVENER_TWIN_ENGINES", "tcp,udp,xdp").split(","))

FAULTS: list[str] = []
_worlds: dict[str, World] = {}


class World:
    """A lab with two processes of one engine."""

    def __init__(self, engine: str) -> None:
        self.lab = Lab(Spec.parse(SPEC))
        self.lab.start()
        self.ends = []
        address = f"{self.lab.nodes[1].addresses[0]}:{PORT}"
        env = {"EVENER_NET_ENGINE": engine, "EVENER_NET_TIMEOUT": "30", "EVENER_NET_WORKERS": "2"}
        for node, role in ((1, "receive"), (0, "send")):
            at = address if node == 0 else f"0.0.0.0:{PORT}"
            process = self.lab.nodes[node].popen(
                [str(READER), role, at],
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.ends.append(process)
        self.faults: list[str] = []

    def tell(self, line: str) -> None:
        """Tell both ends."""
        for end in self.ends:
            assert end.stdin is not None
            end.stdin.write(line + "\n")
            end.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """What each end says of a job: the receiver first."""
        found, until = [], time.monotonic() + LIMIT
        for end in self.ends:
            assert end.stdout is not None and end.stderr is not None
            ready = select.select([end.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            line = end.stdout.readline() if ready else ""
            if not line:
                end.kill()
                raise AssertionError(f"no end of a job: {end.stderr.read()[:300]}")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End the processes and the lab."""
        for end in self.ends:
            end.kill()
            end.wait()
        self.lab.close()


def _world(engine: str) -> World:
    if engine not in _worlds:
        if not _worlds:
            build = "cargo build --release --quiet -p evener-engine --example lines"
            subprocess.run(build.split(), cwd=ROOT, check=True)
            atexit.register(_close)
        _worlds[engine] = World(engine)
    world = _worlds[engine]
    if world.faults != FAULTS:
        world.tell(" ".join(["faults", *FAULTS]))
        world.faults = list(FAULTS)
    return world


def _close() -> None:
    for engine in list(_worlds):
        _worlds.pop(engine).close()


_actions = st.one_of(
    st.sampled_from((5, 10, 20)).map(lambda rate: f"rate {rate}mbit"),
    st.sampled_from((0.1, 1)).map(lambda share: f"loss {share}%"),
    st.sampled_from((1, 5)).map(lambda late: f"delay {late}ms"),
    st.sampled_from((1, 10)).map(lambda share: f"reorder {share}%"),
)
_jobs = st.fixed_dictionaries(
    {
        "form": st.sampled_from(("ll", "ll128")),
        "most": st.sampled_from((128, 2 << 10, 8 << 10, 64 << 10, 200_064, 512 << 10)),
        "lines": st.integers(1, 2_000),
        "seed": st.integers(0, 1 << 30),
    }
)
PROGRAMS = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(ENGINES),
        "network": st.dictionaries(st.sampled_from(("path1", "path2", "path3")), _actions),
        "jobs": st.lists(_jobs, min_size=1, max_size=4),
    }
)


def check(program: dict[str, Any]) -> None:
    """Carry a program's messages; each line must be whole when it is seen."""
    world = _world(program["engine"])
    for path, action in program["network"].items():
        world.lab.fault(path, action)
    try:
        for job in program["jobs"]:
            world.tell(f"job {job['form']} {job['most']} {job['lines']} {job['seed']}")
            seen = world.answers()[0]
            assert seen["torn"] == 0, f"{seen['torn']} of {seen['lines']} lines are torn"
            assert seen["early"] == 0, f"{seen['early']} of {seen['messages']} are finished early"
            each = 8 if job["form"] == "ll" else 1
            assert seen["lines"] == job["lines"] * each, f"{seen['lines']} lines came"
    except BaseException:
        if any(end.poll() is not None for end in world.ends):
            _worlds.pop(program["engine"]).close()
        raise
    finally:
        if program["engine"] in _worlds:
            for path in program["network"]:
                world.lab.fault(path, "heal")


@contextlib.contextmanager
def _fault(name: str) -> Iterator[None]:
    FAULTS[:] = [name]
    try:
        yield
    finally:
        FAULTS.clear()


TWIN = Twin(
    "net",
    PROGRAMS,
    check,
    {
        "pieces are cut at any byte": lambda: _fault("any-cut"),
        "bytes are copied in any order": lambda: _fault("any-order"),
        "a message is finished when a packet is missing": lambda: _fault("unfinished"),
        # Not "by-kernel", where the kernel copies into posted buffers: it tears one line of LL128
        # in 2 million, so only a long run of the reader finds it (crates/engine/examples/lines.rs).
    },
    programs_per_round=200,
    limit=900,  # of several jobs, and of building the reader before the first one
)
