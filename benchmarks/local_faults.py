"""What faults do to a training by local steps: three ranks on this machine, a fault in rank 1.

    python benchmarks/local_faults.py [--cases killed,stopped,...] [--json FILE]

All train a small network for 200 steps with every=16 and overlap=4, and end the last round. After a
run without a fault, each case has a row: how many ranks finish, whether with the weights of that
run, bit for bit; the longest step of rank 0; how long after the fault the first other rank was
done, well or not, and what rank 0 said if not.

    killed      SIGKILL in the middle of a round
    restarted   the same, but each rank saves every 32 steps, and all are started again
    stopped     SIGSTOP, and SIGCONT 30 s later
    too long    the same with EVENER_TIMEOUT=20
    model       it comes with another model
    bit         one bit of its shared weights changes

With a hub each is a node of its own, and others go on (`--cases node-killed,...`). They train for a
while after the fault. Then a row has the rounds that node 0 had since, the longest time between two
of them, how many rounds node 1 had after the fault, and in how many rounds digests differed.

    node-killed   SIGKILL
    node-stopped  SIGSTOP for 30 s; the hub leaves out who is silent for 10 s
    node-one-way  what it sends does not arrive for 30 s
    node-deaf     what is sent to it does not arrive for 30 s
    node-halves   nothing passes between nodes 2 and 3 and the hub for 30 s
    node-hub      the hub is killed, and started again 10 s later
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate

CASES = ("killed", "restarted", "stopped", "too long", "model", "bit")
NODES = {"node-killed": 20, "node-stopped": 50, "node-one-way": 60, "node-deaf": 60}
NODES |= {"node-halves": 60, "node-hub": 40}  # seconds after the fault
RANKS, STEPS, AT, SAVES, STOPPED, LIMIT = 3, 200, 106, 32, 30.0, 150.0


def be_a_rank(case: str, folder: Path) -> None:
    """Train; say how it ended."""
    rank = int(os.environ["RANK"])
    fault = folder / "fault"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 128 if case == "model" and rank == 1 else 64
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = accelerate(DistributedDataParallel(net), optimizer, every=16, overlap=4)
    saved = folder / f"rank{rank}.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        for part, name in ((net, "net"), (optimizer, "optimizer"), (model.evener, "evener")):
            part.load_state_dict(state[name])
        step = state["step"]
    longest = 0.0
    while step < STEPS:
        began = time.monotonic()
        if step == AT and rank == 1 and case != "none" and not fault.exists():
            fault.write_text(str(time.time()), encoding="utf-8")
            fail(case, model)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 64, generator=generator)
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if case == "restarted" and step % SAVES == 0:
            parts = {"net": net, "optimizer": optimizer, "evener": model.evener}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    model.evener.end_round()
    weights = [p.detach().flatten().tolist() for p in net.parameters()]
    harness.say(rank=rank, at=time.time(), weights=hash(str(weights)), longest=longest)


def fail(case: str, model: Any) -> None:
    """Rank 1's fault."""
    mine = os.getpid()
    if case in ("killed", "restarted"):
        os.kill(mine, signal.SIGKILL)
    elif case in ("stopped", "too long"):
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED}; kill -CONT {mine}"])
        os.kill(mine, signal.SIGSTOP)
    elif case == "bit":
        model.evener.fragments[0].bucket.buffer.view(torch.int32)[0] ^= 1


def be_a_node(case: str, folder: Path) -> None:
    """Train as a node with a hub; say what became of its rounds."""
    rank, fault = int(os.environ["RANK"]), folder / "fault"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = accelerate(DistributedDataParallel(net), optimizer, every=16)
    rounds: list[tuple[float, int, int]] = []
    last = model.evener.rounds  # until it has joined, a node has weights of its own
    while not (fault.exists() and time.time() > float(fault.read_text() or "inf") + NODES[case]):
        if rank == 1 and model.evener.rounds >= 5 and not fault.exists():
            fault.with_suffix(".new").write_text(str(time.time()), encoding="utf-8")
            fault.with_suffix(".new").replace(fault)
            if case in ("node-killed", "node-stopped"):
                fail(case.removeprefix("node-"), model)
        x = torch.randn(32, 64)
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if model.evener.rounds != last:
            last = model.evener.rounds
            bits = hash(str([p.detach().flatten().tolist() for p in net.parameters()]))
            rounds.append((time.time(), last, bits))
    harness.say(rank=rank, rounds=rounds)


def run(case: str) -> dict[str, Any]:
    """One job of `RANKS` ranks, or a second one that goes on, and what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        found = start(case, Path(folder))
        return start(case, Path(folder)) if case == "restarted" else found


def start(case: str, folder: Path) -> dict[str, Any]:
    """One job; see `run`."""
    fault = folder / "fault"
    env = {
        "EVENER_LOG": "warning",
        "PYTHONHASHSEED": "0",
        "EVENER_TIMEOUT": "20" if case == "too long" else "60",
        "NCCL_HOSTID": "one",  # all on one node
    }
    began = time.time()
    words = ("--case", case, "--folder", str(folder))
    said = harness.ranks(*words, count=RANKS, limit=LIMIT, env=env).said
    since = float(fault.read_text(encoding="utf-8")) if fault.exists() else began
    well = [one for one in said if "weights" in one]
    return {
        "finished": len(well),
        "weights": sorted({one["weights"] for one in well}),
        "longest_step": max((one["longest"] for one in well if not one["rank"]), default=0.0),
        "seconds": min((one["at"] for one in said if one["rank"] != 1), default=began) - since,
        "errors": {one["rank"]: one["error"] for one in said if "error" in one},
    }


class Way:
    """Between nodes and the hub: `up` and `down` say whether bytes pass."""

    def __init__(self, port: int) -> None:
        self.to, self.up, self.down = port, True, True
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            for one, other, which in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(one, other, which), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, which: str) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                while not getattr(self, which):  # nothing is lost for good: TCP sends it again
                    time.sleep(0.05)
                other.sendall(data)
        while not getattr(self, which):
            time.sleep(0.05)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def start_hub(token: Path, port: int) -> tuple[Any, int]:
    """A hub that listens, and its port."""
    argv = [sys.executable, "-m", "evener", "hub", "--listen", f"127.0.0.1:{port}"]
    argv += ["--token-file", str(token), "--min-nodes", "2", "--nodes", "4", "--silence", "10"]
    hub = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert hub.stderr is not None
    said = hub.stderr.readline().strip()
    threading.Thread(target=hub.stderr.read, daemon=True).start()
    return hub, int(said.rpartition(":")[2])


def run_nodes(case: str) -> dict[str, Any]:
    """Nodes with a hub, and what became of them."""
    count = 4 if case == "node-halves" else RANKS
    cut = {"node-halves": (2, 3), "node-one-way": (1,), "node-deaf": (1,)}.get(case, ())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hub, port = start_hub(folder / "token", 0)
        hubs, way = [hub], Way(port)

        def disturb() -> None:
            while not (folder / "fault").exists():
                time.sleep(0.05)
            if case == "node-hub":
                hub.kill()
                time.sleep(10)
                hubs.append(start_hub(folder / "token", port)[0])
            elif cut:
                way.up, way.down = case == "node-deaf", case == "node-one-way"
                time.sleep(30)
                way.up = way.down = True

        threading.Thread(target=disturb, daemon=True).start()
        variables = {
            "EVENER_LOG": "error",
            "PYTHONHASHSEED": "0",
            "EVENER_HUB_TOKEN": (folder / "token").read_text(encoding="utf-8"),
            "NODE_PORTS": " ".join(str(way.port if r in cut else port) for r in range(count)),
        }
        words = ("--case", case, "--folder", name)
        said = harness.ranks(*words, count=count, limit=LIMIT + 150, env=variables).said
        fault = float((folder / "fault").read_text(encoding="utf-8"))
        for one in hubs:
            one.kill()
            one.wait()
    found: dict[int, list[list[Any]]] = {
        one["rank"]: one["rounds"] for one in said if "rounds" in one
    }
    bits: dict[int, set[int]] = {}
    for rounds in found.values():
        for _, round_, digest in rounds:
            bits.setdefault(round_, set()).add(digest)
    first = [at for at, _, _ in found.get(0, []) if at > fault]
    victim = 2 if case == "node-halves" else 1
    return {
        "finished": len(found),
        "rounds_after": len(first),
        "longest_gap": max(
            (b - a for a, b in zip([fault, *first], first, strict=False)), default=0
        ),
        "victim_rounds_after": sum(at > fault for at, _, _ in found.get(victim, [])),
        "differing": sum(len(each) > 1 for each in bits.values()),
        "errors": {one["rank"]: one["error"] for one in said if "error" in one},
    }


def main() -> None:
    """Run the cases, and show the table."""
    parser = harness.arguments(__doc__, json="local-faults.json")
    parser.add_argument("--cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        try:
            if given.case in NODES:
                ports = os.environ["NODE_PORTS"].split()
                os.environ["EVENER_HUB"] = f"127.0.0.1:{ports[int(os.environ['RANK'])]}"
                be_a_node(given.case, given.folder)
            else:
                be_a_rank(given.case, given.folder)
        except Exception as error:
            said = " ".join(str(error).partition("\n  fix: ")[0].split())
            harness.say(rank=int(os.environ["RANK"]), at=time.time(), error=said)
            raise
        return
    rows: list[dict[str, Any]] = []
    if given.cases and given.cases.startswith("node"):
        for case in harness.choose(given.cases, list(NODES), "case"):
            rows.append({"case": case, **run_nodes(case)})
            print(rows[-1], flush=True)
            harness.keep(given, rows=rows)
        heads = ["", "finished", "rounds_after", "longest_gap", "victim_rounds_after", "differing"]
        print(harness.show(heads, [[row["case"], *(row[h] for h in heads[1:])] for row in rows]))
        return
    for case in ["none", *harness.choose(given.cases, CASES, "case")]:
        rows.append({**run(case), "case": case})
        print(rows[-1], flush=True)
        harness.keep(given, rows=rows)
    right = rows[0]["weights"]
    shown = [
        [
            row["case"],
            row["finished"],
            "yes" if row["weights"] == right else "no" if row["weights"] else "",
            f"{row['longest_step']:.1f}" if row["finished"] else "",
            f"{row['seconds']:.1f}",
            row["errors"].get(0, ""),
        ]
        for row in rows
    ]
    heads = ["", "finished", "same weights", "longest step, s", "ended after, s", "rank 0 said"]
    print(harness.show(heads, shown))


if __name__ == "__main__":
    main()
