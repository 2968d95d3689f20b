"""States on an SSD: the same bits as without, nothing written beyond the plan, and errors that say
what to do where the disk is full, fails, is silent or is not there."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from evener import zero
from evener.base.budget import Budget, place
from evener.errors import EvenerError
from evener.zero import ssd
from evener.zero.planner import Machine, Part, Work, plan
from evener.zero.store import Formats
from tests.zero.engines import assert_same, configuration, weights
from tests.zero.models import Model, Plain, batches, loss_of

LAYERS = {f"layers.{n}/0" for n in range(4)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4096 elements: a tiny model has several for each chunk."""
    monkeypatch.setattr(ssd, "BLOCK", ssd.GRAIN)


@pytest.fixture(params=["auto", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EVENER_SSD_IO", request.param)
    return str(request.param)


def start(model: torch.nn.Module, folder: Path, away: set[str] = LAYERS, **changes: Any) -> Any:
    own = {"budget": {"ssd": f"{folder}:1GB"}, **changes.pop("evener", {})}
    engine, *_ = zero.initialize(
        model=model, config=configuration(evener=own, **changes), resident=set(), away=away
    )
    engine.threads = 1
    return engine


def step(engine: zero.Engine, tokens: torch.Tensor) -> None:
    engine.backward(loss_of(engine, tokens))
    engine.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_without_an_ssd(dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    changes: dict[str, Any] = {}
    if dtype != torch.float32:
        changes["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    ends = []
    for away in (LAYERS, set()):
        engine = start(copy.deepcopy(model), tmp_path, away, **changes)
        for tokens in batches(5):
            step(engine, tokens)
        ends.append((whole(engine), engine.memory()))
        assert (engine.store.ssd is None) == (not away)
        engine.close()
    (one, used), (other, _) = ends
    assert all(torch.equal(one[name], other[name]) for name in other)
    if dtype != torch.float16:  # whose steps a loss scale may skip
        size = sum(chunk.away.layout.bytes for chunk in engine_chunks(model, tmp_path, changes))
        assert used["ssd written"] >= 5 * size  # each step once, and the first values
        assert used["ssd written"] <= 5 * size + 2 * size


def engine_chunks(model: torch.nn.Module, folder: Path, changes: dict[str, Any]) -> list[Any]:
    engine = start(copy.deepcopy(model), folder, **changes)
    found = [chunk for chunk in engine.chunks() if chunk.away is not None]
    engine.close()
    return found


def whole(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """All weights and moments."""
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        full = chunk.full()
        for piece in chunk.group.pieces:
            end = piece.offset + piece.numel
            found[piece.name] = full[piece.offset : end].clone()
            for kind in set(chunk.formats()) & {"first", "second"}:
                found[f"{piece.name}.{kind}"] = chunk.read(kind, piece.offset, end).clone()
    return found


def test_a_plain_loop_and_what_is_written_per_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(width=64)
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.bfloat16)
    engine = start(model, tmp_path, bf16={"enabled": True})
    assert engine.store.ssd is not None
    size = engine.store.ssd.size
    engine.drain()
    moved = [engine.store.ssd.moved()]
    for tokens in batches(3):
        step(engine, tokens)
        loss_of(plain.model, tokens).backward()
        plain.step()
        engine.drain()
        moved.append(engine.store.ssd.moved())
    for before, after in itertools.pairwise(moved):
        assert after[0] - before[0] == after[1] - before[1] == size
    got = weights_of(engine)
    names = {id(p): name for name, p in plain.model.named_parameters()}
    for p, master in zip(plain.trained, plain.masters, strict=True):
        assert torch.equal(got[names[id(p)]], master.reshape(-1))
    assert not list(tmp_path.iterdir())  # the file has no name
    engine.close()


class Half(torch.nn.Module):
    """Only one half is used: the other's states must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(80, 80), torch.nn.Linear(80, 80)
        self.which = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self, self.which)(x)
        return out


def test_what_had_no_gradient_does_not_move_and_blocks_without_are_not_written(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Half() for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))  # type: ignore[method-assign]
    other = copy.deepcopy(model)
    other.forward = lambda x: other.layers[2](other.layers[1](other.layers[0](x)))  # type: ignore[method-assign]
    ends = []
    for one, away in ((model, {f"layers.{n}/0" for n in range(3)}), (other, set[str]())):
        engine = start(one, tmp_path, away)
        for number in range(4):
            for layer in one.layers:
                layer.which = "ab"[number % 2]
            x = torch.randn(4, 80, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(x).square().mean())
            before = engine.memory()["ssd written"]
            engine.step()
            engine.drain()
            wrote = engine.memory()["ssd written"] - before
        ends.append((whole(engine), wrote, engine.store.ssd))
        engine.close()
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())
    assert ends[0][2] is not None and 0 < ends[0][1] < ends[0][2].size


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_checkpoints_go_from_ssd_to_host_and_back(moments: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"bf16": {"enabled": True}, "evener": {"moments": moments}}
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    engine = start(Model(), disk, **copy.deepcopy(changes))
    data = batches(6)
    for tokens in data[:3]:
        step(engine, tokens)
    beside = zero.begin_checkpoint(engine, saved)
    for tokens in data[3:]:
        step(engine, tokens)
    beside.result()
    wanted, state = whole(engine), engine_state(engine)
    exported = zero.export(engine, tmp_path / "out", torch.float32).read_bytes()
    engine.close()
    for away in (LAYERS, {"layers.1/0"}, set[str]()):
        torch.manual_seed(1)
        engine = start(Model(), disk, away, **copy.deepcopy(changes))
        zero.load_checkpoint(engine, saved)
        for tokens in data[3:]:
            step(engine, tokens)
        got = whole(engine)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        again = engine_state(engine)
        for number, entry in state.items():
            assert all(torch.equal(again[number][name], entry[name]) for name in entry)
        assert zero.export(engine, tmp_path / "out", torch.float32).read_bytes() == exported
        engine.close()


def engine_state(engine: zero.Engine) -> dict[int, dict[str, torch.Tensor]]:
    return zero.moments.collect(engine, engine.param_groups)


def test_torchs_optimizer_state_is_installed_on_the_ssd(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    one = start(copy.deepcopy(model), tmp_path)
    two = start(copy.deepcopy(model), tmp_path)
    for tokens in batches(2):
        step(one, tokens)
    one.drain()
    state = {"state": engine_state(one), "param_groups": one.param_groups}
    groups = [{**g, "params": list(range(len(g["params"])))} for g in one.param_groups]
    zero.moments.install(two, two.param_groups, {**state, "param_groups": groups})
    a, b = whole(one), whole(two)
    assert all(torch.equal(a[n], b[n]) for n in a if n.endswith(("first", "second")))
    one.close()
    two.close()


class Broken:
    """A store whose disk fails from some request on."""

    def __init__(self, store: Any, after: int, number: int) -> None:
        self._store, self._after, self._number = store, after, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, ticket: int) -> None:
        self._after -= 1
        if self._after < 0:
            raise OSError(self._number, f"reading at 0 of the file: {os.strerror(self._number)}")
        self._store.wait(ticket)


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EIO, "the disk fails"), (errno.ETIMEDOUT, "EVENER_SSD_TIMEOUT"), (errno.EROFS, "")],
)
def test_a_disk_that_fails_ends_training_and_leaves_the_checkpoint(
    number: int, fix: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    engine = start(Model(), tmp_path)
    data = batches(4)
    step(engine, data[0])
    last = zero.save_checkpoint(engine, tmp_path / "saved")
    ring = engine._lanes._ring
    ring._store = Broken(ring._store, 3, number)
    with pytest.raises(EvenerError, match=os.strerror(number)) as caught:
        for tokens in data[1:]:
            step(engine, tokens)
        engine.drain()
    assert fix in caught.value.fix
    for _ in range(2):  # and again, whatever is tried: these states are lost
        with pytest.raises(EvenerError, match=os.strerror(number)):
            engine.drain()
    with pytest.raises(EvenerError, match=os.strerror(number)):
        zero.save_checkpoint(engine, tmp_path / "saved")
    with pytest.raises(EvenerError):
        engine.close()
    fresh = start(Model(), tmp_path)
    assert zero.checkpoint.find(tmp_path / "saved") == last
    zero.load_checkpoint(fresh, tmp_path / "saved")
    step(fresh, data[1])
    fresh.close()


def test_what_cannot_be_had_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(EvenerError, match="is no folder"):
        place(f"{tmp_path}/none:1GB")
    with pytest.raises(EvenerError, match=r"has no room") as caught:
        ssd.Ssd(tmp_path, 1 << 58, 12)
    assert "make room" in caught.value.fix or "ulimit" in caught.value.fix
    gone = tmp_path / "gone"
    with pytest.raises(EvenerError, match="No such file") as caught:
        ssd.Ssd(gone, 1 << 20, 12)
    assert "make the folder" in caught.value.fix
    assert place(f"{tmp_path}:2GB") == (str(tmp_path), 2_000_000_000)
    assert place(str(tmp_path))[1] > 0
    with pytest.raises(EvenerError, match="no folder"):
        place(5)


LIMITED = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from evener import zero
from evener.zero import ssd
try:
    ssd.Ssd(sys.argv[1], 10_000_000, 12)
except zero.ssd.SsdError as error:
    print(error, "|", error.fix)
"""


def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "ulimit -f" in run.stdout and str(tmp_path) in run.stdout


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssd.Ssd]:
    yield ssd.Ssd(tmp_path_factory.mktemp("ssd"), 40_000_000, 10, block=2 * ssd.GRAIN)


@how(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_range_is_read_as_it_was_written(one_file: ssd.Ssd, data: st.DataObject) -> None:
    one_file._used = 0
    numel = data.draw(st.integers(1, 5 * ssd.GRAIN))
    fields = [("lower", torch.int16), ("first", torch.float32), ("second", torch.float32)]
    away = one_file.layout(fields, numel)
    model = {}
    for name, dtype in fields:
        model[name] = torch.zeros(numel, dtype=dtype)
        away.write(name, 0, model[name])
    for turn in range(data.draw(st.integers(1, 6))):
        name, dtype = fields[data.draw(st.integers(0, 2))]
        begin = data.draw(st.integers(0, numel - 1))
        end = data.draw(st.integers(begin + 1, numel))
        values = torch.full((end - begin,), turn + 1, dtype=dtype)
        away.write(name, begin, values)
        model[name][begin:end] = values
    for name, _ in fields:
        begin = data.draw(st.integers(0, numel - 1))
        assert torch.equal(away.read(name, begin, numel), model[name][begin:])


MACHINE = Machine(
    flops=1e14, h2d=5e10, d2h=5e10, host_adam=4e9, device_adam=4e10, ssd=4e9, host_reserve=0
)


def test_the_plan_takes_as_little_of_the_ssd_as_will_do() -> None:
    parts = [Part(f"layers.{n}/0", 50_000_000, unit=n) for n in range(20)]
    work = Work(tokens=1024, activations=0)
    budgets = [Budget(1 << 30, host, 1 << 40, "/") for host in (20 << 30, 12 << 30, 6 << 30)]
    plans = [plan(parts, Formats(), work, MACHINE, budget) for budget in budgets]
    assert all(made.fits for made in plans)
    assert [len(made.away) for made in plans] == sorted(len(made.away) for made in plans)
    assert not plans[0].away and plans[0].ssd_bytes == 0 and plans[2].away
    least = plans[2]
    assert least.host_bytes <= budgets[2].host
    each = ssd.size_of(50_000_000, [torch.int16, torch.float32, torch.float32])
    assert least.ssd_bytes == sum(p.away for p in least.places) == each * len(least.away)
    assert [p.where for p in least.places if p.where != "gpu"] == sorted(
        p.where for p in least.places if p.where != "gpu"
    )
    assert least.times["SSD"] == 2 * least.ssd_bytes / MACHINE.ssd
    assert least.bound == "SSD" and least.step_seconds >= least.times["SSD"]
    refused = plan(parts, Formats(), work, MACHINE, Budget(1 << 30, 6 << 30, 1 << 30, "/"))
    assert not refused.fits and "of the SSD" in refused.problem


GPU = 65_000_000


def test_a_model_that_the_host_has_no_room_for_is_trained(tmp_path: Path) -> None:
    """Planned, not told: the budget of the host is below the states'."""
    torch.manual_seed(0)
    changes = {"bf16": {"enabled": True}}
    model = Model(width=448, blocks=4)
    with pytest.raises(zero.NoFitError, match="host memory") as caught:
        zero.initialize(
            model=copy.deepcopy(model),
            config=configuration(evener={"budget": {"gpu": GPU, "host": 115_000_000}}, **changes),
        )
    assert any("SSD" in said for said in caught.value.nearest), caught.value.nearest
    ends = []
    for budget in ({"gpu": GPU, "host": 115_000_000, "ssd": f"{tmp_path}:1GB"}, {}):
        engine, *_ = zero.initialize(
            model=copy.deepcopy(model), config=configuration(evener={"budget": budget}, **changes)
        )
        for tokens in batches(2):
            step(engine, tokens)
        ends.append((weights_of(engine), engine.plan))
        engine.close()
    assert ends[0][1].away and not ends[1][1].away
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())


def weights_of(engine: zero.Engine) -> dict[str, torch.Tensor]:
    return {n: v for n, v in whole(engine).items() if not n.endswith(("first", "second"))}


def test_deepspeeds_nvme_is_the_ssd_budget(tmp_path: Path) -> None:
    given = configuration()
    given["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True,
    }  # fmt: skip
    given["aio"] = {"block_size": 1 << 20, "queue_depth": 8}
    config = zero.config.read(given)
    assert config.budget == {"ssd": str(tmp_path)}
    assert any("aio" in said and "depth" in said for said in config.ignored)
    given["evener"]["budget"] = {"gpu": "1GB"}
    assert zero.config.read(given).budget == {"ssd": str(tmp_path), "gpu": "1GB"}


def test_used_by_names(tmp_path: Path) -> None:
    """`weights` of other tests and a plain loop agree where only some chunks are there."""
    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = start(model, tmp_path, {"layers.2/0"})
    for tokens in batches(3):
        step(engine, tokens)
        loss_of(plain.model, tokens).backward()
        plain.step()
    assert_same(engine, plain)  # float32: the weights themselves are in host memory
    assert weights(engine)
    engine.close()
