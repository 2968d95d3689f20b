"""state_dict, and folders that come back on another number of ranks."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from evener.embedding import Adam, Bloom, Counter, Options, Sgd, Store, forget, report
from evener.embedding.torch import (
    DynamicEmbedding,
    DynamicOptimizer,
    load,
    save,
)
from evener.embedding.torch import state as table_state
from evener.embedding.torch.dcp import TableLoadPlanner
from evener.errors import UsageError
from tests import worlds

DIM = 4
OPTIONS = Options(DIM, optimizer=Adam(lr=0.01))


class Model(nn.Module):
    def __init__(self, name: str, options: Options = OPTIONS, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = DynamicEmbedding(options, name, **how)
        self.top = nn.Linear(DIM, 1)


def steps(model: Model, first: int, last: int) -> None:
    optimizer = DynamicOptimizer(model, torch.optim.SGD(model.top.parameters(), lr=0.1))
    for step in range(first, last):
        ids = torch.randint(-30, 30, (8,), generator=torch.Generator().manual_seed(step))
        model.top(model.items(ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(model: Model) -> dict[int, bytes]:
    return {
        int(key): row.tobytes() + bytes([int(frequency), int(version)])
        for chunk in model.items.store.export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    }


@pytest.mark.parametrize("cache_rows", [0, 40])
def test_a_state_dict_goes_on_where_it_was(tmp_path: Path, cache_rows: int) -> None:
    whole = Model(f"whole-{cache_rows}", cache_rows=cache_rows)
    steps(whole, 0, 5)
    torch.save(whole.state_dict(), tmp_path / "model.pt")
    steps(whole, 5, 9)
    again = Model(f"again-{cache_rows}", cache_rows=cache_rows)
    steps(again, 20, 22)  # what is there goes
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    steps(again, 5, 9)
    assert contents(again) == contents(whole)
    assert torch.equal(again.top.weight, whole.top.weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(8, optimizer=Adam(lr=0.01)), "dim=4"),
        (Options(DIM, dtype="f16", optimizer=Adam(lr=0.01)), "dtype='f32'"),
        (Options(DIM, optimizer=Sgd()), "slots of adam"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(options: Options, words: str) -> None:
    source = Model("source")
    steps(source, 0, 2)
    state = {"items._extra_state": source.items.get_extra_state()}
    target = Model(f"target-{words}", options)
    target.items(torch.arange(3))
    before = contents(target)
    with pytest.raises(UsageError, match=words):
        target.load_state_dict(state, strict=False)
    with pytest.raises(UsageError, match="another version"):
        target.load_state_dict({"items._extra_state": {"format": 99}}, strict=False)
    assert contents(target) == before


def test_a_state_dict_without_rows() -> None:
    model = Model("without", in_state_dict=False)
    steps(model, 0, 2)
    before = contents(model)
    assert model.state_dict()["items._extra_state"]["snapshot"] is None
    model.load_state_dict(model.state_dict())
    assert contents(model) == before


def test_folders_keep_the_last_and_ignore_what_is_not_whole(tmp_path: Path) -> None:
    model = Model("kept")
    for last in (2, 4, 6):
        steps(model, last - 2, last)
        newest = save(model, tmp_path, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
    wanted = contents(model)
    steps(model, 6, 7)
    broken = save(model, tmp_path)
    (broken / "manifest.json").unlink()  # as if the job had ended before it
    assert load(model, tmp_path) == 5
    assert contents(model) == wanted
    assert load(model, newest) == 5
    with pytest.raises(UsageError, match="no whole checkpoint"):
        load(model, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no embedding 'other': it has kept"):
        load(Model("other"), tmp_path)
    with pytest.raises(UsageError, match="no embedding"):
        save(nn.Linear(1, 1), tmp_path)


def test_a_job_records_what_its_tables_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_STATS_DIR", str(tmp_path))
    steps(Model("recorded", cache_rows=40), 0, 2)
    (table,) = report.collect(str(tmp_path), "")
    assert (table["name"], table["dim"], table["rank"]) == ("recorded", DIM, 0)
    assert table["store"]["steps"] == 1 and table["cache"]["batches"] == 1
    assert 'evener_embedding_steps_total{embedding="recorded",rank="0"' in report.prometheus(
        [table]
    )
    assert report.rows([table])[0][0] == "recorded"


def train_and_save(rank: int, size: int, folder: str, first: int, last: int) -> dict[int, bytes]:
    model = Model("resharded")
    if first:
        assert load(model, folder) == first - 1
    steps(model, first, last)
    save(model, folder)
    return contents(model)


@pytest.mark.parametrize("shape", [(1, 1), (3,)])
def test_another_number_of_ranks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Two ranks train and save; others go on: as if the same ranks had gone on."""
    folder = str(tmp_path)
    two = worlds.run((2,), train_and_save, folder, 0, 4)
    found = worlds.run(shape, train_and_save, folder, 4, 5)
    assert {*two[0], *two[1]} <= {key for each in found for key in each}
    assert sum(map(len, found)) == len({key for each in found for key in each})
    forget("resharded")
    model = Model("resharded")
    assert load(model, folder) == 4
    assert contents(model) == {key: row for each in found for key, row in each.items()}


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_saved_after_going_back_is_what_load_finds(tmp_path: Path, copied: bool) -> None:
    """Its step is smaller than those of the branch that was given up."""
    model = Model(f"back-{copied}")
    steps(model, 0, 2)
    older = save(model, tmp_path / "all", keep=2)
    if copied:
        older = Path(shutil.copytree(older, tmp_path / "archive"))
    for first in (2, 4) if copied else (2,):
        steps(model, first, first + 2)
        save(model, tmp_path / "all", keep=2)
    load(model, older)
    steps(model, 20, 21)
    wanted = contents(model)
    new = save(model, tmp_path / "all", keep=2)
    steps(model, 21, 22)
    assert (new / "manifest.json").exists()
    load(model, tmp_path / "all")
    assert contents(model) == wanted


def test_a_second_save_of_a_step_leaves_the_first_until_it_is_whole(tmp_path: Path) -> None:
    model = Model("twice")
    steps(model, 0, 2)
    first = save(model, tmp_path, keep=2)
    second = save(model, tmp_path, keep=2)
    assert first != second and (first / "manifest.json").exists()
    assert load(model, tmp_path) == 1


def test_checkpoints_between_deltas_leave_their_chain_alone(tmp_path: Path) -> None:
    model = Model("chain")
    steps(model, 0, 2)
    model.items.store.snapshot(tmp_path / "rows")
    steps(model, 2, 4)
    save(model, tmp_path / "checkpoints")
    model.state_dict()
    steps(model, 4, 5)
    assert "delta" in model.items.store.delta(tmp_path / "rows")["path"]
    served = Store("chain served", OPTIONS)
    served.restore(tmp_path / "rows")
    keys = torch.arange(-30, 30)
    assert torch.equal(served.lookup_infer(keys), model.items.store.lookup_infer(keys))
    load(model, tmp_path / "checkpoints")  # other rows: a delta would not say what went
    model.items.store.delta(tmp_path / "rows")
    served.restore(tmp_path / "rows")
    assert torch.equal(served.lookup_infer(keys), model.items.store.lookup_infer(keys))


def test_a_distributed_checkpoint_of_one_process(tmp_path: Path) -> None:
    model = Model("dcp")
    steps(model, 0, 3)
    wanted = contents(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    steps(model, 3, 5)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict(state["model"])
    assert contents(model) == wanted


def distributed(rank: int, size: int, folder: str, act: str) -> tuple[dict[int, bytes], Any]:
    """Rows of this rank, then values of all keys."""
    model = Model("dcp sharded")
    if act == "load":
        model.items(torch.arange(rank, 30))  # rows that are there go
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, planner=TableLoadPlanner())
        model.load_state_dict(state["model"])
    else:
        steps(model, 0, 4)
        rows = contents(model)
        if act == "dies":
            write = FileSystemWriter.write_data
            FileSystemWriter.write_data = lambda *a: (write(*a), rank and os._exit(1))[0]
        with mock.patch.object(dist, "all_gather_object", None):  # no rank has the others' rows
            if act == "async":
                saved = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
                steps(model, 4, 6)  # while it is written
                saved.result()
                return rows, None
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    values = model.eval().items(torch.arange(-30, 30)).flatten().tolist()
    return contents(model), values


def merged(found: list[tuple[dict[int, bytes], Any]]) -> dict[int, bytes]:
    assert sum(len(rows) for rows, _ in found) == len({key for rows, _ in found for key in rows})
    return {key: row for rows, _ in found for key, row in rows.items()}


@pytest.mark.parametrize(("act", "shape"), [("save", (1,)), ("save", (2,)), ("async", (1, 2))])
def test_each_rank_writes_its_rows_and_any_number_of_ranks_loads(
    tmp_path: Path, act: str, shape: tuple[int, ...]
) -> None:
    folder = str(tmp_path / "dcp")
    saved = worlds.run((2,), distributed, folder, act)
    metadata = FileSystemReader(folder).read_metadata()
    files = {
        index.fqn.rpartition(".")[2]: info.relative_path
        for index, info in metadata.storage_data.items()
        if ".snapshot." in index.fqn
    }
    assert files == {"0-of-2": "__0_0.distcp", "1-of-2": "__1_0.distcp"}
    loaded = worlds.run(shape, distributed, folder, "load")
    assert merged(loaded) == merged(saved)
    assert all(values == loaded[0][1] for _, values in loaded)


def test_a_save_that_dies_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    saved = worlds.run((2,), distributed, str(tmp_path / "1"), "save")
    died = worlds.outcomes((2,), distributed, str(tmp_path / "2"), "dies")
    assert all(each.error for each in died)
    assert {path.name for path in (tmp_path / "2").iterdir()} <= {"__0_0.distcp", "__1_0.distcp"}
    loaded = worlds.run((3,), distributed, str(tmp_path / "1"), "load")
    assert merged(loaded) == merged(saved)
    with pytest.raises(worlds.RankFailedError, match="metadata"):
        worlds.run((2,), distributed, str(tmp_path / "2"), "load")


def without_planner(rank: int, size: int, folder: str) -> None:
    model = Model("dcp sharded")
    state = {"model": model.state_dict()}
    with pytest.raises(CheckpointException, match=f"snapshot.{rank}-of-{size}"):
        dcp.load(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(UsageError, match=f"has no rows of rank {rank}-of-{size}"):
        model.load_state_dict(state["model"])
    # A load that ended half-way is not taken for a whole one.
    half = {"model": model.state_dict()}
    half["model"]["items._extra_state"]["snapshot"] = {
        f"{rank}-of-{size}": {"1-of-2": model.items.store.save_bytes()}
    }
    with pytest.raises(UsageError, match="rank 1-of-2 alone"):
        model.load_state_dict(half["model"])
    with pytest.raises(UsageError, match=f"has no rows of rank {rank}-of-{size}"):
        half["model"]["items._extra_state"]["snapshot"] = {"9-of-10": b""}
        model.load_state_dict(half["model"])
    alone = Model("alone", shard=False)
    with pytest.raises(CheckpointException, match="lies on 1 of 3 ranks"):
        dcp.save({"model": alone.state_dict()}, checkpoint_id=f"{folder}-alone")


def test_what_cannot_be_loaded_or_saved_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    worlds.run((2,), distributed, folder, "save")
    worlds.run((3,), without_planner, folder)


@pytest.mark.parametrize("admission", [Counter(3), Bloom(3, capacity=1000)])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (3, 2)])
def test_counts_of_admission_come_to_other_ranks(
    tmp_path: Path, admission: Any, sizes: tuple[int, int]
) -> None:
    """The shards of a job, as stores of one process."""
    keys = np.arange(400)
    options = Options(DIM, optimizer=Sgd(), admission=admission, shards=4)
    before, after = (
        [Model(f"counts-{side}-{sizes}-{admission}-{n}", options) for n in range(sizes[side])]
        for side in (0, 1)
    )

    def ranks(models: list[Model]) -> None:
        for place, model in enumerate(models):
            model.items.table._sharded = Shards(place, len(models)) if len(models) > 1 else None

    ranks(before)
    ranks(after)
    for place, model in enumerate(before):
        mine = keys[keys % len(before) == place]
        for step in (1, 2):
            model.items.store.lookup(mine, step)
        model.items.store.apply(mine, np.zeros((len(mine), DIM), np.float32), 2)
    parts = [model.items.store.save_bytes() for model in before]
    for place, model in enumerate(after):
        table_state.restore(model.items.table, parts)
        model.items.store.lookup(keys[keys % len(after) == place], 3)
    assert sum(len(model.items.store) for model in after) == 400


class Shards:
    """As much of `Sharded` as loading uses: a key belongs to the rank `key % size`."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def owner(self, keys: torch.Tensor) -> torch.Tensor:
        return keys % self.size


def into_one_folder(rank: int, size: int, folder: str) -> list[str]:
    """What each rank hears: all into one folder, each into its own, and beside a spread table."""
    said = []
    whole = DynamicEmbedding(4, "whole", shard=False)
    whole(torch.arange(8).view(2, 4) + 100 * rank)
    spread = nn.ModuleList([whole, DynamicEmbedding(4, "spread")])
    for model, where in ((whole, "one"), (whole, f"rank{rank}"), (spread, "spread")):
        try:
            save(model, f"{folder}/{where}")
            said.append("")
        except UsageError as error:
            said.append(error.problem)
        dist.barrier()
    return said


def test_ranks_do_not_overwrite_each_others_tables(tmp_path: Path) -> None:
    found = worlds.run([2], into_one_folder, str(tmp_path))
    one = [said[0] for said in found]
    assert any("saves its own to" in text for text in one), one
    assert [said[1] for said in found] == ["", ""]
    assert all("others are spread over them" in said[2] for said in found), found
