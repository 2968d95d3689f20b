"""What a fault costs a job of the real NCCL, and what the job computes meanwhile.

The ranks stay up through all scenarios of a network, because starting torch takes longer than a
scenario. Each scenario has three parts, in all of which the ranks go on:

    before    all-reduces over the whole network
    during    the fault is there: all-reduces, a small deterministic model is trained, all-reduces
    after     the fault is gone: all-reduces

- *Bit-equal*: every rank knows the random numbers of all others, so each sum is compared with what
  it must be, bit by bit (two floats have one sum). The model's parameters are compared, by hash,
  with those of the undisturbed scenario: each of its steps depends on all before it.
- *Stall*: the engine counts for each quarter of a second the longest time in which a communicator
  had a buffer posted and no byte was placed (docs/reference/records.md, `silences_us`). The longest
  of the all-reduces from the fault on, less the median of those of the undisturbed scenario; the
  worse rank.
- *Rates*: bytes over time of the all-reduces alone, a second after the fault or the repair and
  later, over the best part of the undisturbed scenario in the same lab, and over the part of the
  network that is left.

What a rank wants done to the network it says in a line; this process does it at once.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from evener.tools.lab import Lab, Spec


@dataclass(frozen=True)
class Scenario:
    """`lab`: which network. `begin`, `end`: (target, action) of the lab, or none. `left`: the part
    of the network that carries meanwhile. `limit_ms`: what the stall may be."""

    lab: str
    begin: tuple[str, str] | None
    end: tuple[str, str] | None
    left: float
    limit_ms: float


PATHS, NICS = "2x1@25gbit,paths=4", "2x1@12.5gbit,nics=2"
RESET = ("flows", "reset")
SCENARIOS = {
    "none": Scenario(PATHS, None, None, 1.0, 0.0),
    "black-hole": Scenario(PATHS, ("path1", "blackhole"), ("path1", "heal"), 0.75, 300.0),
    # Down for half of the time: what is left is three paths at least.
    "flapping": Scenario(PATHS, ("path1", "flap 500ms"), ("path1", "heal"), 0.75, 300.0),
    "reset": Scenario(PATHS, RESET, None, 1.0, 300.0),
    "none-two-nics": Scenario(NICS, None, None, 1.0, 0.0),
    "carrier-lost": Scenario(NICS, ("node0.eth1", "down"), ("node0.eth1", "up"), 0.5, 50.0),
}

WORKER = """
import hashlib, json, os, sys, time
import torch
import torch.distributed as dist

scenarios, before, during, after, megabytes = json.loads(sys.argv[1])
gpu = torch.cuda.is_available()
device = "cpu"
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}"
wait = torch.cuda.synchronize if gpu else (lambda: None)
dist.init_process_group("nccl" if gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
def say(**record):
    print("RESULT " + json.dumps({"rank": rank, "at": time.time(), **record}), flush=True)

# Every rank has everybody's numbers, and so the sums.
KINDS, elements = 3, megabytes << 18
def numbers(kind, whose):
    generator = torch.Generator(device).manual_seed(1000 * kind + whose)
    return torch.randn(elements, device=device, generator=generator)
ours = [numbers(kind, rank) for kind in range(KINDS)]
sums = []
for kind in range(KINDS):
    total = numbers(kind, 0)
    for whose in range(1, world):
        total += numbers(kind, whose)
    sums.append(total)
data = torch.empty(elements, device=device)
go = torch.ones(1, device=device)

def reduce_for(seconds):
    "For so long by rank 0's clock: [end, duration] of each all-reduce; how many numbers differ."
    steps, wrong = [], torch.zeros((), dtype=torch.long, device=device)
    until = time.time() + seconds
    go.fill_(1.0)
    while True:
        for kind in range(KINDS):
            data.copy_(ours[kind])
            wait()
            began = time.perf_counter()
            dist.all_reduce(data)
            wait()
            steps.append([time.time(), time.perf_counter() - began])
            # As bits: -0.0 is not 0.0.
            wrong += (data.view(torch.int32) != sums[kind].view(torch.int32)).sum()
        go.fill_(float(time.time() < until))
        dist.broadcast(go, 0)
        if not float(go):
            return steps, int(wrong)

def train():
    "A hash of the parameters after 40 steps that start anew each time."
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64))
    model = torch.nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        batch = torch.randn(64, 1024, generator=generator).to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest()

torch.use_deterministic_algorithms(True)
# Rank 0's warm-up decides nothing; flows are placed and buffers made.
reduce_for(2.0)
train()
for name in scenarios:
    first, wrong = reduce_for(before)
    if rank == 0:
        say(want="begin", scenario=name)
    second, more = reduce_for(during)
    wrong += more
    model = train()
    # So that the repair does not meet the end of the training.
    still, more = reduce_for(0.4)
    wrong += more
    if rank == 0:
        say(want="end", scenario=name)
    third, more = reduce_for(after)
    say(scenario=name, parts=[first, second, still, third], wrong=wrong + more, model=model)
dist.destroy_process_group()
"""

# Resets connections of the engine between two nodes, as a middlebox or a crashed NAT would: through
# the kernel's sock_diag. Arguments: how many of every hundred, the engines' listening ports.
RESETTER = """
import random, socket, struct, sys
share, ports = int(sys.argv[1]), {int(port) for port in sys.argv[2:]}
link = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4)
def ask(kind, flags, identity):
    request = struct.pack("=BBBBI", socket.AF_INET, 6, 0, 0, 1 << 1) + identity
    link.send(struct.pack("=IHHII", 16 + len(request), kind, flags, 1, 0) + request)
ask(20, 0x301, bytes(48))
found, more = [], True
while more:
    answer = link.recv(1 << 16)
    while answer:
        length, kind = struct.unpack_from("=IH", answer)
        if kind in (2, 3):
            more = False
            break
        identity = answer[20:68]
        if ports & set(struct.unpack(">HH", identity[:4])):
            found.append(identity)
        answer = answer[(length + 3) & ~3:]
chosen = random.Random(1).sample(found, -(-len(found) * share // 100))
failed = 0
for identity in chosen:
    ask(21, 5, identity)
    failed += struct.unpack_from("=i", link.recv(4096), 16)[0] != 0
print(len(found), len(chosen), failed)
"""


def read_stats(directory: Path) -> list[dict]:
    """What the engines have written so far; a file that is being replaced is left out."""
    records = []
    for path in sorted(directory.glob("net-*.json")):
        try:
            records.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return records


def listening_ports(directory: Path) -> list[str]:
    """The engines' ports, from the names of peers (`address:port (number)`)."""
    names = [peer["peer"] for one in read_stats(directory) for peer in one["net"]["peers"]]
    return sorted({name.partition(" ")[0].rpartition(":")[2] for name in names})


class Faults:
    """Does what ranks ask for, and remembers when."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.did: dict[tuple[str, str], float] = {}
        self.flows: list[list] = []
        self.notes: list[str] = []
        self._threads: list[threading.Thread] = []

    def wanted(self, name: str, when: str) -> None:
        """From the thread that reads the ranks' lines: must not wait."""
        thread = threading.Thread(target=self._do, args=(name, when))
        thread.start()
        self._threads.append(thread)

    def _do(self, name: str, when: str) -> None:
        scenario = SCENARIOS[name]
        what = scenario.begin if when == "begin" else scenario.end
        self.did[name, when] = time.time()
        for record in read_stats(self.directory):
            for peer in record["net"]["peers"]:
                counts = [
                    peer[key] for key in ("connections", "trials", "gains", "rerolls", "late")
                ]
                suspect = sum(path["state"] == "suspect" for path in record["net"]["paths"])
                self.flows.append([name, when, record["rank"], *counts, suspect])
        try:
            if what == RESET:
                self._reset()
            elif what is not None:
                self.lab.fault(*what)
        except Exception as error:  # noqa: BLE001 - the job goes on; the row says it
            self.notes.append(f"{name} {when}: {error!r}")

    def _reset(self) -> None:
        ports = listening_ports(self.directory)
        if not ports:
            self.notes.append("reset: the engines' statistics name no port")
            return
        for _ in range(2):
            argv = [sys.executable, "-I", "-S", "-c", RESETTER, "25", *ports]
            done = self.lab.nodes[0].run(argv, timeout=10)
            said = done.stdout.strip() or done.stderr.strip()[-200:]
            self.notes.append(f"reset: connections, chosen, refused by the kernel: {said}")
            time.sleep(0.7)

    def wait(self) -> None:
        """Until all is done."""
        for thread in self._threads:
            thread.join()


def _rate(steps: list[list[float]], size: int, since: float, until: float) -> float | None:
    """Bytes per second of the all-reduces that began and ended in between."""
    times = [took for end, took in steps if end - took >= since and end <= until]
    return size * len(times) / sum(times) if times else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one and other else None


QUARTER = 0.25
PARTS = ("before_GBps", "during_GBps", "after_GBps")


def _silences(stats: list[dict], spans: list[tuple[float, float]]) -> list[float]:
    """Milliseconds, one for each quarter of a second that lies in one of `spans`."""
    rows = [row for one in stats for row in one["net"].get("silences_us", [])]
    return [us / 1e3 for at, us in rows if any(a <= at and at + QUARTER <= b for a, b in spans)]


def judge(
    name: str, said: list[dict], faults: Faults, stats: list[dict], size: int, base: dict | None
) -> dict:
    """A row of the table. `base`: the undisturbed scenario's row (None: this is it)."""
    scenario = SCENARIOS[name]
    parts = next(one["parts"] for one in said if one["rank"] == 0)
    began = faults.did.get((name, "begin"), parts[0][-1][0])
    ended = faults.did.get((name, "end"), parts[3][0][0])
    before = _rate(parts[0], size, 0, began)
    during = _rate(parts[1], size, began + 1.0, ended)
    after = _rate(parts[3], size, ended + 1.0, parts[3][-1][0])
    # Not while the model is trained: there ranks wait for each other's processors.
    spans = [(began - QUARTER, parts[1][-1][0]), (parts[2][0][0], parts[3][-1][0])]
    around = _silences(stats, spans)
    usual = statistics.median(_silences(stats, [(parts[0][0][0], began), *spans]) or [0.0])
    row = {
        "lab": scenario.lab,
        "fault": scenario.begin,
        "steps": sum(map(len, parts)),
        "wrong": sum(one["wrong"] for one in said),
        "models": sorted({one["model"] for one in said}),
        "before_GBps": before and before / 1e9,
        "during_GBps": during and during / 1e9,
        "after_GBps": after and after / 1e9,
        "longest_step_ms": max(took for part in parts for _, took in part) * 1e3,
        "median_step_ms": statistics.median(took for part in parts for _, took in part) * 1e3,
        "usual_silence_ms": usual,
        "longest_silence_ms": max(around, default=None),
        # When, rank, connections, trials, gains, rerolls, late messages, suspect paths.
        "flows": [row[1:] for row in faults.flows if row[0] == name],
        "notes": [note for note in faults.notes if name in note],
    }
    reference = base or row
    row["stall_ms"] = (
        max(0.0, row["longest_silence_ms"] - reference["usual_silence_ms"]) if around else None
    )
    whole = max(reference[part] or 0.0 for part in PARTS)
    row["share_of_what_is_left"] = _ratio(row["during_GBps"], scenario.left * whole)
    row["share_after_repair"] = _ratio(row["after_GBps"], whole)
    row["bit_equal"] = row["wrong"] == 0 and row["models"] == reference["models"]
    row["bit_equal"] = row["bit_equal"] and len(row["models"]) == 1
    if base is not None and around:
        row["ok"] = {
            "bit_equal": row["bit_equal"],
            "stall": row["stall_ms"] <= scenario.limit_ms,
            "what_is_left": (row["share_of_what_is_left"] or 0) >= 0.95,
            "repaired": (row["share_after_repair"] or 0) >= 0.95,
        }
    return row


def show(name: str, row: dict) -> str:
    """A line of the table."""

    def number(key: str, form: str = "{:.2f}") -> str:
        return form.format(row[key]) if row.get(key) is not None else "-"

    failed = [what for what, ok in row.get("ok", {}).items() if not ok]
    rates = " / ".join(number(key) for key in ("before_GBps", "during_GBps", "after_GBps"))
    parts = (
        f"{name:13s} {row['steps']:5d} steps",
        f"{rates} GB/s before/during/after",
        f"of what is left {number('share_of_what_is_left')}",
        f"after repair {number('share_after_repair')}",
        f"stall {number('stall_ms', '{:.0f}')} ms",
        f"silence {number('longest_silence_ms', '{:.1f}')}",
        f"usual {number('usual_silence_ms', '{:.1f}')}",
        f"longest step {number('longest_step_ms', '{:.0f}')}",
        f"median {number('median_step_ms', '{:.1f}')}",
        f"wrong {row['wrong']}",
        f"bit-equal {row['bit_equal']}",
        *(["FAILED: " + ", ".join(failed)] if failed else []),
        *row["notes"],
    )
    return "; ".join(parts)


def table(rows: dict[str, dict]) -> str:
    """Markdown, as docs/benchmarks/network.md has it."""
    lines = [
        "| network | fault | before, during, after (GB/s) | of what is left | after the repair | "
        "stall | longest step (median) | bit-equal |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    whole = 0.0
    for name, row in rows.items():
        scenario = SCENARIOS[name]
        if "failed" in row:
            lines.append(f"| {scenario.lab} | {name} | failed: {row['failed']} |||||||")
            continue
        rates = [row[part] or 0.0 for part in PARTS]
        if scenario.begin is None:
            whole = max(rates)
        shares = [rates[1] / (scenario.left * whole), rates[2] / whole] if whole else [0.0, 0.0]
        steps = f"{row['longest_step_ms']:.0f} ms ({row['median_step_ms']:.0f})"
        cells = [
            scenario.lab,
            "none" if scenario.begin is None else " ".join(scenario.begin),
            ", ".join(f"{rate:.2f}" for rate in rates),
            *(["", ""] if scenario.begin is None else [f"{share:.2f}" for share in shares]),
            "-" if row["stall_ms"] is None else f"{row['stall_ms']:.0f} ms",
            steps,
            "yes" if row["bit_equal"] else "no",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_lab(
    spec: str,
    names: list[str],
    env: dict[str, str],
    directory: Path,
    *,
    times: tuple[float, float, float],
    megabytes: int,
    timeout: float,
) -> dict[str, dict]:
    """All scenarios of one network in one job."""
    said: dict[str, list[dict]] = {name: [] for name in names}
    errors: list[str] = []
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("net-*.json"):
        old.unlink()
    with Lab(Spec.parse(spec)) as lab:
        faults = Faults(lab, directory)

        def on_line(rank: int, node: str, stream: str, line: str) -> None:
            del node
            if line.startswith("RESULT "):
                record = json.loads(line.removeprefix("RESULT "))
                if "want" in record:
                    faults.wanted(record["scenario"], record["want"])
                else:
                    said[record["scenario"]].append(record)
            elif (stream == "stderr" and "Error" in line) or "WARN" in line:
                errors.append(f"rank {rank}: {line.strip()[:300]}")

        job = json.dumps([names, *times, megabytes])
        argv = [sys.executable, "-c", WORKER, job]
        told = {**env, "EVENER_STATS_DIR": str(directory.resolve())}
        result = lab.launch(argv, env=told, timeout=timeout, on_line=on_line)
        faults.wait()
    if result.status:
        print(f"{spec}: the job ended with status {result.status}: {errors[:5]}", flush=True)
    stats = read_stats(directory)
    rows: dict[str, dict] = {}
    base: dict | None = None
    for name in names:
        if len(said[name]) == Spec.parse(spec).world_size:
            rows[name] = judge(name, said[name], faults, stats, megabytes << 20, base)
        else:
            rows[name] = {"failed": f"no result, status {result.status}", "errors": errors[:5]}
        if SCENARIOS[name].begin is None:
            base = rows[name] if "failed" not in rows[name] else None
        shown = show(name, rows[name]) if "failed" not in rows[name] else f"{name}: {rows[name]}"
        print(shown, flush=True)
    return rows


def faults(
    names: list[str],
    env: dict[str, str],
    directory: Path,
    *,
    times: tuple[float, float, float] = (1.5, 3.0, 3.0),
    megabytes: int = 32,
) -> dict[str, dict]:
    """All scenarios, a lab and a job for each network; the undisturbed ones go first."""
    rows: dict[str, dict] = {}
    for spec in dict.fromkeys(SCENARIOS[name].lab for name in names):
        here = [name for name in SCENARIOS if SCENARIOS[name].lab == spec]
        here = [name for name in here if name in names or SCENARIOS[name].begin is None]
        # Torch's start, the warm-up, and twice what the scenarios take.
        timeout = 45 + 2 * len(here) * (sum(times) + 2)
        own = directory / here[0]
        rows |= run_lab(spec, here, env, own, times=times, megabytes=megabytes, timeout=timeout)
    return rows
