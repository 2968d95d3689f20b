"""Goodput of nodes that come and go: a random one is killed again and again, and comes back.

    python benchmarks/nodes_goodput.py [--nodes 4] [--minutes 15] [--kill 60] [--back 20]
        [--json FILE]

Nodes of one rank and a hub on this machine's loopback train a small GPT. A step lasts --step
seconds, whatever its arithmetic takes: the rest is slept, as a host sleeps while its GPU computes,
because all nodes share this machine's cores. Steps count that came into an average. Goodput is
these, over the time that processes of nodes lived times the rate of one node when all train side by
side without a hub. A node lives from the start of its process to its kill. It is forked from a
process that has imported torch. Every node notes a digest of its weights after each exchange; those
of a round must be equal.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

ALONE = 30.0
_PRELOADED = ["torch", "torch._dynamo", "evener.ddp.line", "evener.tools.bench.train.transformers"]


def be_a_node(name: str, folder: str, variables: dict[str, str], step: float, every: int) -> None:
    """Train until killed; write a line for each exchange, or for each step without a hub."""
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo", EVENER_LOG="warning")
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from evener.ddp import accelerate
    from evener.tools.bench.train.transformers import GPT, Shape

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(os.getpid())
    net = GPT(Shape(layers=2, heads=2, width=64, symbols=128, context=16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = DistributedDataParallel(net)
    if "EVENER_HUB" in variables:
        model = accelerate(model, optimizer, every=every)
    generator = torch.Generator().manual_seed(os.getpid())
    round_ = model.evener.rounds if "EVENER_HUB" in variables else 0
    since, due = 0, time.monotonic()
    path = Path(folder) / f"{name}-{os.getpid()}"
    with path.open("a", buffering=1, encoding="utf-8") as file:
        while True:
            x = torch.randint(128, (2, 16), generator=generator)
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            due = max(due + step, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            since += 1
            optimizer.step()  # an exchange is in here
            if "EVENER_HUB" not in variables:
                file.write("step\n")
            elif model.evener.rounds != round_:
                counted = since if model.evener.rounds == round_ + 1 else 0
                round_, since = model.evener.rounds, 0
                bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
                digest = hashlib.sha256(bits).hexdigest()[:16]
                file.write(f"{round_} {counted} {digest} {time.time():.2f}\n")


class Nodes:
    """Processes of nodes, and for how long they lived."""

    def __init__(self, given: argparse.Namespace, folder: str, variables: dict[str, str]) -> None:
        self.given, self.folder, self.variables = given, folder, variables
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOADED)
        self.live: dict[str, tuple[Any, float]] = {}
        self.lived = 0.0

    def start(self, name: str) -> None:
        """Start the node of that name."""
        variables = {**self.variables, "EVENER_HUB_NODE": name}
        words = (name, self.folder, variables, self.given.step, self.given.every)
        process = self.context.Process(target=be_a_node, args=words, daemon=True)
        process.start()
        self.live[name] = process, time.monotonic()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process, began = self.live.pop(name)
        process.kill()
        process.join()
        self.lived += time.monotonic() - began

    def lines(self) -> list[list[str]]:
        """What they wrote."""
        files = sorted(Path(self.folder).iterdir())
        return [line.split() for f in files for line in f.read_text(encoding="utf-8").splitlines()]


def rate_alone(given: argparse.Namespace, names: list[str]) -> float:
    """Steps per second of one node, of all side by side."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(given, folder, {})
        for name in names:
            nodes.start(name)
        while len(nodes.lines()) < 20 * len(names):
            time.sleep(0.2)
        before, began = len(nodes.lines()), time.monotonic()
        time.sleep(ALONE)
        steps, took = len(nodes.lines()) - before, time.monotonic() - began
        for name in names:
            nodes.kill(name)
    return steps / took / len(names)


def main() -> None:
    """Measure one node's rate, then kill and count."""
    parser = harness.arguments(__doc__, json="nodes-goodput.json")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--kill", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--back", type=float, default=20, help="seconds until it is back")
    parser.add_argument("--step", type=float, default=0.05, help="seconds per step")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    names = [f"node{i}" for i in range(given.nodes)]
    rate = rate_alone(given, names)
    print(f"one node: {rate:.2f} steps/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        argv = [sys.executable, "-m", "evener", "hub", "--listen", "127.0.0.1:0"]
        argv += ["--token-file", str(token), "--nodes", str(given.nodes), "--min-nodes", "2"]
        hub = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        assert hub.stderr is not None
        port = re.search(r":(\d+)$", hub.stderr.readline().strip())
        assert port is not None
        log = Path(folder) / "hub.log"
        with log.open("w", encoding="utf-8") as to:
            subprocess.Popen(["cat"], stdin=hub.stderr, stdout=to)
        written = Path(folder) / "nodes"
        written.mkdir()
        variables = {
            "EVENER_HUB": f"127.0.0.1:{port[1]}",
            "EVENER_HUB_TOKEN": token.read_text(encoding="utf-8"),
        }
        nodes = Nodes(given, str(written), variables)
        for name in names:
            nodes.start(name)
        found = _run(given, nodes)
        hub.terminate()
        hub.wait()
        said = log.read_text(encoding="utf-8").splitlines()
    figures = {**found, "rate": rate, "goodput": found["counted"] / (found["lived"] * rate)}
    harness.keep(given, **figures, hub=said[-60:])
    shown = ["kills", "rounds", "counted", "lived", "rate", "goodput", "differing"]
    print(harness.show(["", *shown], [["", *(figures[name] for name in shown)]]))


def _run(given: argparse.Namespace, nodes: Nodes) -> dict[str, Any]:
    chance, began, kills = random.Random(given.seed), time.monotonic(), 0
    back: list[tuple[float, str]] = []
    end, kill_at = began + 60 * given.minutes, began + given.kill
    while (now := time.monotonic()) < end:
        if now >= kill_at:
            kill_at += given.kill
            victim = chance.choice(sorted(nodes.live))
            nodes.kill(victim)
            back.append((now + given.back, victim))
            kills += 1
            print(f"{now - began:.0f} s: {victim} is killed", flush=True)
        for at, name in [one for one in back if now >= one[0]]:
            back.remove((at, name))
            nodes.start(name)
        time.sleep(0.1)
    for name in list(nodes.live):
        nodes.kill(name)
    lines = nodes.lines()
    digests = collections.defaultdict(set)
    for round_, _, digest, _ in lines:
        digests[round_].add(digest)
    return {
        "kills": kills,
        "rounds": len(digests),
        "exchanges": len(lines),
        "counted": sum(int(line[1]) for line in lines),
        "lived": nodes.lived,
        "differing": sum(len(each) > 1 for each in digests.values()),
    }


if __name__ == "__main__":
    main()
