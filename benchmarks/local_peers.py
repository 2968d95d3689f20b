"""Local steps beside other libraries' over one slow network: tokens per second, and under kills.

    python benchmarks/local_peers.py [--ways alone,hub:int4,...] [--nodes 4] [--every 32]
        [--step 0.3] [--rounds 3] [--repeats 3] [--link 100mbit,delay=40ms,loss=1%]
        [--torchft PYTHON] [--hivemind PYTHON] [--kills MINUTES] [--json FILE]

Simulated nodes of one rank (`evener lab`) train the GPT of local_steps.py; what other libraries
need as a server, and Evener's hub, is on a node of its own. All average every N steps.

    alone              no exchange
    hub:FORM           Evener, nodes that come and go
    local:FORM         Evener, one job, an exchange behind the next N / 2 steps
    torchft:localsgd   torchft's LocalSGD
    torchft:diloco     torchft's DiLoCo in one bucket, behind N / 2 steps (fragment_sync_delay)
    hivemind:fp16      hivemind.Optimizer with use_local_updates; its next step waits for an average

A step lasts --step seconds, whatever its arithmetic takes: the rest is slept. The ways take turns.
Reported: tokens per second of all nodes in the last two thirds of the rounds, and their share of
the ideal, which has steps that last --step and no exchange. A library that its PYTHON cannot import
is left out, and a line says so. With --kills a random node is killed every 60 s and comes back 20 s
later, as in nodes_goodput.py, for the ways of which it can be told which steps came into an
average; `ideal` is the share of these among the steps that nodes could take while they lived.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
from local_steps import SHAPE
from nodes_goodput import ALONE, Nodes, be_a_host, hub_of, lines, run

import evener
from evener.tools.lab import Lab, Spec

WAYS = (
    "alone", "hub:int4", "hub:exact", "local:int4", "local:exact", "torchft:localsgd",
    "torchft:diloco", "hivemind:fp16",
)  # fmt: skip
LIBRARIES = ("torchft", "hivemind")
LIMIT = 400.0
ROWS = 1  # little arithmetic: a step is mostly slept
_MODULES = ["torch", "torch._dynamo", "evener.ddp.line", "evener.tools.bench.train.transformers"]
_PORT = 29510

Steps = tuple[Callable[[], Any], Callable[[], int]]
"""Make a step of the optimizer; how many rounds there have been."""


def be_a_node(given: argparse.Namespace, folder: str, variables: dict[str, str]) -> None:
    """Train; write a line for each round, or at the end tokens per second."""
    os.environ.update(variables, EVENER_LOG="warning")
    import torch
    from torch.nn.functional import cross_entropy

    from evener.tools.bench.train.transformers import GPT

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT(SHAPE)
    made: dict[str, Callable[[Any, Any], Any]] = {
        "alone": _alone, "hub": _hub, "local": _local, "torchft": _torchft, "hivemind": _hivemind
    }  # fmt: skip
    model, optimizer, (step, rounds) = made[given.ways.partition(":")[0]](given, net)
    seed = time.time_ns()
    torch.manual_seed(seed)
    first, last = given.every * (given.rounds // 3), given.every * given.rounds
    since, round_, taken, began = 0, rounds(), 0, time.monotonic()
    path = Path(folder) / f"{given.node}-{seed}"
    with path.open("a", buffering=1, encoding="utf-8") as file:
        while given.kills or taken < last:
            if taken == first:
                began = time.monotonic()
            due = time.monotonic() + given.step
            x = torch.randint(SHAPE.symbols, (ROWS, SHAPE.context))
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            time.sleep(max(0.0, due - time.monotonic()))
            stepped = time.monotonic()
            step()
            taken, since = taken + 1, since + 1
            if given.kills and given.ways == "alone":
                file.write("step\n")
            elif given.kills and (now := rounds()) != round_:
                pause = time.monotonic() - stepped
                counted = since if now == round_ + 1 else 0
                round_, since = now, 0
                bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
                digest = hashlib.sha256(bits).hexdigest()[:16]
                if counted:  # else others' weights came, at another point of their round
                    file.write(f"{now} {counted} {digest} {pause:.3f}\n")
        tokens = (last - first) * ROWS * SHAPE.context
        file.write(f"rate {tokens / (time.monotonic() - began)} {rounds()}\n")
    while True:  # others may still need this process
        time.sleep(1)


def _adamw(net: Any) -> Any:
    import torch

    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def _alone(_: argparse.Namespace, net: Any) -> tuple[Any, Any, Steps]:
    optimizer = _adamw(net)
    return net, optimizer, (optimizer.step, lambda: 0)


def _hub(given: argparse.Namespace, net: Any) -> tuple[Any, Any, Steps]:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return _evener(given, net, {})


def _local(given: argparse.Namespace, net: Any) -> tuple[Any, Any, Steps]:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=_rank(given), world_size=given.nodes)
    return _evener(given, net, {"overlap": given.every // 2})


def _evener(given: argparse.Namespace, net: Any, how: dict[str, Any]) -> tuple[Any, Any, Steps]:
    from torch.nn.parallel import DistributedDataParallel

    from evener.ddp import accelerate

    optimizer = _adamw(net)
    form = given.ways.partition(":")[2]
    wrapped = DistributedDataParallel(net)
    model: Any = accelerate(wrapped, optimizer, every=given.every, mode=form, **how)
    return model, optimizer, (optimizer.step, lambda: int(model.evener.rounds))


def _torchft(given: argparse.Namespace, net: Any) -> tuple[Any, Any, Steps]:
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    way = given.ways.partition(":")[2]
    optimizer = _adamw(net)
    # As short as an exchange allows: so long the others wait for one that was killed in it.
    timeout = timedelta(seconds=15 if given.kills else 60)
    here = os.environ["OWN_ADDRESS"]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        here, 0, is_master=True, wait_for_workers=False
    )

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2 if given.kills else given.nodes,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timedelta(hours=1),  # "~1h or longer", as Manager's description has it
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['SERVER']}",
        replica_id=given.node,
        hostname=here,
    )
    if way == "localsgd":
        LocalSGD(manager, net, optimizer, given.every).__enter__()
    else:
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        how = {"use_bucketization": True, "fragment_sync_delay": given.every // 2}
        DiLoCo(manager, [net], optimizer, outer, given.every, **how).__enter__()
    net.kept = store  # it ends with the last name for it
    return net, optimizer, (optimizer.step, lambda: int(manager.current_step()))


def _hivemind(given: argparse.Namespace, net: Any) -> tuple[Any, Any, Steps]:
    import hivemind
    import torch
    from hivemind.compression import Float16Compression

    here, there = os.environ["OWN_ADDRESS"], os.environ["SERVER"]
    dht = hivemind.DHT(initial_peers=[there], host_maddrs=[f"/ip4/{here}/tcp/0"], start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        params=net.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size_per_step=ROWS,
        target_batch_size=ROWS * given.every * given.nodes,
        use_local_updates=True,
        matchmaking_time=3.0,  # "3-5s for small local runs"
        averaging_timeout=30.0,
        averager_opts={"request_timeout": 1.0},  # shorter than the matchmaking, as it warns
        state_averaging_compression=Float16Compression(),
        verbose=True,
    )
    return net, optimizer, (optimizer.step, lambda: int(optimizer.local_epoch))


def _rank(given: argparse.Namespace) -> int:
    return int(given.node.removeprefix("node"))


@contextlib.contextmanager
def server(way: str, given: argparse.Namespace, lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """What a way needs beside its nodes, on the lab's last node; what nodes need to find it."""
    if way == "hub":
        with hub_of(lab, folder) as variables:
            yield variables
        return
    if way in ("alone", "local"):
        yield {"MASTER_ADDR": lab.nodes[0].addresses[0], "MASTER_PORT": "29500"}
        return
    node, python = lab.nodes[-1], _python(given, way)
    address = node.addresses[0]
    if way == "torchft":
        least = 2 if given.kills else given.nodes
        argv = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"0.0.0.0:{_PORT}"]
        argv += ["--min_replicas", str(least)]
    else:
        argv = [python, "-m", "hivemind.hivemind_cli.run_dht", "--host_maddrs"]
        argv += [f"/ip4/{address}/tcp/{_PORT}"]
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as to:
        process = node.popen(argv, stdout=to, stderr=to)
        try:
            end = time.monotonic() + 60
            said = ""
            while not (found := re.search(r"/ip4/\S+/p2p/\w+", said)) and way == "hivemind":
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"error: {way}'s server: {said[-300:]}")
                time.sleep(0.2)
                said = log.read_text(encoding="utf-8")
            time.sleep(1)
            yield {"SERVER": found[0] if found else f"{address}:{_PORT}"}
        finally:
            process.terminate()
            process.wait()


def _python(given: argparse.Namespace, library: str) -> str:
    """Whose packages have it."""
    return vars(given).get(library) or sys.executable


def _missing(given: argparse.Namespace, way: str) -> str:
    """Why a way cannot run here."""
    library = way.partition(":")[0]
    if library not in LIBRARIES:
        return ""
    argv = [_python(given, library), "-c", f"import {library}"]
    tried = subprocess.run(argv, capture_output=True, text=True)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


@contextlib.contextmanager
def nodes_of(way: str, given: argparse.Namespace) -> Iterator[tuple[Nodes, Path, dict[str, str]]]:
    """Nodes that can start to train that way."""
    library = way.partition(":")[0]
    python = _python(given, library)
    root = str(Path(python).parents[1])
    link = "none" if library == "alone" else given.link
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(Spec.parse(f"{given.nodes + 1}x1@{link}"), keep=[name, root]) as lab,
    ):
        folder = Path(name)
        (folder / "written").mkdir()
        words = harness.arguments_of(given, "every", "step", "rounds", "nodes", "kills")
        argv = [python, str(Path(__file__).resolve()), "--ways", way, *words]
        if python != sys.executable:  # an environment that has the library, torch, and no Evener
            argv = [
                "env",
                f"PYTHONPATH={Path(evener.__file__).parents[1]}",
                "RUST_LOG=error",
                *argv,
            ]
        nodes = Nodes(lab, argv)
        with server(library, given, lab, folder) as variables:
            nodes.own = {
                node.name: {"OWN_ADDRESS": node.addresses[0], "RANK": str(node.index)}
                for node in lab.nodes
            }
            yield nodes, folder / "written", variables


def rate(way: str, given: argparse.Namespace) -> float:
    """Tokens per second of all nodes."""
    with nodes_of(way, given) as (nodes, folder, variables):
        for name in nodes.hosts:
            nodes.start(name, folder, variables)
        end = time.monotonic() + LIMIT
        while len(lines(folder)) < given.nodes:
            if time.monotonic() > end:
                raise SystemExit(f"error: {way} has not ended within {LIMIT:.0f} s")
            time.sleep(0.2)
        found = lines(folder)
        for name in list(nodes.live):
            nodes.kill(name)
    return sum(float(line[1]) for line in found)


def goodput(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """As nodes_goodput.py has it; without kills for `alone`."""
    with nodes_of(way, given) as (nodes, folder, variables):
        if way != "alone":
            given.minutes = given.kills
            return run(given, nodes, folder, variables)
        for name in nodes.hosts:
            nodes.start(name, folder, variables)
        while len(lines(folder)) < 10 * given.nodes:
            time.sleep(0.2)
        before, began = len(lines(folder)), time.monotonic()
        time.sleep(ALONE)
        each = (len(lines(folder)) - before) / (time.monotonic() - began) / given.nodes
        for name in list(nodes.live):
            nodes.kill(name)
        return {"rate": each}


def _keep(given: argparse.Namespace, **figures: Any) -> None:
    """A folder of this machine is no part of a record."""
    kept = {name: value for name, value in vars(given).items() if name not in LIBRARIES}
    harness.keep(argparse.Namespace(**kept), **figures)


def main() -> None:
    """Let the ways take turns, and show the table."""
    parser = harness.arguments(__doc__, json="local-peers.json")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.3, help="seconds")
    parser.add_argument("--link", default="100mbit,delay=40ms,loss=1%")
    for library in LIBRARIES:
        parser.add_argument(f"--{library}", metavar="PYTHON", help=f"whose packages have {library}")
    parser.add_argument("--kills", type=float, default=0.0, help="minutes")
    parser.add_argument("--kill", type=float, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--back", type=float, default=20, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        library = given.ways.partition(":")[0]
        modules = [*_MODULES, library] if library in LIBRARIES else _MODULES
        be_a_host(modules, functools.partial(be_a_node, given))
        return
    ways = []
    for way in harness.choose(given.ways, WAYS, "way"):
        if why := _missing(given, way):
            print(f"{way} is left out: {why}", flush=True)
        else:
            ways.append(way)
    if given.kills:
        found = {}
        for way in ways:
            found[way] = goodput(way, given)
            if way != "alone":
                found[way]["ideal"] = given.step * found[way]["counted"] / found[way]["lived"]
            print(way, found[way], flush=True)
            _keep(given, **found)
        return
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way in ways:
            rates[way].append(rate(way, given))
            print(f"{way} {rates[way][-1]:.0f}", flush=True)
            _keep(given, rates=rates)
    ideal = given.nodes * ROWS * SHAPE.context / given.step
    rows = []
    for way, each in rates.items():
        shares = [one / ideal for one in each]
        row = [way, f"{statistics.median(each):.0f}", f"{statistics.median(shares):.2f}"]
        rows.append([*row, f"{min(shares):.2f} to {max(shares):.2f}"])
    print(harness.show(["", "tokens/s", "of ideal", "turns"], rows))


if __name__ == "__main__":
    main()
