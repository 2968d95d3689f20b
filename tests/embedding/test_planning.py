"""`evener plan-memory tables.json`: what it predicts, beside what stores, caches and ranks do."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.base.budget import Budget
from evener.embedding import (
    Adagrad,
    Adam,
    Options,
    RowWiseAdagrad,
    Sgd,
    SsdTier,
    Store,
    forget,
    measure,
)
from evener.embedding.placement import Cluster, Table, coldest, plan, split
from evener.embedding.planning import tables_of
from evener.embedding.torch import (
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
    describe,
)
from evener.embedding.torch.cache import CachedRows
from evener.embedding.use import Use, measured, zipf
from evener.errors import UsageError
from evener.tools.plan.memory import plan_memory
from tests import worlds

PLENTY = Budget(0, 1 << 60)
GIVEN: dict[str, Any] = {"name": "items", "num_embeddings": 1000, "embedding_dim": 8, "zipf": 1.05}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are read from small stores: no test looks at them."""
    monkeypatch.setattr(measure, "_BEYOND", 1 << 20)


def table(rows: int, options: Options, exponent: float = 1.05, ids: float = 1) -> Table:
    return Table("t", rows, ids, options, zipf(rows, exponent))


def draw(use: Use, count: int, random: np.random.Generator) -> np.ndarray:
    """Ids of `count` draws: classes by their weight, rows of a class alike."""
    weights, ends = use.rows * use.p, np.cumsum(use.rows)
    which = random.choice(len(weights), count, p=weights / weights.sum())
    inside = (random.random(count) * use.rows[which]).astype(np.int64)
    return (ends - use.rows)[which].astype(np.int64) + inside


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40_000), st.floats(0, 3), st.integers(1, 3000), st.integers(0, 99))
def test_distinct_rows_are_those_of_a_simulation(
    rows: int, exponent: float, draws: int, seed: int
) -> None:
    use, random = zipf(rows, exponent), np.random.default_rng(seed)
    assert use.rows.sum() == rows and (use.rows * use.p).sum() == pytest.approx(1)
    # From the law itself, not from classes.
    p = np.arange(1.0, rows + 1) ** -exponent
    drawn = [len(np.unique(random.choice(rows, draws, p=p / p.sum()))) for _ in range(8)]
    # The variance of a count of different draws is at most its mean.
    mean = use.distinct(draws)
    assert abs(np.mean(drawn) - mean) <= 6 * math.sqrt(mean / 8) + 0.01


def test_a_law_of_many_rows_is_that_of_all_its_ranks() -> None:
    for exponent in (0.0, 0.9, 1.0, 1.05, 2.0):
        p = np.arange(1.0, 300_001) ** -exponent
        every = Use(np.ones(len(p)), p / p.sum())
        few = zipf(len(p), exponent)
        assert few.distinct(50_000) == pytest.approx(every.distinct(50_000), rel=1e-4)
        assert few.kept(50_000, 6e4) == pytest.approx(every.kept(50_000, 6e4), rel=1e-3)


@pytest.mark.parametrize("counts", ["ids", "ids, up to a bound", "steps"])
def test_counts_of_a_store_give_the_use_back(counts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which stores count, for the batch that was counted and for one half as large."""
    monkeypatch.setattr("evener.embedding.use._COUNTED", 9000)
    use, random, steps, draws = zipf(5000, 1.1), np.random.default_rng(0), 400, 2000
    seen, distinct = np.zeros(5000, np.int64), []
    for _ in range(steps):
        ids, times = np.unique(draw(use, draws, random), return_counts=True)
        seen[ids] += 1 if counts == "steps" else times
        distinct.append(len(ids))
    if counts == "ids, up to a bound":
        assert (seen > 9000).sum() > 5
        seen = np.minimum(seen, 9000)
    times, rows = np.unique(seen[seen > 0], return_counts=True)
    found = measured(6000, times, rows, steps, draws, "it")
    assert found.rows.sum() == 6000
    assert found.distinct(draws) == pytest.approx(np.mean(distinct), rel=0.01)
    assert found.distinct(draws / 2) == pytest.approx(use.distinct(draws / 2), rel=0.02)


OPTIONS = [
    Options(16, optimizer=Adagrad()),
    Options(24, dtype="f16", optimizer=RowWiseAdagrad()),
    Options(5, optimizer=Sgd()),
    Options(32, dtype="bf16", optimizer=Adam()),
]


@pytest.mark.parametrize(
    ("rows", "options"),
    [*itertools.product((3, 700, 20_000, 290_000), OPTIONS), (2_000_000, OPTIONS[0])],
)
def test_memory_is_that_of_the_store(rows: int, options: Options) -> None:
    (place,) = plan([table(rows, options)], Cluster(), PLENTY).places
    store = Store("planned", options)
    keys = np.random.default_rng(1).permutation(rows)
    for start in range(0, rows, 1 << 16):
        store.lookup(keys[start : start + (1 << 16)], 1)
    assert place.host_bytes == pytest.approx(store.stats()["bytes"], rel=0.05)
    forget("planned")


def test_the_ssd_tier_takes_what_was_planned(tmp_path: Path) -> None:
    rows, cluster, random = 300_000, Cluster(10_000), np.random.default_rng(0)
    one = table(rows, Options(32, optimizer=Adagrad()))
    whole = plan([one], cluster, PLENTY).bytes("host")
    budget = Budget(0, whole // 2, 1 << 40, str(tmp_path))
    made = plan([one], cluster, budget)
    (place,) = made.places
    assert made.fits and 0 < place.ssd_rows < rows
    tier = SsdTier(str(tmp_path), rows=place.host_rows)
    store = Store("tiered", Options(32, optimizer=Adagrad(), tier=tier))
    for start in range(0, rows, 10_000):
        store.lookup(np.arange(start, min(rows, start + 10_000)), 1)
    warmed = []
    for step in range(2, 102):
        ids = np.unique(draw(one.use, 10_000, random))
        before = store.stats()["warmed"]
        store.lookup(ids, step)
        store.apply(ids, np.full((len(ids), 32), 1e-3, np.float32), step)
        warmed.append(store.stats()["warmed"] - before)
    stats = store.stats()
    assert 0.85 * place.host_bytes < stats["bytes"] <= place.host_bytes <= budget.host
    assert 0.5 * place.ssd_bytes < stats["cold_bytes"] <= place.ssd_bytes
    assert place.cold * place.distinct == pytest.approx(np.mean(warmed[-30:]), rel=0.25)
    forget("tiered")


def test_a_cache_finds_the_share_that_was_planned() -> None:
    one = table(20_000, Options(4, optimizer=Adagrad()))
    cluster, random = Cluster(1000), np.random.default_rng(0)
    (place,) = plan([one], cluster, Budget(120_000, 1 << 60)).places
    assert 0 < place.gpu_rows < 20_000
    store = Store("cached", one.options)
    cache = CachedRows(store, torch.device("cpu"), place.gpu_rows)
    held = [each for each in vars(cache).values() if isinstance(each, torch.Tensor)]
    for step in range(300):
        if step == 100:
            cache.stats.keys = cache.stats.missing = 0
        cache.read(torch.from_numpy(np.unique(draw(one.use, 1000, random))), step)
    assert cache.stats.hit_rate == pytest.approx(place.kept, abs=0.02)
    held = [each for each in vars(cache).values() if isinstance(each, torch.Tensor)]
    assert sum(each.nbytes for each in held) == pytest.approx(place.gpu_bytes, rel=0.02)
    forget("cached")


small = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=4),  # what rows are worth, one each
        st.integers(1, 3),  # bytes
    ),
    min_size=1,
    max_size=3,
)


def _sorted(tables: Any) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    worth = [np.array(sorted(of, reverse=True), float) for of, _ in tables]
    return [np.ones(len(of)) for of in worth], worth, [size for _, size in tables]


def _best(worth: list[np.ndarray], sizes: list[int], least: list[int], room: int) -> float:
    found = 0.0
    for counts in itertools.product(*(range(len(of) + 1) for of in worth)):
        if any(0 < n < need for n, need in zip(counts, least, strict=True)):
            continue
        if sum(n * size for n, size in zip(counts, sizes, strict=True)) <= room:
            found = max(found, sum(of[:n].sum() for of, n in zip(worth, counts, strict=True)))
    return found


@settings(max_examples=300, deadline=None)
@given(small, st.integers(0, 30), st.booleans())
def test_the_gpu_has_what_is_worth_most(tables: Any, room: int, alike: bool) -> None:
    rows, worth, sizes = _sorted(tables)
    if alike:
        sizes = [1] * len(sizes)
    taken = split(rows, worth, sizes, [1] * len(rows), room)
    got = sum(of[:n].sum() for of, n in zip(worth, taken, strict=True))
    used = sum(n * size for n, size in zip(taken, sizes, strict=True))
    best = _best(worth, sizes, [1] * len(rows), room)
    # Rows of one size: the best there is. Of several: all but the row that no longer fits.
    assert used <= room
    assert got == best if alike else got >= best - 9 * 3


@settings(max_examples=300, deadline=None)
@given(small, st.integers(0, 30), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_a_table_has_no_cache_or_one_with_room_for_a_batch(
    tables: Any, room: int, need: list[int]
) -> None:
    rows, worth, sizes = _sorted(tables)
    least = [min(n, len(of)) for n, of in zip(need, worth, strict=False)]
    taken = split(rows, worth, sizes, least, room)
    assert all(n == 0 or n >= m for n, m in zip(taken, least, strict=True))
    assert sum(n * size for n, size in zip(taken, sizes, strict=True)) <= room
    assert bool(sum(taken)) == any(m * size <= room for m, size in zip(least, sizes, strict=True))


@settings(max_examples=300, deadline=None)
@given(small, st.integers(0, 30))
def test_the_least_used_go_to_the_ssd(tables: Any, room: int) -> None:
    rows, worth, sizes = _sorted(tables)
    density = [of / size for of, size in zip(worth, sizes, strict=True)]
    everything = sum(len(of) * size for of, size in zip(worth, sizes, strict=True))
    gone = coldest(rows, density, lambda g: everything - g @ sizes, room)
    left = everything - gone @ sizes
    assert left <= room
    # One row less would be too much, and what went is worth less than what stays.
    assert not gone.any() or left + max(sizes) > room
    went = [v for of, n in zip(density, gone, strict=True) for v in of[len(of) - int(n) :]]
    stay = [v for of, n in zip(density, gone, strict=True) for v in of[: len(of) - int(n)]]
    assert max(went, default=0) <= min(stay, default=9)


def _trained(rank: int, size: int, folder: str) -> dict[str, Any]:
    configs = [
        EmbeddingBagConfig(3000, 8, "big", feature_names=["a", "b"]),
        EmbeddingBagConfig(40, 4, "small", feature_names=["c"]),
    ]
    bags = EmbeddingBagCollection(configs, optimizer={"small": Sgd()}, prefix=f"of-{size}-")
    optimizer, random = DynamicOptimizer(bags), np.random.default_rng(rank)
    uses = [zipf(3000, 1.05), zipf(3000, 1.05), zipf(40, 0.5)]
    for _ in range(30):
        ids = np.concatenate(
            [draw(use, n, random) for use, n in zip(uses, (200, 400, 200), strict=True)]
        )
        lengths = torch.tensor([1] * 200 + [2] * 200 + [1] * 200)
        features = Jagged(["a", "b", "c"], torch.from_numpy(ids), lengths=lengths)
        bags(features).values().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    modules = [bags.embedding_bags[config.name] for config in configs]
    found = describe(bags, Path(folder) / "tables.json")
    return {"found": found, "sent": [module.traffic.total / 30 for module in modules]}


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_bytes_that_cross_are_those_of_the_ranks(shape: tuple[int, int], tmp_path: Path) -> None:
    told = worlds.run(shape, _trained, str(tmp_path))
    cluster = Cluster(200, ranks=shape[0], nodes=2)
    sent = np.mean([each["sent"] for each in told], 0)
    found = json.loads((tmp_path / "tables.json").read_text())
    assert all(each["found"] == found for each in told)
    assert [each["samples"] for each in found["tables"]] == [200 * cluster.size] * 2
    assert found["tables"][0]["ids"] == [1, 2]
    for tables in (
        [Table("big", 3000, 3, Options(8), zipf(3000, 1.05)),
         Table("small", 40, 1, Options(4), zipf(40, 0.5))],
        tables_of(found, tmp_path, 1),  # what was counted, of all ranks
    ):  # fmt: skip
        crossing = [place.crossing for place in plan(tables, cluster, PLENTY).places]
        assert crossing == pytest.approx(sent, rel=0.05)


def test_what_a_collection_saw_is_planned(tmp_path: Path) -> None:
    """On one rank, where ids are counted, and of a snapshot of the same rows."""
    _trained(0, 1, str(tmp_path))
    found = json.loads((tmp_path / "tables.json").read_text())
    assert [each["optimizer"]["kind"] for each in found["tables"]] == ["adagrad", "sgd"]
    Store.find("of-1-big").snapshot(tmp_path / "rows")
    again = dict(found["tables"][0], snapshot="rows")
    del again["frequencies"], again["steps"]
    counted, snapshot = (
        tables_of({"tables": [found["tables"][0]]}, tmp_path, 1),
        tables_of({"tables": [again]}, tmp_path, 1),
    )
    assert counted[0].ids == snapshot[0].ids == 3
    for draws in (100, 600):
        wanted = zipf(3000, 1.05).distinct(draws)
        assert counted[0].use.distinct(draws) == pytest.approx(wanted, rel=0.05)
        assert snapshot[0].use.distinct(draws) == counted[0].use.distinct(draws)
    (whole,) = (tmp_path / "rows").iterdir()
    whole.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(UsageError, match="rows: "):
        tables_of({"tables": [again]}, tmp_path, 1)
    fresh = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "fresh", feature_names=["a"])])
    with pytest.raises(UsageError, match="'fresh' was not trained"):
        describe(fresh, tmp_path / "no.json")


def test_a_collection_takes_the_plan(tmp_path: Path) -> None:
    configs = [EmbeddingBagConfig(100, 4, f"p{i}", feature_names=[str(i)]) for i in range(2)]
    tier = SsdTier(str(tmp_path), rows=50)
    bags = EmbeddingBagCollection(configs, cache_rows={"p0": 64}, storage={"p1": tier})
    rows = bags.embedding_bags["p0"].table.rows
    assert isinstance(rows, CachedRows) and rows.capacity == 64
    assert bags.embedding_bags["p1"].store.options.tier == tier
    assert bags.embedding_bags["p0"].store.options.tier is None
    with pytest.raises(UsageError, match="cache_rows for p9"):
        EmbeddingBagCollection(configs, cache_rows={"p9": 64})


def run(folder: Path, tables: Any, *arguments: str) -> Result:
    path = folder / "tables.json"
    path.write_text(json.dumps({"tables": tables}))
    return CliRunner().invoke(plan_memory, [str(path), *arguments])


def test_the_command_says_where_rows_lie(tmp_path: Path) -> None:
    tables = [
        GIVEN | {"num_embeddings": 2_000_000},
        GIVEN | {"name": "users", "num_embeddings": 40_000, "optimizer": "adam"},
    ]
    given = ["--host", "120MB", "--ssd", "/not/here:5GB", "--gpu", "5MB", "--batch", "1000"]
    shown = run(tmp_path, tables, *given, "--nodes", "2", "--json")
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)
    items, users = record["plan"]["places"]
    assert items["rows"] == 1_000_000 and users["rows"] == 20_000
    assert items["gpu_rows"] and not items["ssd_rows"]
    assert 4_990_000 < record["plan"]["gpu_bytes"] <= 5_000_000
    assert record["step_seconds"] == sum(record["times"].values()) > 0
    assert record["crossing_bytes"] > 0 and record["times"]["network"] > 0
    shown = run(tmp_path, tables, *given)
    assert shown.exit_code == 0 and "SsdTier('/not/here', rows=" in shown.stdout
    assert "'users': Adam()" in shown.stdout and "cache_rows={'items':" in shown.stdout
    assert "bound by" in shown.stdout and "no --gpu" not in shown.stdout


@pytest.mark.parametrize("given", [["--host", "200MB"], ["--host", "200MB", "--ranks", "2"]])
def test_each_fix_is_one(given: list[str], tmp_path: Path) -> None:
    tables = [GIVEN | {"num_embeddings": 2_500_000}]
    shown = run(tmp_path, tables, *given, "--json")
    assert shown.exit_code == 1
    record = json.loads(shown.stdout)
    fixes = record["plan"]["nearest"]
    words = ["--ssd", "RowWiseAdagrad", "dtype", "--nodes", "--host"]
    assert [fix.split()[0] for fix in fixes] == words
    for fix in fixes:
        changed, more = tables[0], fix.split() if fix.startswith("--") else []
        if fix == "RowWiseAdagrad":
            changed = changed | {"optimizer": "row_wise_adagrad"}
        elif fix == "dtype f16":
            changed = changed | {"dtype": "f16"}
        assert run(tmp_path, [changed], *given, *more).exit_code == 0, fix
    assert "does not fit" in run(tmp_path, tables, *given).stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "has no name"),
        ({"zpif": 1}, "'zpif', which is not known"),
        ({"num_embeddings": 0}, "num_embeddings=0"),
        ({"embedding_dim": 2.5}, "embedding_dim=2.5"),
        ({"embedding_dim": 1 << 40}, "table 'items'"),
        ({"ids": [1, 2]}, r"ids=\[1, 2\] for 1 features"),
        ({"ids": -1}, "ids=-1"),
        ({"ids": 0}, "ids=0"),
        ({"ids": math.nan}, "ids=nan"),
        ({"feature_names": "item"}, "feature_names='item'"),
        ({"optimizer": "adamm"}, "'adamm' is unknown"),
        ({"optimizer": {"kind": "sgd", "rate": 1}}, "rate"),
        ({"dtype": "f8"}, "f8"),
        ({"zipf": -1}, "zipf=-1"),
        ({"zipf": math.nan}, "zipf=nan"),
        ({"zipf": "steep"}, "zipf='steep'"),
        ({"snapshot": "rows"}, "zipf and snapshot"),
        ({"zipf": None, "frequencies": 3}, "zipf and frequencies"),
    ],
)
def test_tables_that_cannot_be_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shown = run(tmp_path, [GIVEN | change])
    assert isinstance(shown.exception, UsageError)
    with pytest.raises(UsageError, match=words):
        raise shown.exception


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ({}, "nothing for how its rows are used"),
        ({"frequencies": 3}, "no pairs"),
        ({"frequencies": [[1, 2, 3]]}, "no pairs"),
        ({"frequencies": [["x", 2]]}, "no pairs"),
        ({"frequencies": []}, "no pairs"),
        ({"frequencies": [[0, 10]]}, "no frequencies"),
        ({"frequencies": [[5, -10]]}, "no frequencies"),
        ({"frequencies": [[2, 1001]]}, "1,001 rows, and num_embeddings=1,000"),
        ({"frequencies": [[2, 10]], "steps": "x"}, "steps='x'"),
        ({"frequencies": [[2, 10]], "samples": 0}, "samples=0"),
        ({"snapshot": "nowhere"}, "is no folder"),
        ({"snapshot": "."}, "there is no snapshot"),
        ({"snapshot": []}, "an empty list"),
    ],
)
def test_uses_that_cannot_be_are_refused(use: dict[str, Any], words: str, tmp_path: Path) -> None:
    shown = run(tmp_path, [{k: v for k, v in GIVEN.items() if k != "zipf"} | use])
    assert isinstance(shown.exception, UsageError), shown.exception
    with pytest.raises(UsageError, match=words):
        raise shown.exception


@pytest.mark.parametrize(
    ("tables", "arguments", "words"),
    [
        ([], [], "no list of tables"),
        ({"items": GIVEN}, [], "no list of tables"),
        ([GIVEN, GIVEN], [], "one name"),
        ([GIVEN], ["--batch", "8x1024"], "batch '8x1024'"),
        ([GIVEN], ["--batch", "0"], "batch '0'"),
        ([GIVEN], ["--host", "5"], "has no unit"),
        ([GIVEN], ["--ssd", "/not/here"], "is no folder"),
        ([GIVEN], ["--ssd", ":5GB"], "is no folder"),
        ([GIVEN], ["--between", "fast"], "--between 'fast'"),
        ([GIVEN], ["--on", "h200"], "--on is for models"),
        ([GIVEN], ["--dtype", "bf16"], "--dtype is for models"),
        ([GIVEN], ["--chunks"], "--chunks is for models"),
        ([GIVEN | {"optimizer": "ftrl"}], ["--gpu", "1GB"], "FTRL|ftrl|Ftrl"),
        ([GIVEN | {"num_embeddings": 1 << 33}], [], "give --nodes or --ranks: 5 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tables: Any, arguments: list[str], words: str, tmp_path: Path
) -> None:
    shown = run(tmp_path, tables, *arguments)
    assert isinstance(shown.exception, UsageError), shown.exception
    with pytest.raises(UsageError, match=words):
        raise shown.exception


def test_tables_are_planned_without_torch(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text(json.dumps({"tables": [GIVEN]}))
    program = (
        "import sys\nfrom evener.tools.plan.memory import plan_memory\n"
        "plan_memory(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'tensorflow'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "tables.json"), "--host", "1GB"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
