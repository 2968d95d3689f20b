"""The benchmark itself on two Gloo processes: figures, failures, launchers, plain output."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.errors import UsageError
from evener.tools import lab
from evener.tools.bench.train import (
    clusters,
    columns,
    command,
    drive,
    markdown,
    plan,
    progress,
    results,
)
from evener.tools.bench.train import lab as train_lab
from evener.tools.bench.train.clusters import Given, Loopback
from evener.tools.bench.train.columns import Column
from evener.tools.bench.train.plan import Options
from evener.tools.bench.train.results import Results, RunResult

NO_LAB = lab.unavailable()
QUICK = (
    "--device",
    "cpu",
    "--model",
    "mlp-tiny",
    "--steps",
    "4",
    "--warmup",
    "2",
    "--repeats",
    "1",
)


def evener(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evener", "bench", "train", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **env},
    )


def test_two_processes_measure_prove_and_write(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = evener(
        *QUICK, "--processes", "2", "--columns", "ddp,exact", "--json", "-", "--html", str(page),
        "--trace", str(tmp_path / "traces"),
        NCCL_SECRET_KEY="hidden", NCCL_ALGO="Ring", FORCE_COLOR="",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(shown.stdout))
    assert [(run.row, run.column) for run in taken.runs] == [
        ("one", "plain"),
        ("node", "ddp"),
        ("node", "exact"),
    ]
    assert taken.complete
    for run in taken.runs:
        assert run.rate is not None and run.rate > 0
        assert run.equal
        # every rank trains in every row, alone or together
        assert len(run.ranks) == 2
        assert all(len(rank["step_ms"]) == 4 for rank in run.ranks)
    ddp, exact = taken.runs[1:]
    assert ddp.ranks[0]["checksum"] == ddp.ranks[1]["checksum"]
    assert exact.distance is not None and exact.distance < 1e-5
    assert exact.later is not None and exact.later < 1e-5
    policy = {"OMP_WAIT_POLICY": "passive"}  # of all tests: tests/conftest.py
    assert taken.environment == {"EVENER_NET": "off", "NCCL_ALGO": "Ring", **policy}
    assert "hidden" not in shown.stdout
    assert page.read_text().startswith("<!doctype html>")
    traces = sorted((tmp_path / "traces").iterdir())
    assert len(traces) == 3
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events), trace
    # piped: lines, no bars, no escape sequences
    assert "\x1b" not in shown.stderr and "\r" not in shown.stderr
    assert "[2/3] one node: 2 processes, DDP, repeat 1/1: " in shown.stderr


def test_it_takes_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "evener"]
    command = ["bench", "train", *QUICK, "--columns", "ddp", "--rows", "node", "--json", str(path)]
    shown = subprocess.run(
        [*torchrun, *command], capture_output=True, text=True, timeout=150, env=dict(os.environ)
    )
    assert shown.returncode == 0, shown.stderr
    taken = results.Results.from_json(json.loads(path.read_text()))
    assert taken.complete
    assert taken.cluster == {"kind": "ranks", "nodes": 1, "slots": 2}
    assert shown.stdout.count("images/s per process") == 1, "only rank 0 shows the table"


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (package openmpi-bin)")
def test_plain_mpirun_needs_no_address() -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
    command = ["-m", "evener", "bench", "train", *QUICK, "--columns", "ddp", "--rows", "node"]
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    shown = subprocess.run(
        [*mpirun, *command, "--json", "-"], capture_output=True, text=True, timeout=150, env=env
    )
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(shown.stdout))
    assert taken.complete
    assert taken.cluster == {"kind": "ranks", "nodes": 1, "slots": 2}


@pytest.mark.lab
@pytest.mark.skipif(NO_LAB is not None, reason=f"no lab here: {NO_LAB}")
def test_a_lab_makes_the_network_cost_what_it_carries(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    shown = evener(
        *QUICK, "--model", "mlp-wide", "--lab", "2x1@1gbit", "--rows", "all",
        "--columns", "ddp,fp16,horovod-topk", "--json", str(path),
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(path.read_text()))
    assert taken.complete and taken.cluster["kind"] == "lab"
    ddp, fp16, topk = taken.runs
    size = taken.settings["gradient_bytes"]
    # Between two nodes an all-reduce sends what it reduces once; headers come on top.
    assert ddp.sent_bytes_per_step is not None and fp16.sent_bytes_per_step is not None
    assert size <= ddp.sent_bytes_per_step < 1.2 * size
    assert size / 2 <= fp16.sent_bytes_per_step < 1.2 * size / 2
    # What top-k has not sent yet is counted, through Horovod's optimizer too.
    assert topk.sent_bytes_per_step is not None and topk.sent_bytes_per_step < 0.1 * size
    assert topk.later is not None and topk.later < 0.1


def test_where_no_lab_can_be_built_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_lab, "unavailable", lambda: "the kernel says no")
    cluster, why = train_lab.make("2x2@25gbit")
    assert isinstance(cluster, Loopback)
    assert (cluster.nodes, cluster.slots) == (2, 2)
    assert why == "the kernel says no"
    todo = plan.make(Options(), nodes=2, slots=2, rows=["all"], columns=columns.parse("ddp"))
    taken = results.begin(todo, command="x", cluster=cluster.describe())
    assert "No simulated cluster: the kernel says no" in markdown.render(taken)


# Columns that go wrong, put in place in the agents as well as here.
BROKEN = {
    "nosync": Column("nosync", "no sync", "each rank for itself", "none"),
    "crash": Column("crash", "crash", "rank 1 dies", "crash"),
    "hang": Column("hang", "hang", "rank 1 waits for ever", "hang"),
    "raise": Column("raise", "raise", "rank 1 raises", "raise"),
}
PATCH = """
import os, signal, sys, time
from evener.tools.bench.train import agent, columns, wrap
from evener.tools.bench.train.columns import Column
def go_wrong(how):
    def apply(model, optimizer, device, column, options):
        wrapped = wrap.WRAPPERS["ddp"](model, optimizer, device, column, options)
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            how()
        return wrapped
    return apply
def complain():
    raise RuntimeError("rank 1 has had enough")
wrap.WRAPPERS["crash"] = go_wrong(lambda: os.kill(os.getpid(), signal.SIGKILL))
wrap.WRAPPERS["hang"] = go_wrong(lambda: time.sleep(600))
wrap.WRAPPERS["raise"] = go_wrong(complain)
columns.COLUMNS["nosync"] = Column("nosync", "no sync", "", "none")
for name in ("crash", "hang", "raise"):
    columns.COLUMNS[name] = Column(name, name, "", name)
agent.main()
"""


class _Patched(Loopback):
    def run(self, argv: Sequence[str], on_line: clusters.OnLine, timeout: float) -> int:
        return super().run([sys.executable, "-c", PATCH, argv[-1]], on_line, timeout)


def broken(
    monkeypatch: pytest.MonkeyPatch, names: str, timeout: float
) -> tuple[dict[str, RunResult], list[str]]:
    """Train the columns `names` on two processes: runs by column, and the lines that were said."""
    for name, column in BROKEN.items():
        monkeypatch.setitem(columns.COLUMNS, name, column)
    options = Options(
        model="mlp-tiny", batch_size=4, device="cpu", steps=3, warmup=1, repeats=1,
        timeout=timeout, threads=1,
    )  # fmt: skip
    todo = plan.make(options, nodes=1, slots=2, rows=["node"], columns=columns.parse(names))
    cluster = _Patched(1, 2)
    taken = results.begin(todo, command="test", cluster=cluster.describe())
    said: list[str] = []
    drive.measure(todo, cluster, taken, progress.Lines(todo, "process", said.append))
    assert [run.column for run in taken.runs] == names.split(",")
    assert not taken.complete
    return {run.column: run for run in taken.runs}, said


def test_columns_that_go_wrong_are_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, said = broken(monkeypatch, "ddp,nosync,crash,raise,ddp-ring", timeout=100)
    assert runs["ddp"].ok and runs["ddp-ring"].ok
    assert "does not synchronise" in runs["nosync"].reason
    assert runs["crash"].reason == "ended with signal SIGKILL in phase 'join'"
    assert "last words" in runs["crash"].tail
    assert runs["raise"].reason == "RuntimeError: rank 1 has had enough"
    assert any("complain" in line for line in runs["raise"].tail)
    assert sum(": failed: " in line for line in said) == 3


def test_a_column_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, said = broken(monkeypatch, "hang", timeout=3)
    assert runs["hang"].reason.startswith("not done after 3 s, in phase ")
    assert sum(": failed: " in line for line in said) == 1


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'nosuchmodel'") as refused:
        command.train.main([*QUICK, "--model", "nosuchmodel"], standalone_mode=False)
    assert "--list-models" in refused.value.fix
    with pytest.raises(UsageError, match="is a folder"):
        command.train.main([*QUICK, "--json", str(tmp_path)], standalone_mode=False)


def test_it_draws_again_from_a_file(tmp_path: Path) -> None:
    todo = plan.make(
        Options(repeats=1, device="cpu"),
        nodes=1, slots=2, rows=["node"], columns=columns.parse("ddp"),
    )  # fmt: skip
    taken = results.begin(todo, command="x", cluster={"kind": "loopback", "nodes": 1, "slots": 2})
    rank = {
        "status": "ok", "group": 0, "steps": 1, "samples": 10, "elapsed_s": 1.0, "device": "cpu",
        "checksum": "a", "gradient_bytes": 4,
    }  # fmt: skip
    results.add(taken, todo, todo.runs[0], [rank, rank], 1.0)
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    path.write_text(results.dump(taken))
    shown = evener("--from", str(path), "--markdown", "--html", str(page))
    assert shown.returncode == 0, shown.stderr
    assert "| one node: 2 GPUs | **10.0** |" in shown.stdout
    assert page.exists()
    again = subprocess.run(
        [sys.executable, "-m", "evener.tools.bench.train.markdown", str(path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert again.stdout == shown.stdout


def test_a_time_limit_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    columns = "ddp,exact,fp16,int8,topk,ddp-fp16"
    argv = [sys.executable, "-m", "evener", "bench", "train", *QUICK, "--processes", "2"]
    argv += ["--columns", columns, "--json", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("[1/"):
                break
        # The first is on disk before the second ends; and a polite end shows it.
        kept = Results.from_json(json.loads(path.read_text()))
        assert len(kept.runs) == 1 and kept.runs[0].rate
        run.terminate()
        shown, said = run.communicate(timeout=60)
    assert "interrupted" in said and "images/s" in shown
    taken = Results.from_json(json.loads(path.read_text()))
    assert 1 <= len(taken.runs) < 7 and "It was interrupted." in taken.notes


def test_dry_run_lists_the_cells_and_starts_nothing() -> None:
    shown = evener(*QUICK, "--processes", "2", "--columns", "ddp,topk", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "3  one node: 2 processes, Evener top-k, repeat 1/1" in shown.stdout
    assert "3 runs on" in shown.stdout


def test_unknown_columns_and_rows_are_named() -> None:
    shown = evener("--columns", "ddp,fastest", "--device", "cpu")
    assert shown.returncode == 2
    assert "'fastest'" in shown.stderr and "topk" in shown.stderr


def test_an_agent_knows_its_place() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    given = Given.detect({**env, "MASTER_ADDR": "node0", "NCCL_HOSTID": "node1"})
    assert (given.rank, given.world, given.local_rank, given.host) == (3, 4, 1, "node1")
    assert Given.detect({**given.variables(), "NCCL_HOSTID": "node1"}) == given
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        Given.detect(env)


def test_an_agent_has_no_thread_that_a_fork_would_lose() -> None:
    code = (
        "import os, sys\n"
        "os.environ['OPENBLAS_NUM_THREADS'] = '1'\n"
        "from evener.tools.bench.train import agent, columns, plan\n"
        "wanted = columns.parse('ddp,exact,topk,fsdp-exact')\n"
        "todo = plan.make(plan.Options(), nodes=1, slots=2, rows=['node'], columns=wanted)\n"
        "agent.import_early(todo)\n"
        "print(len(os.listdir('/proc/self/task')), 'torchvision' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert shown.stdout.split() == ["1", "True"]


def test_the_built_in_models_have_the_size_that_is_listed() -> None:
    import torch

    from evener.tools.bench.train import models

    for name, model in models.BUILT_IN.items():
        built = models.build(name)
        assert sum(p.numel() for p in built.parameters()) == model.parameters
        answer: Any = built(torch.zeros(2, 3, model.size, model.size))
        assert answer.shape == (2, models.classes(name))
