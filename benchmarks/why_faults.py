"""Twelve kinds of fault in jobs of three ranks: does the watch name the right rank and kind?

    python benchmarks/why_faults.py --runs 10 [--kinds stop,kill] [--programs ddp,fsdp2]
    python benchmarks/why_faults.py --nccl --jobs 4   # on three GPUs, with other readers beside it

Each run forks three ranks off a process that has imported torch (a run takes seconds, and not the
time of three imports), lets them train, breaks one of them, and takes the first verdict that the
watch of `evener launch` says: the right one names the rank and the kind. Seconds count from the
fault. `quiet` breaks nothing: any verdict is a false alarm.

The ranks of `link` and `one-way` live in network namespaces of their own, joined by a bridge;
`memory` runs in a memory cgroup; `shm` sees a small /dev/shm. These need root. With `--nccl` DDP
and FSDP2 run on GPUs, with the kinds that need neither. At each verdict NCCL's RAS is asked then,
and every rank that can for its flight recorder's dump; torch's `torchfrtrace` reads the dumps, and
so does `evener analyze`, which has nothing else there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from evener.base.ports import free_port

if TYPE_CHECKING:
    import torch

RANKS = 3
FLOOR = 3.0
LIMIT = 45.0
QUIET = 25.0
WARM = 12  # steps before the fault

KINDS = {
    "kill": ("cause.killed", "cause.dead-rank"),
    "stop": ("cause.suspended",),
    "order": ("cause.mismatch",),
    "shape": ("cause.mismatch",),
    "slow": ("cause.slow-rank",),
    "loader": ("cause.data-loader",),
    "link": ("cause.link",),
    "one-way": ("cause.link",),
    "memory": ("cause.killed",),
    "shm": ("host.shm-full",),
    "exception": ("cause.exception",),
    "skew": ("cause.clock",),
}
PROGRAMS = ("ddp", "fsdp2", "horovod", "pipeline")
NCCL_PROGRAMS = ("nccl-ddp", "nccl-fsdp2")
NCCL_KINDS = ("kill", "stop", "order", "shape", "slow", "loader", "exception", "quiet")
BLAMED = {
    "title": r"^.*?\branks? (\d+(?:(?:, | and )\d+)*)",
    "ras": r"Rank (\d+) (?:--|has launched)",
    "torchfrtrace": r"(?:Culprit rank |missing ranks: \{|dumps from ranks \(\{)([\d, ]+)",
    "analyze": r"^.*?\branks? (\d+(?:(?:, | and )\d+)*)",
}
"""How a reader writes which ranks it blames; `title` is what the watch said."""
MISMATCHES = {"order": "COLLECTIVE_TYPE_MISMATCH", "shape": "SIZE_OR_SYNTAX_MISMATCH"}
"""How torchfrtrace names a kind; it has no word for the others."""


# --- what a rank runs ---


class Fault:
    """Breaks one rank at one step."""

    def __init__(self, kind: str, me: bool, mark: Path) -> None:
        self.kind, self.me, self.mark, self.on = kind, me, mark, False

    def at(self, step: int) -> None:
        """Called by every rank before each step's backward."""
        import torch

        if step == WARM:
            self.on = True
            if self.me:
                self.mark.write_text(repr(time.time()))
        if not (self.me and self.on):
            return
        if self.kind == "slow":
            time.sleep(0.15)
        if step != WARM:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "exception":
            raise ValueError("the label 1007 is out of range")
        elif self.kind == "memory":
            kept = []
            while True:
                kept.append(torch.ones(4 << 20))
        elif self.kind == "shm":
            torch.ones(4 << 20).share_memory_()
        elif self.kind == "skew":
            real = time.time
            time.time = lambda: real() + 120.0
        elif self.kind in ("link", "one-way"):
            (self.mark.parent / "cut").write_text("now")
            time.sleep(1.0)

    def sample(self, step: int) -> None:
        """Called where a batch is made."""
        if self.kind == "loader" and self.me and step > WARM:
            if not self.mark.exists():
                self.mark.write_text(repr(time.time()))
            time.sleep(3600)


def train(program: str, fault: Fault) -> None:
    """Train for ever, a step in some 30 ms."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, index: int) -> torch.Tensor:
            fault.sample(index // 4)
            return torch.full((32,), float(index % 7))

    torch.manual_seed(0)
    on_gpu = program.startswith("nccl-")
    if program == "horovod":
        import evener.horovod.torch as hvd

        hvd.init()
    rank = int(os.environ["RANK"])
    program, device = program.removeprefix("nccl-"), torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    elif program != "horovod":
        dist.init_process_group("gloo")
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).to(device)
    step_of = None
    if program == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif program == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (RANKS,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif program == "pipeline":
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        model = torch.nn.Linear(32, 32)
        stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).square().mean()
        )

        def step_of(batch: torch.Tensor) -> None:
            if rank == 0:
                schedule.step(batch)
            elif rank == RANKS - 1:
                schedule.step(target=batch)
            else:
                schedule.step()

    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    if program == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step, batch in enumerate(DataLoader(Data(), batch_size=4)):
        odd = fault.me and step == WARM
        if step % 4 == 0:  # what a program does besides: a figure of all ranks
            size = 5 if odd and fault.kind == "shape" else 4
            reduce(program, torch.ones(size, device=device), f"metric.{step}")
        fault.at(step)
        if odd and fault.kind == "order":
            reduce(program, torch.ones(2, device=device), "only here", alone=True)
        if step_of is not None:
            step_of(batch)
        else:
            loss = model(batch.to(device)).square().mean()
            loss.backward()
            float(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)


def reduce(program: str, data: torch.Tensor, name: str, alone: bool = False) -> None:
    """A small operation over all ranks; `alone`: one that the other ranks do not call."""
    from torch import distributed as dist

    if program == "horovod":
        import evener.horovod.torch as hvd

        hvd.allreduce(data, name=name)
    elif alone:
        dist.broadcast(data, src=dist.get_rank())
    else:
        dist.all_reduce(data)


def be_rank(
    rank: int, program: str, kind: str, who: int, folder: Path, port: int, pipe: int
) -> None:
    """In a forked child: become a rank. Never returns."""
    status = 1
    try:
        os.setsid()
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        network = kind in ("link", "one-way")
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_PORT=str(port),
            LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="10.77.0.1" if network else "127.0.0.1",
            EVENER_LAUNCH_WATCH=str(folder / "rings"), GLOO_SOCKET_IFNAME="e0" if network else "lo",
            NCCL_NVLS_ENABLE="0", NCCL_RAS_ADDR=f"127.0.0.1:{port + 1}",
        )  # fmt: skip
        if program in NCCL_PROGRAMS:
            os.environ.update(
                TORCH_FR_BUFFER_SIZE="2000", TORCH_NCCL_TRACE_BUFFER_SIZE="2000",
                TORCH_NCCL_DUMP_ON_TIMEOUT="1", TORCH_NCCL_COORD_CHECK_MILSEC="100",
                TORCH_FR_DUMP_TEMP_FILE=f"{folder}/dumps/rank_",
                TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{folder}/dump.",
            )  # fmt: skip
        if network:
            enter_network(rank, folder)
        if kind == "shm" and rank == who:
            small_shm()
        if kind == "memory" and rank == who:
            enter_cgroup(folder)
        import torch

        from evener.watch import inside

        inside.arm()
        # Here, and not by two threads at once: torch makes its pool anew after a fork.
        torch.set_num_threads(1)
        train(program, Fault(kind, rank == who, folder / "mark"))
        status = 0
    except BaseException:  # noqa: BLE001 - a rank prints what ended it, as Python does
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


# --- places ---

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWNET = 0x20000, 0x40000000


def small_shm() -> None:
    """A /dev/shm of 64 KiB, seen by this process alone; its ring is in the old one."""
    if _LIBC.unshare(_NEWNS) or _LIBC.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None):
        raise OSError(ctypes.get_errno(), "unshare")
    if _LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
        raise OSError(ctypes.get_errno(), "mount")


def enter_cgroup(folder: Path) -> None:
    """A memory cgroup of 1 GiB more than what is mapped now."""
    group = Path("/sys/fs/cgroup/memory") / f"evener-{folder.name}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(400 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def enter_network(rank: int, folder: Path) -> None:
    """A namespace with one card; the parent puts the card in."""
    if _LIBC.unshare(_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    (folder / f"net.{rank}").write_text(str(os.getpid()))
    end = time.monotonic() + 20
    while not (folder / f"up.{rank}").exists():
        if time.monotonic() > end:
            raise TimeoutError("no card came")
        time.sleep(0.02)


class Network:
    """The other side of `enter_network`: a namespace with a bridge, a card for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = subprocess.Popen(["unshare", "-n", "sleep", "300"])
        time.sleep(0.3)
        self._run("ip link add b0 type bridge && ip link set b0 up")

    def _run(self, command: str, pid: int = 0) -> None:
        inner = ["nsenter", "-t", str(pid or self.hub.pid), "-n", "sh", "-c", command]
        subprocess.run(inner, check=True)

    def join(self) -> None:
        """Put a card into each rank's namespace."""
        for rank in range(RANKS):
            path = self.folder / f"net.{rank}"
            while not path.exists() or not path.read_text():
                time.sleep(0.02)
            pid = int(path.read_text())
            self._run(
                f"ip link add h{rank} type veth peer name e0 netns {pid} && "
                f"ip link set h{rank} master b0 && ip link set h{rank} up"
            )
            self._run(
                f"ip link set lo up; ip addr add 10.77.0.{rank + 1}/24 dev e0; ip link set e0 up",
                pid,
            )
        for rank in range(RANKS):
            (self.folder / f"up.{rank}").write_text("up")

    def cut(self, kind: str, who: int) -> None:
        """Break the card of one rank: no carrier, or nothing that it sends arrives."""
        if kind == "link":
            self._run(f"ip link set h{who} down")
            return
        pid = int((self.folder / f"net.{who}").read_text())
        for other in range(RANKS):
            if other != who:  # an address that no card has: the bridge sends it nowhere
                self._run(
                    f"ip neigh replace 10.77.0.{other + 1} lladdr 02:00:00:00:00:99 dev e0", pid
                )

    def close(self) -> None:
        self.hub.kill()
        self.hub.wait()


# --- one run ---


def dump(folder: Path) -> None:
    """Have each rank that can write its flight recorder's dump, as torch lets one ask from outside:
    not the dead, and not the stopped."""
    for pipe in folder.glob("dump.*.pipe"):
        with contextlib.suppress(OSError):  # nobody reads a dead rank's
            asked = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(asked, b"1")
            os.close(asked)
    time.sleep(4.0)


def read_dumps(folder: Path) -> dict[str, Any]:
    """Whose dumps there are, and what two programs say of them."""
    from evener.tools.why.bundle import Verdict

    ranks = sorted(int(path.name.removeprefix("rank_")) for path in folder.iterdir())
    if not ranks:
        return {"dumps": ranks}
    words = ["-m", "torch.distributed.flight_recorder.fr_trace", "--allow-incomplete-ranks"]
    done = subprocess.run(
        [sys.executable, *words, "--prefix", "rank_", str(folder)], capture_output=True, text=True
    )
    first = Verdict(folder).first
    return {
        "dumps": ranks, "torchfrtrace": (done.stdout + done.stderr)[:2000],
        "analyze": first.title if first else "", "analyze_id": first.id if first else "",
    }  # fmt: skip


def run(program: str, kind: str, who: int) -> dict[str, Any]:
    """One job with one fault: what was said, and when; and over NCCL, what other readers say."""
    from evener.tools.why import Watch
    from evener.tools.why.bundle import Verdict
    from evener.tools.why.ras import ask

    nccl = program in NCCL_PROGRAMS
    folder = Path(tempfile.mkdtemp(prefix="evener-faults-"))
    lines: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    said: list[tuple[float, str]] = []
    port = free_port()
    network = Network(folder) if kind in ("link", "one-way") else None
    (folder / "dumps").mkdir()
    pids: dict[int, int] = {}
    readers = []
    for rank in range(RANKS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            if nccl:  # CUDA does not live through a fork
                given = [str(x) for x in (rank, program, kind, who, folder, port, write)]
                os.set_inheritable(write, True)
                os.execv(sys.executable, [sys.executable, __file__, "--rank", *given])
            be_rank(rank, program, kind, who, folder, port, write)
        os.close(write)
        pids[pid] = rank
        readers.append((rank, read))
    for rank, read in readers:
        threading.Thread(target=_follow, args=(read, lines[rank]), daemon=True).start()
    if network:
        network.join()
    watch = Watch(
        str(folder / "rings"), RANKS, FLOOR, lambda text: said.append((time.time(), text)), folder,
        lambda: {f"rank{r}.stderr": "\n".join(ls[-200:]) + "\n" for r, ls in lines.items()},
    )  # fmt: skip
    watch.start([], [], folder, {})
    begun = time.time()
    limit = QUIET if kind == "quiet" else LIMIT
    first: list[dict[str, Any]] = []
    try:
        while time.time() - begun < limit and not said and not first:
            time.sleep(0.05)
            if network and (folder / "cut").exists():
                (folder / "cut").unlink()
                network.cut(kind, who)
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in pids:
                    code = os.waitstatus_to_exitcode(status)
                    first = [{"rank": pids[pid], "status": code, "pid": pid}]
        if first and not said:
            time.sleep(0.3)
            watch.failed({}, folder, first)
        kept = sorted(folder.glob("evener-why-*.zip"))
        found = Verdict(kept[0]).first if kept else None
        asked = {"ras": ask(("127.0.0.1", port + 1))} if nccl else {}
        if nccl:
            dump(folder)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        watch.close()
        if network:
            network.close()
        with contextlib.suppress(OSError):
            (Path("/sys/fs/cgroup/memory") / f"evener-{folder.name}").rmdir()
    try:
        mark = float((folder / "mark").read_text())
    except (OSError, ValueError):
        mark = begun
    steps = "\n".join(lines[who][-6:])
    if nccl:
        asked |= read_dumps(folder / "dumps")
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "program": program, "kind": kind, "who": who, "id": found.id if found else "",
        "title": found.title if found else "",
        "seconds": round(said[0][0] - mark, 2) if said else None,
        "text": said[0][1] if said else "", "tail": steps if not said else "", **asked,
    }  # fmt: skip


def _follow(fd: int, lines: list[str]) -> None:
    with os.fdopen(fd, errors="replace") as stream:
        for line in stream:
            lines.append(line.rstrip("\n"))


def blamed(one: dict[str, Any], reader: str) -> set[int]:
    """The ranks that the first line of a reader's text blames that blames any."""
    for line in one.get(reader, "").splitlines():
        if found := re.findall(BLAMED[reader], line):
            return {int(rank) for rank in re.findall(r"\d+", " ".join(found))}
    return set()


def right(one: dict[str, Any]) -> bool:
    """Whether the first verdict names the rank and the kind."""
    if one["kind"] == "quiet":
        return not one["text"]
    return one["id"] in KINDS[one["kind"]] and one["who"] in blamed(one, "title")


def main() -> int:
    """Run all, print a table, write JSON."""
    if sys.argv[1:2] == ["--rank"]:
        rank, program, kind, who, folder, port, pipe = sys.argv[2:]
        be_rank(int(rank), program, kind, int(who), Path(folder), int(port), int(pipe))
    parser = harness.arguments(__doc__, json="why_faults.json")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kinds", default=",".join([*KINDS, "quiet"]))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--seconds", type=float, default=1e9, help="Stop after this long.")
    parser.add_argument("--nccl", action="store_true", help="on three GPUs")
    parser.add_argument("--jobs", type=int, default=1, help="This many side by side.")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    if args.nccl:
        args.programs = ",".join(NCCL_PROGRAMS)
        args.kinds = ",".join(kind for kind in args.kinds.split(",") if kind in NCCL_KINDS)
    import torch
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.utils.data

    import evener.horovod.torch
    import evener.tools.why.bundle  # noqa: F401 - before the first fork

    torch.set_num_threads(1)
    end = time.monotonic() + args.seconds
    done: list[dict[str, Any]] = []
    cells = [(k, p) for k in args.kinds.split(",") for p in args.programs.split(",")] * args.runs
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        for one in pool.map(run_before, *zip(*((end, *cell) for cell in cells), strict=True)):
            if one is None:
                continue
            one["right"] = right(one)
            if one["right"]:
                one["text"] = one["text"].partition("\n")[0]
            done.append(one)
            print(
                f"{len(done)} {one['kind']:9} {one['program']:9} rank {one['who']} "
                f"{'right' if one['right'] else 'WRONG'} {one['seconds']} {one['id']}: "
                f"{one['title']}",
                flush=True,
            )
            if args.verbose and not one["right"]:
                print(one["text"], one["tail"], sep="\n")
    tables = table(done) + ("\n\n" + readers(done) if args.nccl else "")
    record = harness.record(args, ranks=RANKS, floor_s=FLOOR, runs=done, table=tables.splitlines())
    harness.write(args.json, json.loads(json.dumps(record).replace(f"{Path.cwd()}/", "")))
    print(tables)
    return 0


def run_before(end: float, kind: str, program: str) -> dict[str, Any] | None:
    """A run whose rank is drawn; none after `end`."""
    return run(program, kind, random.randrange(RANKS)) if time.monotonic() < end else None


def table(done: list[dict[str, Any]]) -> str:
    """Right of all, and the median of seconds, by kind and program."""
    programs = list(dict.fromkeys(one["program"] for one in done))
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in done):
        cells = []
        for program in programs:
            ones = [o for o in done if (o["kind"], o["program"]) == (kind, program)]
            times = sorted(o["seconds"] for o in ones if o["right"] and o["seconds"] is not None)
            middle = f", {times[len(times) // 2]:.1f} s" if times else ""
            cells.append(f"{sum(o['right'] for o in ones)}/{len(ones)}{middle}" if ones else "")
        rows.append([kind, *cells])
    return harness.show(["fault", *programs], rows)


def readers(done: list[dict[str, Any]]) -> str:
    """In how many runs each other reader names the rank and, of dumps alone, the kind; where
    nothing is wrong, in how many it names any rank."""
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in done):
        ones = [one for one in done if one["kind"] == kind]
        ranks = [
            sum(one["who"] in found if kind in KINDS else bool(found) for one in ones
                for found in [blamed(one, reader)])
            for reader in ("ras", "torchfrtrace", "analyze")
        ]  # fmt: skip
        kinds = [
            sum(
                MISMATCHES.get(kind, "no such word") in one.get("torchfrtrace", "") for one in ones
            ),
            sum(one.get("analyze_id") in KINDS.get(kind, ()) for one in ones),
        ]
        rows.append([kind, len(ones), ranks[0], ranks[1], kinds[0], ranks[2], kinds[1]])
    heads = ("ras: rank", "torchfrtrace: rank", "kind", "analyze of the dumps: rank", "kind")
    return harness.show(["fault", "runs", *heads], rows)


if __name__ == "__main__":
    sys.exit(main())
