"""Tables in torch.distributed.checkpoint: what another number of ranks saved.

`torch.distributed.checkpoint.save` needs nothing of this: each rank's rows have a name of their own
(`state.RankRows`), and so does each rank's part when as many ranks load. Other ranks must find the
names that the checkpoint has, which a planner knows.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from evener.embedding.torch.state import RankRows, own_rows
from evener.embedding.torch.table import Table

_PART = re.compile(r"\d+-of-\d+")


class TableLoadPlanner(DefaultLoadPlanner):
    """Let any number of ranks load: `torch.distributed.checkpoint.load(..., planner=this)`.

    Each rank reads the parts one after another and keeps of each the rows that it owns, so it holds
    one part beside its own rows. All else is as in torch's DefaultLoadPlanner.
    """

    def create_local_plan(self) -> LoadPlan:
        """Ask for all parts of a table where this rank's own is not there."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        self._parts: dict[str, tuple[Table, str, dict[str, bytes]]] = {}
        for name, rows in list(self.state_dict.items()):
            if not isinstance(rows, RankRows) or name in saved:
                continue
            before, _, _ = name.rpartition(".")
            parts = [n for n in saved if n.rpartition(".")[0] == before]
            parts = [n for n in parts if _PART.fullmatch(n.rpartition(".")[2])]
            if not parts:
                continue  # torch's plan says what is missing
            del self.state_dict[name]
            place: Any = self.original_state_dict
            for key in self.mappings[name][:-1]:
                place = place[key]
            found: dict[str, bytes] = {}
            place[self.mappings[name][-1]] = found
            for each in parts:
                self._parts[each] = (rows.table, each.rpartition(".")[2], found)
        plan: LoadPlan = super().create_local_plan()
        return dataclasses.replace(plan, items=[*plan.items, *map(_whole, self._parts)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep what this rank owns of a part."""
        if read_item.dest_index.fqn not in self._parts:
            super().load_bytes(read_item, value)
            return
        table, part, found = self._parts[read_item.dest_index.fqn]
        found[part] = own_rows(table, torch.load(value, weights_only=True))


def _whole(name: str) -> ReadItem:
    """All bytes of a name."""
    index, none = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
