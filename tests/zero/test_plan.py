"""The plan is arithmetic: never above a budget, never worse with a larger one."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from evener import zero
from evener.base import budget as budgets
from evener.base.budget import Budget
from evener.errors import UsageError
from evener.tools.plan.memory import plan_memory
from evener.zero import machines, shapes
from evener.zero.form import Form, names
from evener.zero.owners import Matrix
from evener.zero.planner import Machine, Part, Work, _need, plan
from evener.zero.profile import Profile
from evener.zero.store import Formats, build
from evener.zero.units import cut
from tests.zero.models import Model

MACHINE = Machine(4e14, 5e10, 5e10, 4e9, 5e10, 1e11, 600 << 20)


def of_matrices(part: Part, sizes: list[float]) -> Part:
    """With matrices of these shares of the chunk, one after the other."""
    made, offset = [], 0
    for size in sizes:
        numel = min(int(part.numel * size), part.numel - offset)
        if numel:
            made.append(Matrix(offset, numel, 1e3 * numel))
        offset += numel
    return dataclasses.replace(part, matrices=tuple(made))


parts = st.lists(
    st.builds(
        of_matrices,
        st.builds(
            Part,
            name=st.uuids().map(str),
            numel=st.integers(1, 1 << 22).map(lambda n: n * 256),
            align=st.sampled_from([8, 256]),
            trainable=st.sampled_from([True, True, True, False]),
            stays=st.sampled_from([False, False, False, True]),
            moments=st.sampled_from([1, 2]),
            halves=st.just((20, 8)),
        ),
        st.sampled_from([[], [], [1.0], [0.25] * 4, [0.1, 0.6, 0.3]]),
    ),
    min_size=1,
    max_size=20,
)
works = st.builds(
    Work,
    tokens=st.integers(1, 1 << 16),
    activations=st.integers(0, 8 << 30),
    accumulation=st.integers(1, 4),
    checkpointing=st.booleans(),
    ranks=st.sampled_from([1, 1, 2, 4]),
    replicas=st.sampled_from([1, 1, 2, 3]),
    crossing=st.sampled_from([Form(name) for name in names()]),
    depth=st.integers(1, 4),
)
formats = st.builds(
    Formats,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
sizes = st.integers(0, 200 << 30)


@given(parts, works, formats, sizes, sizes)
def test_never_above_the_budget(
    parts: list[Part], work: Work, formats: Formats, gpu: int, host: int
) -> None:
    made = plan(parts, formats, work, MACHINE, Budget(gpu, host))
    need = _need(parts, frozenset(), formats, work, MACHINE)
    assert {p.name for p in made.places} == {p.name for p in parts}
    moved = [p for p, part in zip(made.places, parts, strict=True) if not part.stays]
    here = [p for p in moved if p.where == "gpu"]
    # Beside what is here: of several ranks each gathers the weights of what stays, once, and an
    # update takes room for a slice of the largest.
    beside = _need(parts, {p.name for p in here}, formats, work, MACHINE)
    assert made.gpu_bytes == beside + sum(p.bytes for p in here)
    assert beside >= need
    assert made.host_bytes == sum(p.bytes for p in moved if p.where == "host")
    assert made.fits == (made.gpu_bytes <= gpu and made.host_bytes <= host)
    assert bool(made.problem) != made.fits
    if need <= gpu:
        assert made.gpu_bytes <= gpu
    assert made.step_seconds > 0 and made.bound in {"GPU", "PCIe", "host memory", "network"}


@given(parts, works, formats, sizes, sizes, sizes)
def test_more_memory_is_never_worse(
    parts: list[Part], work: Work, formats: Formats, gpu: int, more: int, host: int
) -> None:
    # An accelerator that updates slower than the host is none.
    small = plan(parts, formats, work, MACHINE, Budget(gpu, host))
    large = plan(parts, formats, work, MACHINE, Budget(gpu + more, host))
    assert small.resident <= large.resident
    assert large.host_bytes <= small.host_bytes
    assert large.fits or not small.fits


@given(works, st.integers(1, 24))
def test_the_time_is_at_least_each_of_its_parts(work: Work, blocks: int) -> None:
    made = plan(
        [Part(f"block {i}", 64 << 20) for i in range(blocks)],
        Formats(),
        work,
        MACHINE,
        Budget(0, 1 << 50),
    )
    t = made.times
    assert made.step_seconds >= t["forward"] + t["backward"]
    assert made.step_seconds >= t["backward"] + t["host optimizer"]
    assert made.step_seconds >= t["gradients out"] + t["weights in"]


def test_the_host_arena_is_what_the_plan_said() -> None:
    """Large chunks: the small ones of tests are not in the arena."""
    model = Model(width=512, blocks=2)
    units = cut(model, small=100_000)
    config = zero.Config(dtype=torch.bfloat16, device="cpu", small=100_000)
    made = zero.plan(model, config=config, machine=MACHINE, budget={"gpu": "8GB", "host": "4GB"})
    assert made.fits and not {p.where for p in made.places} - {"gpu", "host"}
    device = zero.api.devices.SimulatedDevice()
    store = build(model, units, Formats(), device, resident=set(), pin=False)
    nothing = plan(shapes.parts_of(units), Formats(), Work(1, 0), MACHINE, Budget(0, 1 << 40))
    assert store.host.usage() == (nothing.host_bytes, nothing.host_bytes, nothing.host_bytes)


def test_a_configuration_is_planned_without_memory() -> None:
    shape = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
    }
    assert sum(u.numel for u in cut(shapes.llama(shape))) == pytest.approx(6.74e9, rel=0.01)
    config = zero.Config(dtype=torch.bfloat16, device="cpu", checkpointing=True)
    made = zero.plan(shape, config=config, machine=MACHINE, budget={"gpu": "24GB", "host": "110GB"})
    assert made.fits and made.bound == "host memory" and 0 < len(made.resident) < 34
    tight = zero.plan(shape, config=config, machine=MACHINE, budget={"gpu": "24GB", "host": "20GB"})
    assert not tight.fits and "the budget is 20.00 GB" in tight.problem
    with pytest.raises(UsageError, match="lacks 'vocab_size'"):
        zero.plan({"hidden_size": 8, "num_hidden_layers": 1}, config=config, machine=MACHINE)


def test_units_of_a_model() -> None:
    names = [u.name for u in cut(Model(blocks=3))]
    assert names == ["(stays)", "embed", "layers.0", "layers.1", "layers.2", "norm", "head"]
    tied = {u.name: u for u in cut(Model(blocks=3, tied=True))}
    assert "head" not in tied and "embed" not in tied
    assert [p.name for p in tied["(stays)"].groups[0].pieces] == ["embed.weight"]
    model = Model()
    model.layers[1].up.weight.requires_grad = False
    groups = {g.name for u in cut(model) for g in u.groups}
    assert {"layers.1/0", "layers.1/frozen"} <= groups


def test_a_host_without_cgroups_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 50000 kB\n")
    for _ in range(2):
        assert budgets.host_free(tmp_path / "cgroup", tmp_path) == 50000 * 1024
    assert [record.getMessage()[:29] for record in caplog.records] == [
        "no memory cgroup is mounted a"
    ]


def test_budgets_read_the_cgroup(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    inner = root / "a/b"
    inner.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 50000 kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n")
    assert budgets.host_free(root, proc) == 50000 * 1024
    for folder, limit, used, cache in ((inner, "max", 5, 1), (root / "a", "9000000", 4000000, 7)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 3\ninactive_file {cache}\n")
    assert budgets.host_free(root, proc) == 5000007
    left = budgets.resolve({"gpu": "24GB", "host": 7, "spare": "4GB"})
    assert left == Budget(20 * 10**9, 7, spare=4 * 10**9)
    assert budgets.resolve({"host": 7, "spare": 1}, gpu_free=5) == Budget(4, 7, spare=1)
    with pytest.raises(UsageError, match="spare='9GB' is more than the GPU's 8"):
        budgets.resolve({"gpu": "8GB", "spare": "9GB"})
    assert budgets.resolve({"gpu": "24GB", "host": 7}) == Budget(24 * 10**9, 7)
    with pytest.raises(UsageError, match="gpu='lots' is not a size"):
        budgets.resolve({"gpu": "lots"})
    with pytest.raises(UsageError, match="gpu='24' has no unit"):
        budgets.resolve({"gpu": "24"})
    with pytest.raises(UsageError, match="no entry disk"):
        budgets.resolve({"disk": 1})


def test_the_command(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(shape))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(plan_memory, [str(tmp_path), *arguments])

    shown = run("--gpu", "4GB", "--host", "4GB", "--json")
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)
    machine = (record.get("probe") or record["assumed"])["machine"]
    assert record["plan"]["fits"] and machine["host_adam"] > 0
    assert "4.00 GB" in run("--gpu", "4GB", "--host", "4GB").stdout, "what was given is shown"
    shown = run("--gpu", "1MB", "--host", "4GB")
    assert shown.exit_code == 1 and "does not fit" in shown.stdout
    shown = run("--batch", "many")
    assert isinstance(shown.exception, UsageError)


def test_a_machine_that_is_not_here(tmp_path: Path) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(plan_memory, list(arguments))

    shown = run("7b", "--on", "a100-40gb,pcie4,ddr4-8ch", "--json")
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)
    assert sum(place["numel"] for place in record["plan"]["places"]) == pytest.approx(
        6.738e9, rel=1e-3
    )
    assert record["plan"]["budget"]["gpu"] == 40335 << 20
    assert record["plan"]["gpu_bytes"] <= record["plan"]["budget"]["gpu"]
    assert record["assumed"]["machine"]["h2d"] == pytest.approx(27.1e9, rel=0.01)
    # 14 bytes per parameter, wherever they are.
    whole = record["plan"]["host_bytes"] + record["plan"]["gpu_bytes"]
    assert whole > 14 * 6.7e9
    slow = json.loads(run("7b", "--on", "a100-40gb,pcie3,ddr4-2ch", "--json").stdout)
    assert slow["plan"]["step_seconds"] > record["plan"]["step_seconds"]
    shown = run("70b", "--on", "h200", "--host", "200GB")
    assert shown.exit_code == 1 and "does not fit" in shown.stdout
    same = "gpu=40335MiB,tflops=312,hbm=1555,pcie=31.5,dram=204.8"
    assert (
        json.loads(run("7b", "--on", same, "--json").stdout)["plan"]["step_seconds"]
        == (record["plan"]["step_seconds"])
    )
    for wrong, word in (("a100-40g", "a100-40gb"), ("pcie4", "names no GPU"), ("h200,x=3", "x is"),
                        ("h200,dram=0", "dram=0 is not")):  # fmt: skip
        shown = run("7b", "--on", wrong)
        assert isinstance(shown.exception, UsageError)
        assert word in f"{shown.exception} {shown.exception.fix}"
    shown = run("nowhere.json")
    assert isinstance(shown.exception, UsageError) and "7b" in shown.exception.fix
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    shown = run(str(tmp_path))
    assert isinstance(shown.exception, UsageError) and "nonesuch" in str(shown.exception)


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("--host 30GB --on rtx4090", {"--host", "--gpu"}),
        ("--host 64GB --on rtx4090", {"--host", "--gpu", "--ssd", "--ranks", "--moments"}),
        ("--host 44GB --on rtx4090", {"--host", "--gpu", "--ssd", "--moments"}),
        ("--host 28GB --on rtx4090", {"--host", "--gpu", "--no-master"}),
        ("--host 4GB --gpu 2GB --on a10", {"--gpu", "--host"}),
        ("--batch 64x4096 --checkpointing none --on a10 --host 200GB", {"--batch", "--gpu"}),
    ],
)
def test_what_does_not_fit_is_told_what_would_and_that_does(
    line: str, kinds: set[str], tmp_path: Path
) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(plan_memory, ["7b", *line.split(), *arguments])

    shown = run()
    assert shown.exit_code == 1 and shown.stdout.count("does not fit") == 1
    ways = re.findall(r"^  fits with .* \((--.*)\)", shown.stdout, re.MULTILINE)
    assert kinds <= {option for way in ways for option in re.findall(r"--[\w-]+", way)}, (
        shown.stdout
    )
    for way in ways:
        tried = run(*way.replace("/folder", str(tmp_path)).split())
        host = float(line.split("--host ")[1].split("GB")[0])
        if ranks := re.search(r"--ranks (\d+)", way):  # they share the host's memory
            tried = run(*way.split(), "--host", f"{host / int(ranks[1])}GB")
        assert tried.exit_code == 0, f"{way}: {tried.stdout[:300]}"


def test_no_card_has_more_memory_than_nvidia_smi_shows() -> None:
    shown = {"a100-40gb": 40960, "a100-80gb": 81920, "h100-80gb": 81559, "h100-pcie": 81559,
             "h200": 143771, "a10": 23028, "l4": 23034, "l40s": 46068, "rtx3090": 24576,
             "rtx4090": 24564}  # fmt: skip
    for name, gpu in machines.GPUS.items():
        assert 0.97 * shown[name] < gpu.memory / (1 << 20) < shown[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_was_assumed() -> None:
    shown = CliRunner().invoke(plan_memory, ["7b"])
    assert shown.exit_code == 0
    assert "no GPU is here: a100-40gb,pcie4,ddr4-8ch is assumed" in shown.stdout


def test_operations_are_launched_more_slowly_beside_the_optimizer() -> None:
    """A forward pass of many small operations: where the optimizer works on the host it takes what
    the probe found; where all is on the accelerator it does not."""
    small = ((1000, 1000, 5000),)
    profile = Profile((), (), frozenset(), forward=small, backward=small)
    parts = [Part(f"layers.{n}/0", 1 << 24, unit=n) for n in range(4)]
    slow = dataclasses.replace(MACHINE, launch=1e-5, launch_beside=4e-5, bandwidth=3e12)
    work = Work(tokens=8, activations=0, profile=profile)
    for gpu, forward in ((1 << 30, 0.5), (8 << 30, 0.125)):
        made = plan(parts, Formats(), work, slow, Budget(gpu, 8 << 30))
        assert made.fits
        assert made.times["forward beside the optimizer"] == pytest.approx(forward)
        assert made.times["forward"] == pytest.approx(0.125)
        assert made.times["backward"] == pytest.approx(0.05)
        assert made.step_seconds == pytest.approx(0.05 + forward, rel=0.02)


def test_it_says_what_several_nodes_bring() -> None:
    given = ["7b", "--on", "h200", "--gpu", "24GB", "--batch", "8x1024", "--accumulation", "8"]
    given += ["--nodes", "2", "--crossing", "int8"]
    record = json.loads(CliRunner().invoke(plan_memory, [*given, "--json"]).stdout)
    alone, *ways = record["ways"]
    assert alone["nodes"] == 1 and alone["crossing_bytes"] == 0
    by_form = {way["crossing"]: way for way in ways}
    assert list(by_form) == ["exact", "fp16", "bf16", "int8", "int4"]
    assert record["plan"]["step_seconds"] == by_form["int8"]["step_seconds"]
    speeds = [by_form[form]["tokens_per_second"] for form in ("exact", "bf16", "int8", "int4")]
    assert speeds == sorted(speeds) and speeds[-1] < 2 * alone["tokens_per_second"]
    shown = CliRunner().invoke(plan_memory, [*given, "--between", "100gbit"])
    assert "x one node" in shown.stdout and "77% of it is reached" in shown.stdout
    for wrong in (["--between", "fast"], ["--crossing", "topk"]):
        shown = CliRunner().invoke(plan_memory, [*given, *wrong])
        assert isinstance(shown.exception, UsageError)


def test_plans_go_to_json() -> None:
    made = plan([Part("a", 8)], Formats(), Work(1, 0), MACHINE, Budget(1 << 40, 0))
    assert json.loads(json.dumps(made.to_dict()))["places"][0]["where"] == "gpu"
    assert dataclasses.is_dataclass(made)


def test_the_plan_chooses_what_is_fastest() -> None:
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}

    def choose(gpu: str, balanced: float, **own: object) -> zero.Plan:
        settings: dict[str, object] = {"checkpointing": "auto", "loss": "chunked", **own}
        config = zero.config.read({"bf16": {"enabled": True}, "evener": settings})
        machine = dataclasses.replace(MACHINE, balanced=balanced)
        return zero.plan(
            shape,
            config=config,
            machine=machine,
            budget={"gpu": gpu, "host": "200GB"},
            batch=(8, 1024),
        )

    # Room for everything: nothing is recomputed. Little room: what is saved takes chunks more.
    assert choose("200GB", 0).checkpointing == "none"
    given = {mode: choose("16GB", 0, checkpointing=mode) for mode in (True, "offload")}
    best = choose("16GB", 0)
    assert best.checkpointing != "none"
    assert best.step_seconds == min(plan.step_seconds for plan in given.values())
    need = {
        mode: choose("1GB", 0, checkpointing=mode).gpu_bytes for mode in (False, True, "offload")
    }
    assert need["offload"] < need[True] < need[False]
    between = f"{(need['offload'] + need[True]) // 2} bytes"
    assert choose(between, 0).checkpointing == "offload" and choose(between, 0).offloaded > 0
    # The streaming lane only where the probe says that it helps.
    assert choose("16GB", 2 * MACHINE.host_adam).streaming
    assert not choose("16GB", 1.01 * MACHINE.host_adam).streaming
    assert not choose("16GB", 2 * MACHINE.host_adam, balance=False).streaming
    slow, fast = choose("16GB", 0), choose("16GB", 2 * MACHINE.host_adam)
    assert fast.step_seconds < slow.step_seconds
    refused = choose("1GB", 0)
    assert not refused.fits and re.search(
        r"needs \d+\.\d+ GB of accelerator memory, the budget is 1\.00 GB", refused.problem
    )


class _Short(Model):
    """Has 64 positions, as a configuration of transformers says it."""

    main_input_name = "tokens"

    class config:  # noqa: N801 - the attribute's name
        max_position_embeddings = 64


@pytest.mark.parametrize(("tokens", "said"), [(64, False), (500, True)])
def test_a_sequence_beyond_the_positions_is_planned_short_and_said(
    tokens: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = zero.plan(
        _Short(), config={"evener": {"device": "cpu"}}, batch=(1, tokens), machine=MACHINE,
        budget={"gpu": "1GB", "host": "1GB"},
    )  # fmt: skip
    assert made.fits
    line = "the plan is of sequences of 64 tokens, not 500: _Short has no more positions"
    assert (line in caplog.text) == said
