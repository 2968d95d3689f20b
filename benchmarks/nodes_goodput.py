"""Goodput of nodes that come and go: a random one is killed again and again, and comes back.

    python benchmarks/nodes_goodput.py [--nodes 4] [--minutes 15] [--kill 60] [--back 20]
        [--link 100mbit,delay=40ms,loss=1%] [--form int4] [--every 50] [--overlap 0] [--step 0.05]
        [--json FILE]

Simulated nodes of one rank (`evener lab`) train a small GPT, and the hub is on a node of its own. A
step lasts --step seconds, whatever its arithmetic takes: the rest is slept, as a host sleeps while
its GPU computes, because all nodes share this machine's cores. Steps count that came into an
average, as the hub says. Goodput is these, over the time that processes of nodes lived times the
rate of a node that trains beside them without a hub; `of_alone` takes the rate of one when all
trained so before, and `ideal` that of steps that last --step, which a busy machine does not reach.
A node lives from the start of its process to its kill. It is forked from a process that has
imported torch. At the end all nodes end their round and leave. Every node notes a digest of the
shared weights after each exchange; those of a round must be equal. The pause is what a step lasts
longer at whose end an exchange is over: it waits for it, with overlap for what is left of it.

`lost` is what `ideal` lacks, in shares of the time. kills: what killed nodes had done that is in no
average. joining: from the start of a process to its first step. pauses: steps at whose ends an
exchange begins or is over. late: steps that lasted longer than --step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness

from evener.tools.lab import Lab, Spec

ALONE = 30.0
LONGEST_ROUND = 120.0
PORT = 29610
_PRELOADED = ["torch", "torch._dynamo", "evener.ddp.line", "evener.tools.bench.train.transformers"]


def be_a_host(modules: Sequence[str], act: Callable[..., None]) -> None:
    """Import `modules`, then fork a process that does `act`, and kill it with all that it started,
    as the input's lines say.
    """
    for module in modules:
        importlib.import_module(module)
    print("ready", flush=True)
    process = 0
    for line in sys.stdin:
        if line == "kill\n":
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        elif (process := os.fork()) == 0:
            os.setpgid(0, 0)
            act(**json.loads(line))
        else:
            with contextlib.suppress(PermissionError):  # of the two the child was first
                os.setpgid(process, process)
        print("done", flush=True)


def be_a_node(given: argparse.Namespace, folder: str, variables: dict[str, str]) -> None:
    """Train until killed, or until `folder`/end is there; write a line for each exchange, or for
    each step without a hub.
    """
    began = time.monotonic()
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo", EVENER_LOG="warning")
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from evener.ddp import accelerate
    from evener.tools.bench.train.transformers import GPT, Shape

    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    seed = time.time_ns()
    torch.manual_seed(seed)
    net = GPT(Shape(layers=2, heads=2, width=64, symbols=128, context=16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = DistributedDataParallel(net)
    hub = "EVENER_HUB" in variables
    if hub:
        how = {"every": given.every, "overlap": given.overlap, "mode": given.form}
        model = accelerate(model, optimizer, **how)
    generator = torch.Generator().manual_seed(seed)
    round_ = model.evener.rounds if hub else 0
    since, due = 0, time.monotonic()
    path, told = Path(folder) / f"{given.node}-{seed}", Path(folder).parent / "told"

    def note(what: str, seconds: float) -> None:
        with (told / f"{given.node}-{seed}").open("a", encoding="utf-8") as noted:
            noted.write(f"{what} {seconds:.4f} {given.node}\n")

    with (
        path.open("a", buffering=1, encoding="utf-8") as file,
        (told / f"{given.node}-{seed}.steps").open("ab", buffering=0) as steps,
    ):
        while True:
            x = torch.randint(128, (2, 16), generator=generator)
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            due = max(due + given.step, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            since += 1
            at = time.monotonic()
            optimizer.step()  # an exchange is in here
            took = time.monotonic() - at
            if not hub:
                file.write("step\n")
                continue
            if not steps.tell():
                note("joining", at - began - given.step)
            steps.write(b".")
            rounds = model.evener
            if rounds.since == 0 or rounds.rounds != round_:  # it began, or ended
                due += took
                note("pause", took)
            if rounds.rounds != round_:
                counted = since - rounds.since if rounds.rounds == round_ + 1 else 0
                round_, since = rounds.rounds, rounds.since
                file.write(f"{round_} {counted} {digest_of(rounds.state_dict())} {took:.3f}\n")
            if (Path(folder).parent / "end").exists():
                rounds.end_round()
                rounds.leave()
                note("done", 0.0)
                signal.pause()


def digest_of(state: dict[str, Any]) -> str:
    """A hash of the shared weights."""
    bits = b"".join(value.numpy().tobytes() for value in state["shared"].values())
    return hashlib.sha256(bits).hexdigest()[:16]


class Nodes:
    """Simulated nodes, the processes that live on them, and for how long they did."""

    def __init__(self, lab: Lab, argv: Sequence[str], beside: bool = False) -> None:
        """`argv` and `--node NAME`: a program that is `be_a_host`; all is imported at the return.
        The lab's last node is left to a hub. `beside`: one on that node instead.
        """
        self.own: dict[str, dict[str, str]] = {}  # variables of one node alone
        self.live: dict[str, float] = {}
        self.lived = 0.0
        self.hosts: dict[str, subprocess.Popen[str]] = {}
        for node in lab.nodes[-1:] if beside else lab.nodes[:-1]:
            self.hosts[node.name] = node.popen(
                [*argv, "--node", node.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for name in self.hosts:
            self._hear(name)

    def _hear(self, name: str) -> None:
        out = self.hosts[name].stdout
        if out is None or not out.readline():
            raise SystemExit(f"error: the processes of {name} have ended")

    def _tell(self, name: str, line: str) -> None:
        to = self.hosts[name].stdin
        assert to is not None
        print(line, file=to, flush=True)
        self._hear(name)

    def start(self, name: str, folder: Path, variables: dict[str, str]) -> None:
        """Start the node of that name."""
        self.live[name] = time.monotonic()
        told = {**variables, **self.own.get(name, {}), "EVENER_HUB_NODE": name}
        self._tell(name, json.dumps({"folder": str(folder), "variables": told}))

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._tell(name, "kill")
        self.lived += time.monotonic() - self.live.pop(name)


def lines(folder: Path) -> list[list[str]]:
    """What the nodes wrote."""
    files = (file for file in sorted(folder.iterdir()) if not file.suffix)
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [line.split() for text in texts for line in text.splitlines()]


def rate_alone(nodes: Nodes, folder: Path) -> float:
    """Steps per second of one node, of all side by side."""
    for name in nodes.hosts:
        nodes.start(name, folder, {})
    while len(lines(folder)) < 20 * len(nodes.hosts):
        time.sleep(0.2)
    before, began = len(lines(folder)), time.monotonic()
    time.sleep(ALONE)
    steps, took = len(lines(folder)) - before, time.monotonic() - began
    for name in list(nodes.live):
        nodes.kill(name)
    nodes.lived = 0.0
    return steps / took / len(nodes.hosts)


@contextlib.contextmanager
def beside(lab: Lab, argv: Sequence[str], folder: Path) -> Iterator[list[float]]:
    """A node trains without a hub meanwhile; its steps per second, afterwards."""
    one, rates = Nodes(lab, argv, beside=True), list[float]()
    (name,) = one.hosts
    one.start(name, folder, {})
    while (before := len(lines(folder))) < 20:
        time.sleep(0.2)
    began = time.monotonic()
    yield rates
    rates.append((len(lines(folder)) - before) / (time.monotonic() - began))
    one.kill(name)


@contextlib.contextmanager
def hub_of(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """A hub on the lab's last node; what a node needs to join it. What it says: folder/hub.log."""
    host, token = lab.nodes[-1], folder / "token"
    argv = [sys.executable, "-m", "evener", "hub", "--listen", f"0.0.0.0:{PORT}"]
    argv += ["--token-file", str(token), "--nodes", str(len(lab.nodes) - 1), "--min-nodes", "2"]
    with (folder / "hub.log").open("w+", encoding="utf-8") as log:
        hub = host.popen(argv, stderr=log, env={"EVENER_STATS_DIR": str(folder / "stats")})
        while "listening" not in (folder / "hub.log").read_text(encoding="utf-8"):
            if hub.poll() is not None:
                raise SystemExit("error: the hub has ended")
            time.sleep(0.1)
        secret = token.read_text(encoding="utf-8")
        yield {"EVENER_HUB": f"{host.addresses[0]}:{PORT}", "EVENER_HUB_TOKEN": secret}
        hub.terminate()
        hub.wait()


def main() -> None:
    """Measure one node's rate, then kill and count."""
    parser = harness.arguments(__doc__, json="nodes-goodput.json")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--kill", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--back", type=float, default=20, help="seconds until it is back")
    parser.add_argument("--step", type=float, default=0.05, help="seconds per step")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--form", default="exact")
    parser.add_argument("--link", default="none", help="as evener lab run has it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        be_a_host(_PRELOADED, functools.partial(be_a_node, given))
        return
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(Spec.parse(f"{given.nodes + 1}x1@{given.link}"), keep=[name]) as lab,
    ):
        folder = Path(name)
        for part in ("alone", "beside", "written", "told"):
            (folder / part).mkdir()
        words = harness.arguments_of(given, "every", "overlap", "form", "step")
        argv = [sys.executable, str(Path(__file__).resolve()), *words]
        nodes = Nodes(lab, argv)
        alone = rate_alone(nodes, folder / "alone")
        print(f"one node: {alone:.2f} steps/s", flush=True)
        with hub_of(lab, folder) as variables, beside(lab, argv, folder / "beside") as rates:
            found = run(given, nodes, folder / "written", variables, folder / "end")
        said = (folder / "hub.log").read_text(encoding="utf-8").splitlines()
        found["counted"] = averaged(folder / "stats")
        found["lost"] = lost(folder / "told", found["counted"], found["lived"], given.step)
    share, rate = found["counted"] / found["lived"], rates[0]
    found |= {"alone": alone, "rate": rate, "goodput": share / rate, "ideal": share * given.step}
    figures = {**found, "of_alone": share / alone}
    harness.keep(given, **figures, hub=said[-60:])
    shown = ["kills", "rounds", "pause", "lived", "rate", "goodput", "ideal", "differing"]
    print(harness.show(["", *shown], [["", *(figures[name] for name in shown)]]))
    print(" ".join(f"{name} {share:.3f}" for name, share in found["lost"].items()))


def averaged(stats: Path) -> int:
    """Steps that came into an average, as the hub says."""
    (record,) = stats.glob("hub-*.json")
    return int(json.loads(record.read_text(encoding="utf-8"))["hub"]["averaged"])


def lost(told: Path, counted: int, lived: float, step: float) -> dict[str, float]:
    """Why of the time `lived` not all went into steps that counted."""
    taken = sum(file.stat().st_size for file in told.glob("*.steps"))
    noted = [line for line in lines(told) if line[0] in ("joining", "pause")]
    shares = {
        "kills": (taken - counted) * step / lived,
        "joining": sum(float(at) for what, at, _ in noted if what == "joining") / lived,
        "pauses": sum(float(at) for what, at, _ in noted if what == "pause") / lived,
    }
    return {**shares, "late": 1 - counted * step / lived - sum(shares.values())}


def run(
    given: argparse.Namespace,
    nodes: Nodes,
    folder: Path,
    variables: dict[str, str],
    ends: Path | None = None,
) -> dict[str, Any]:
    """Start all nodes, kill and start as `given` says, and count what they wrote into `folder`.

    `ends`: a file that tells them to end; else each ends with its next exchange.
    """
    for name in nodes.hosts:
        nodes.start(name, folder, variables)
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
            nodes.start(name, folder, variables)
        time.sleep(0.1)
    exchanges = len(lines(folder)) + len(nodes.live)
    if ends is not None:
        ends.touch()
    while nodes.live:
        if time.monotonic() > end + LONGEST_ROUND:
            raise SystemExit(f"error: no round has ended within {LONGEST_ROUND:.0f} s")
        over = set(nodes.live) if ends is None and len(lines(folder)) >= exchanges else set()
        if ends is not None:
            over = {line[2] for line in lines(folder.parent / "told") if line[0] == "done"}
        for name in over & set(nodes.live):
            nodes.kill(name)
        time.sleep(0.05)
    written = lines(folder)
    digests = collections.defaultdict(set)
    for round_, _, digest, _ in written:
        digests[round_].add(digest)
    return {
        "kills": kills,
        "rounds": len(digests),
        "exchanges": len(written),
        "pause": statistics.median(float(line[3]) for line in written),
        "counted": sum(int(line[1]) for line in written),
        "lived": nodes.lived,
        "differing": sum(len(each) > 1 for each in digests.values()),
    }


if __name__ == "__main__":
    main()
