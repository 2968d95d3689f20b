"""A checkpoint replaces the one before, also where the folder itself cannot be renamed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from evener.pipeline import checkpoint


def write(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(folder.name)
    return folder


@pytest.mark.parametrize("mounted", [False, True])
def test_a_new_checkpoint_replaces_the_old(
    mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", "model-1-of-2", "index", "mine.txt")
    part = write(tmp_path / "run.part", "model-1-of-1", "index")
    rename = Path.rename

    def busy(self: Path, target: Path) -> Path:
        if self == folder:  # what a volume that is mounted there gives
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    if mounted:
        monkeypatch.setattr(Path, "rename", busy)
    checkpoint.publish(part, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["index", "model-1-of-1"]
    assert (folder / "index").read_text() == "run.part"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
