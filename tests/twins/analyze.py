"""Incidents whose cause is known against what `evener analyze` says of their logs.

A program is one incident: how many ranks, what went wrong and on which of them, which sources left
what, how each rank's lines are written, wrapped, cut into files and mixed, and what else stands
among them. The answer must name the right ranks and the right kind, or say that it is not decided;
where the evidence is whole it must decide. It must never name another.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from hypothesis import strategies as st

import evener.tools.analyze as analyze
from evener.tools.analyze.evidence import recorder
from evener.tools.analyze.findings import base, deaths, devices, hangs, run
from evener.tools.analyze.findings.base import Finding
from evener.tools.analyze.parse import unwrap
from evener.tools.analyze.report.verdict import verdict
from evener.tools.analyze.stuck import recorders, waits
from tests import incidents as made
from tests.twins.harness import Program, Twin

KINDS = (
    "silent", "behind", "mismatch", "size", "exception", "exception-hang", "killed", "xid",
    "crash", "dump-missing", "dump-mismatch", "dump-size", "dump-inside", "dump-groups", "inside",
    "lost-logs", "messages", "nccl-memory", "port", "heartbeat", "healthy",
)  # fmt: skip
UNDECIDED = ("run.hung", "cause.inside")
RIGHT = {
    "silent": ("cause.missing-rank",), "behind": ("cause.missing-rank",),
    "mismatch": ("cause.mismatch",), "size": ("cause.mismatch",),
    "exception": ("cause.exception", "cause.gpu-memory"),
    "exception-hang": ("cause.exception", "cause.gpu-memory"),
    "killed": ("cause.killed",), "xid": ("cause.gpu",), "crash": ("cause.crash",),
    "dump-missing": ("cause.missing-rank",), "dump-mismatch": ("cause.mismatch",),
    "dump-size": ("cause.mismatch",), "dump-groups": ("cause.missing-rank",),
    "nccl-memory": ("run.gpu-memory",), "port": ("cause.port-in-use",),
    "heartbeat": ("cause.missing-rank",),
}  # fmt: skip
ERRORS = (
    "ValueError: batch of size 0", "KeyError: 'labels'", "torch.OutOfMemoryError: CUDA out of "
                                                         "memory. "
    "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB", "IndexError: list index "
    "out of range", "OSError: [Errno 5] Input/output error", "RuntimeError: The size of tensor "
                                                             "a (7) "
    "must match the size of tensor b (8)", "AssertionError", "json.decoder.JSONDecodeError: "
                                                             "Expecting "
    "value: line 1 column 1 (char 0)",
)  # fmt: skip
NOISE = (
    "step 12 loss 0.4711 lr 1e-4",
    "timed out requests: 0",
    "[rank0]:[W214 11:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has "
    "NOT been "
    "destroyed before we destruct ProcessGroupNCCL.",
    "UserWarning: The given NumPy array is not writable",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "/opt/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:295: FutureWarning: "
    "torch.cpu.amp.autocast(args...) is deprecated.",
    "error rate on validation: 0.13",
    '{"loss": 0.4, "step": 7}',
    "saved checkpoint, rank 0 waits at the barrier",
    "",
    "n-1:9:9 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)",
    "n-1:9:9 [0] NCCL INFO NET/IB : No device found.",
    "W0214 11:20:30.2 70 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 903 "
    "closing signal SIGTERM",
    "[W214 11:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to "
    "[localhost]:29500 (errno: 99 - Cannot assign requested address).",
)
SLOW = (
    "n-1:9:9 [0] NCCL INFO Using network Socket",
    "n-1:9:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "n-1:9:9 [0] NCCL INFO NET/Socket: Using 1 threads and 1 sockets per thread",
    "n-1:9:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """An incident."""
    kind = draw(st.sampled_from(KINDS))
    low = 4 if kind in ("heartbeat", "dump-groups", "lost-logs") else 3
    world = draw(st.integers(low, 12))
    most = max(1, (world - 1) // 4) if kind != "dump-groups" else 1
    one = kind in ("xid", "crash", "killed", "nccl-memory", "port", "heartbeat", "exception")
    count = 1 if one or kind.startswith("exception") else draw(st.integers(1, most))
    culprits = sorted(
        draw(st.lists(st.integers(0, world - 1), min_size=count, max_size=count, unique=True))
    )
    return {
        "kind": kind,
        "world": world,
        "culprits": culprits,
        "seq": draw(st.integers(2, 300_000)),
        "style": draw(st.sampled_from(made.STYLES)),
        "wrap": draw(st.sampled_from(sorted(made.WRAPS))),
        "files": draw(st.sampled_from(["one", "rank", "node"])),
        "form": draw(st.sampled_from(["pickle", "pickle4", "json"])),
        "version": draw(st.sampled_from(["1.5", "2.1", "2.3", "2.5", "2.10"])),
        "error": draw(st.integers(0, len(ERRORS) - 1)),
        "noise": draw(st.integers(0, 6)),
        "slow": draw(st.booleans()),
        "skew": draw(st.integers(-3600, 3600)),
        "summary": draw(st.booleans()),
        "chained": draw(st.booleans()),
        "mixed": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def _tail(program: Program, random: Random, victims: list[int]) -> dict[int, list[str]]:
    """What ranks say while the job is taken down: none of it is a reason."""
    lines: dict[int, list[str]] = {}
    for rank in victims:
        lines[rank] = made.traceback(rank, random.choice(made.GONE))
        if program["chained"]:
            lead = f"[rank{rank}]: "
            lines[rank] += [
                lead,
                lead + "During handling of the above exception, another exception occurred:",
                lead,
                *made.traceback(rank, "app.errors.TrainerError: the step failed"),
            ]
    return lines


def incident(program: Program) -> tuple[dict[int, list[str]], list[str], dict[str, bytes]]:
    """Each rank's lines, the launcher's and the system's, and whole files of their own."""
    random = Random(program["seed"])
    kind, world, culprits = program["kind"], program["world"], program["culprits"]
    seq, style = program["seq"], program["style"]
    ranks: dict[int, list[str]] = {rank: [] for rank in range(world)}
    system = [f"torchrun --nnodes=1 --nproc-per-node={world} train.py"]
    files: dict[str, bytes] = {}
    others = [rank for rank in range(world) if rank not in culprits]
    second = 900

    def wait(who: list[int], number: int = seq, **more: Any) -> None:
        for rank in who:
            skew = program["skew"] if rank >= world // 2 else 0
            at = (second + skew + rank) % 3600
            ranks[rank] += made.watchdog(rank, number, style=style, second=at, **more)

    codes = dict.fromkeys(others, -6)
    if kind == "silent":
        wait(others)
    elif kind == "behind":
        wait(others, enqueued=seq + random.randint(0, 5))
        wait(culprits, seq - 1, enqueued=seq - 1)
    elif kind == "mismatch":
        wait(others)
        wait(culprits, op="BROADCAST", numel=random.choice([1024, 7]))
    elif kind == "size":
        wait(others, op=random.choice(["ALLREDUCE", "_ALLGATHER_BASE"]), numel=4096)
        op = "ALLREDUCE" if "ALLREDUCE" in str(ranks[others[0]]) else "_ALLGATHER_BASE"
        wait(culprits, op=op, numel=33)
    elif kind == "inside":
        wait(list(range(world)))
    elif kind == "messages":
        for rank in range(world):
            wait([rank], seq + random.randint(0, 3), op=random.choice(["SEND", "RECV"]))
    elif kind == "lost-logs":
        kept = others[: max(2, world // 3)]
        wait(kept)
        codes = dict.fromkeys(kept, -6)
        program = {**program, "summary": False}
    elif kind in ("exception", "exception-hang"):
        ranks[culprits[0]] += made.traceback(culprits[0], ERRORS[program["error"]])
        if kind == "exception-hang":
            wait(others)
        else:
            for rank, lines in _tail(program, random, others).items():
                ranks[rank] += lines
        codes = dict.fromkeys(others, 1)
    elif kind in ("killed", "crash"):
        for rank, lines in _tail(program, random, others).items():
            ranks[rank] += lines
        code = -9 if kind == "killed" else -11
        system += made.torchrun(
            [(rank, 1, 900 + rank) for rank in others], (culprits[0], code, 900 + culprits[0])
        )
        if kind == "killed" and program["mixed"]:
            system.append(
                f"[8{random.randint(10000, 99999)}.100000] Out of memory: Killed process "
                f"{900 + culprits[0]} (python3) total-vm:9999kB"
            )
    elif kind == "xid":
        rank = culprits[0]
        for one in range(world):
            ranks[one].append(
                f"n-1:{900 + one}:{950 + one} [{one}] NCCL INFO ncclCommInitRank comm 0x5{one} "
                f"rank "
                f"{one} nranks {world} cudaDev {one} nvmlDev {one} busId {16 + one:x}000 commId "
                f"0x9 - "
                "Init COMPLETE"
            )
        for one, lines in _tail(program, random, others).items():
            ranks[one] += lines
        ranks[rank] += made.traceback(rank, "RuntimeError: CUDA error: unspecified launch failure")
        code = random.choice([48, 79, 74, 94, 95, 119])
        later = [r for r in range(world) if r != rank][:2]
        kernel = [
            f"[9{i}.000001] NVRM: Xid (PCI:0000:{16 + r:x}:00): {c}, pid={900 + r}, name=python3, x"
            for i, (r, c) in enumerate([(rank, code), *((r, 45) for r in [rank, *later])])
        ]
        if program["mixed"]:
            kernel.insert(
                0, f"[8.000001] NVRM: Xid (PCI:0000:{16 + later[0]:x}:00): 45, pid=1, Ch 1"
            )
        files["dmesg.txt"] = "\n".join(kernel).encode()
    elif kind == "nccl-memory":
        for rank in others:
            ranks[rank] += [
                f"n-1:{900 + rank}:{950 + rank} [{rank}] misc/socket.cc:49 NCCL WARN "
                f"socketProgress: "
                "Connection closed by remote peer n-1<46033>",
                f"n-1:{900 + rank}:{950 + rank} [{rank}] NCCL INFO init.cc:1079 -> 6",
            ]
        rank = culprits[0]
        ranks[rank] += [
            f"n-1:{900 + rank}:{950 + rank} [{rank}] include/alloc.h:178 NCCL WARN Cuda failure "
            f"2 'out "
            "of memory'",
            f"n-1:{900 + rank}:{950 + rank} [{rank}] NCCL INFO init.cc:1079 -> 1",
        ]
    elif kind == "port":
        system.append(
            "[W220 19:02:31.6 socket.cpp:464] [c10d] The server socket has failed to bind to "
            f"[::]:{20000 + world} (errno: 98 - Address already in use)."
        )
        for rank, lines in _tail(program, random, others).items():
            ranks[rank] += lines
    elif kind == "heartbeat":
        for rank in range(world):
            number = random.randint(3, 60) if rank in culprits else 77
            ranks[rank] += made.heartbeat(rank, number, old=program["mixed"])
    elif kind.startswith("dump"):
        files |= _dumps(program, random)
        if program["mixed"] and kind == "dump-missing":
            wait(others)
    if program["summary"] and kind in ("silent", "mismatch", "size", "behind", "exception-hang"):
        failures = [(r, c, 900 + r) for r, c in codes.items()]
        random.shuffle(failures)
        system += made.torchrun(failures[1:], failures[0])
    for rank in ranks:
        for _ in range(program["noise"]):
            ranks[rank].insert(random.randint(0, 1), random.choice(NOISE))
    return ranks, system, files


def _dumps(program: Program, random: Random) -> dict[str, bytes]:
    kind, world, culprits = program["kind"], program["world"], program["culprits"]
    seq = min(program["seq"], 4000)
    start = max(1, seq - random.randint(1, 12))
    groups = {"0": ("default_pg", list(range(world)))}
    half = [culprits[0], (culprits[0] + 1) % world]
    if kind == "dump-groups":
        groups["1"] = ("tp", sorted(half))
    files = {}
    for rank in range(world):
        entries = [made.entry(n) for n in range(start, seq)]
        # A ring buffer that wrapped: some dumps begin later.
        entries = entries[random.randint(0, max(0, len(entries) - 1)) :]
        last: dict[str, Any] | None = made.entry(seq, state=random.choice(["scheduled", "started"]))
        if rank in culprits:
            last = {
                "dump-missing": None,
                "dump-mismatch": made.entry(seq, "broadcast", state="started"),
                "dump-size": made.entry(seq, size=9, state="started"),
                "dump-inside": last,
                "dump-groups": None,
            }[kind]
        elif kind == "dump-groups" and rank in half:
            last = made.entry(3, group="1", desc="tp", state="scheduled", created=seq * 1_000_000)
        if last is not None:
            entries.append(last)
        mine = {name: group for name, group in groups.items() if rank in group[1]}
        value = made.recorder(entries, mine, program["version"])
        end = ".json" if program["form"] == "json" else ""
        files[f"nccl_trace_rank_{rank}{end}"] = made.dumped(value, program["form"])
    return files


def write(program: Program, folder: Path) -> None:
    """The incident's files."""
    ranks, system, files = incident(program)
    random = Random(program["seed"] + 1)
    wrap = made.WRAPS[program["wrap"]]
    slow = list(SLOW) if program["slow"] else []
    if program["files"] == "one":
        streams = [list(lines) for lines in ranks.values()]
        mixed: list[str] = []
        while any(streams):
            stream = random.choice([s for s in streams if s])
            mixed += [stream.pop(0) for _ in range(min(random.randint(1, 3), len(stream)))]
        (folder / "job.log").write_text("\n".join(wrap([*slow, *system[:1], *mixed, *system[1:]])))
    else:
        size = 1 if program["files"] == "rank" else max(2, len(ranks) // 2)
        for first in range(0, len(ranks), size):
            lines = [line for r in range(first, min(first + size, len(ranks))) for line in ranks[r]]
            (folder / f"part_{first}.log").write_text("\n".join(wrap(lines)) + "\n")
        (folder / "launcher.log").write_text("\n".join(wrap([*slow, *system])) + "\n")
    for name, data in files.items():
        (folder / name).write_bytes(data)


def named(text: str) -> list[int]:
    """The ranks that a title begins with."""
    found = re.match(
        r"(?:.*?\(rank (\d+)\)|(?:Xid.{0,60}?)?[Rr]anks? ([\d,\- ]+(?:and \d+)?))", text
    )
    if not found:
        return []
    numbers: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", found[1] or found[2]):
        numbers += range(int(low), int(high or low) + 1)
    return sorted(numbers)


def check(program: Program) -> None:
    """Right, or not decided; never wrong."""
    folder = Path(tempfile.mkdtemp(prefix="evener-twin-"))
    try:
        write(program, folder)
        result = analyze.picture(analyze.collect([folder]))
        findings = analyze.run_checks(result)
        said = verdict(result, findings)
        judge(program, said, findings)
    finally:
        shutil.rmtree(folder)


def judge(program: Program, said: str, findings: list[Finding]) -> None:
    """Compare what was said with what is true."""
    kind, culprits = program["kind"], program["culprits"]
    top = max(findings, key=lambda f: f.root, default=None)
    if kind == "healthy":
        assert top is None or top.root == 0, f"healthy, and it says: {said}"
        return
    assert findings and top is findings[0], f"{kind}: the reason is not first: {said}"
    if kind in ("inside", "dump-inside", "lost-logs", "messages"):
        assert top.id in UNDECIDED, f"{kind}, and it says: {said}"
        assert not named(top.title), said
        if kind == "lost-logs":
            kept = max(2, program["world"] // 3)
            count = min(kept, program["world"] - len(culprits))
            assert re.search(rf"\b{count} ranks of {program['world']}\b", said), said
        return
    assert top.id in RIGHT[kind], f"{kind} of {culprits}, and it says: {said}"
    assert top.title in said, f"the verdict is not the first finding: {said}"
    if kind == "port":
        assert str(20000 + program["world"]) in said, said
    elif kind == "nccl-memory":
        assert not any("first warning: socketProgress" in f.detail for f in findings), said
    else:
        assert named(top.title) == culprits, f"{kind} of {culprits}, and it says: {said}"
    if kind == "exception":
        assert ERRORS[program["error"]].split(":")[0].rsplit(".", 1)[-1] in said, said


# --- faults: what was wrong, put back ---


@contextmanager
def _patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(target, name, value):
        yield


def _first_is_right(values: dict[int, Any]) -> Any:
    """torch's analyzer takes the first rank for right."""
    first = values[min(values)]
    odd = tuple(sorted(rank for rank, value in values.items() if value != first))
    return (odd, values[odd[0]], first) if odd else None


def _silence_proves(groups: Any, world: int, seen: set[int], victims: set[int]) -> Any:
    del seen, victims
    name, members = max(groups.items(), key=lambda item: len(item[1]))
    missing = sorted(set(range(world)) - set(members))
    return waits._culprit("silent", members, tuple(missing), name, 1, "", "")


@contextmanager
def _line_counts() -> Iterator[None]:
    """Each line of a watchdog is a rank that gave up."""

    def finding(culprit: Any, size: int) -> Finding:
        found = whole(culprit, size)
        lines = len(culprit.waiting) * 2
        return base.replace(
            found, title=found.title.replace(f"{len(culprit.waiting)} ranks", f"{lines} ranks")
        )

    whole = hangs.finding
    with mock.patch.object(hangs, "finding", finding):
        yield


Fault = Callable[[], AbstractContextManager[Any]]
FAULTS: dict[str, Fault] = {
    "a finding on speed is the reason": lambda: _patched(base, "FOLLOWS", 1000),
    "the first warning is the reason": lambda: _patched(run, "follows", lambda *_: False),
    "lines of JSON are not unwrapped": lambda: _patched(unwrap, "line", lambda *_: None),
    "documents of lines are not unwrapped": lambda: _patched(unwrap, "document", lambda _: None),
    "lines are counted, not ranks": _line_counts,
    "the job's size is not read": lambda: _patched(hangs, "world_size", lambda _: 0),
    "the first rank is right": lambda: _patched(waits, "minority", _first_is_right),
    "the first rank's dump is right": lambda: _patched(recorders, "minority", _first_is_right),
    "what follows is a reason too": lambda: _patched(deaths, "_FOLLOWS", re.compile("(?!)")),
    "silence of many proves": lambda: _patched(waits, "_silent", _silence_proves),
    "a dump's rank is not read": lambda: _patched(recorder, "rank_of", lambda _: 0),
    "Xid 45 is a reason": lambda: _patched(devices, "CLEAN_UP", frozenset()),
    "killed ranks are not read": lambda: _patched(deaths, "killed", lambda _: ([], [])),
}

TWIN = Twin("analyze", programs(), check, FAULTS, programs_per_round=300)
