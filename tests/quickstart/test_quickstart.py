"""`evener quickstart` and evener.toml. tests/guide/test_pages.py runs the projects of its page."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evener.errors import UsageError
from evener.tools.launch.command import launch
from evener.tools.launch.config import read
from evener.tools.quickstart import PROJECTS
from evener.tools.quickstart.command import KINDS, quickstart


def write(kind: str, folder: Path) -> None:
    done = CliRunner().invoke(quickstart, [kind, str(folder)])
    assert done.exit_code == 0, done.output


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write("ddp", tmp_path)
    before = (tmp_path / "train.py").read_text()
    done = CliRunner().invoke(quickstart, ["fsdp", str(tmp_path)])
    assert isinstance(done.exception, UsageError) and "not empty" in done.exception.problem
    assert (tmp_path / "train.py").read_text() == before


def test_it_says_which_packages_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for kind, extra in (("tensorflow", "tensorflow"), ("ddp", "torch")):
        done = CliRunner().invoke(quickstart, [kind, str(tmp_path / kind)])
        assert f"pip install 'evener[{extra}]'\n  cd " in done.output, done.output


def test_every_project_is_offered() -> None:
    assert {folder.name for folder in PROJECTS.iterdir() if folder.is_dir()} == set(KINDS)


# --- evener.toml ---


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *typed: str) -> str:
    (folder / "evener.toml").write_text(text)
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(launch, ["--dry-run", *typed])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


TOML = """[launch]
np = 2
hosts = ["gpu1:1", "gpu2:1"]
env = { NCCL_DEBUG = "WARN", DEPTH = 3 }
watch = false
command = ["python", "train.py", "--lr", "0.1"]
"""


def test_options_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = launched(tmp_path, monkeypatch, TOML)
    assert "evener.toml gives np, hosts, env, watch, command" in said
    assert "gpu1" in said and "gpu2" in said and "--nnodes=2" in said
    assert "NCCL_DEBUG=WARN" in said and "DEPTH=3" in said and "python train.py --lr 0.1" in said


def test_what_is_typed_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = launched(tmp_path, monkeypatch, TOML, "-H", "gpu7:2", "python", "other.py")
    assert "gpu7" in said and "gpu1" not in said and "other.py" in said and "train.py" not in said
    (tmp_path / "hosts").write_text("gpu8 slots=2\n")
    said = launched(tmp_path, monkeypatch, TOML, "--hostfile", "hosts")
    assert "gpu8" in said and "gpu1" not in said
    said = launched(tmp_path, monkeypatch, TOML, "--no-config", "-np", "3", "python", "x.py")
    assert "--nproc-per-node=3" in said and "gives" not in said


def test_another_file_and_paths_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "there" / "job.toml"
    file.parent.mkdir()
    file.write_text('[launch]\nhostfile = "hosts"\nmpi = true\ntag = false\n')
    options, words, keys = read(file, launch)
    assert options == {"hostfile": file.parent / "hosts", "launcher": "mpirun", "tag": False}
    assert not words and keys == ["hostfile", "mpi", "tag"]


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("[lunch]\nnp = 2", "lunch is not a table", "launch"),
        ("[launch]\nhostfiles = 'x'", "hostfiles is not a key of [launch]", "hostfile"),
        ("[launch]\nmin_np = 1", "min_np is not a key", "min-np"),
        ("[launch]\nxyzzy = 1", "xyzzy is not a key", "known: "),
        ("[launch]\nnp = 'two'", "np = 'two'", "--help"),
        ("[launch]\nnp = 0", "np = 0", "--help"),
        ("[launch]\nnp = true", "np = True", "number"),
        ("[launch]\nnp = [1, 2]", "np = [1, 2]", "brackets"),
        ("[launch]\nddp = 'yes'", "ddp = 'yes'", "true or false"),
        ("[launch]\nenv = 'A=1'", "env = 'A=1'", "NAME"),
        ("[launch]\nmpi = true\ntorchrun = true", "torchrun and another key", "one of them"),
        ("[launch]\ncommand = 3", "command = 3", "train.py"),
        ("launch = 3", "launch is not a table", "[launch]"),
        ("np == 3", "is not TOML", "NAME = VALUE"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(
    text: str, problem: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as refused:
        launched(tmp_path, monkeypatch, text, "-np", "1", "python", "train.py")
    assert "evener.toml" in refused.value.problem and problem in refused.value.problem
    assert fix in refused.value.fix


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(launch, ["--config", "none.toml", "python", "train.py"])
    assert isinstance(done.exception, UsageError) and "none.toml" in done.exception.problem
    done = CliRunner().invoke(launch, ["-np", "2"])
    assert isinstance(done.exception, UsageError) and "no program" in done.exception.problem


def test_every_option_has_a_key() -> None:
    for parameter in launch.params:
        if isinstance(parameter, click.Option):
            assert [name for name in parameter.opts if len(name.lstrip("-")) > 1], parameter.opts
