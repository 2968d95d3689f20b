"""Every command that the guide shows runs: see `blocks` for what the marks of a block mean."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evener.cli import evener
from evener.errors import UsageError
from evener.tools import lab
from evener.tools.quickstart.command import KINDS
from tests.conftest import START
from tests.guide.blocks import MARKS, PAGES, ROOT, Block, blocks, commands, evener_words
from tests.guide.walk import RUNS, Walk, environment, go_through

NO_LAB = lab.unavailable()
RUN = {page: [b for b in blocks(page) if b.mark in RUNS] for page in PAGES}
QUICKSTART = ROOT / "docs/guide/quickstart.md"
MOST_LINES = 8
ALL = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="session")
def readers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[Walk]]]:
    """Readers who go through the pages that are tested, two at a time.

    Most of a block's time is one process that imports torch, so two pages side by side take little
    longer than one.
    """
    # Copied now: tests that run meanwhile change this process' own.
    compiled = str(tmp_path_factory.mktemp("compiled"))
    # A reader's, but for what makes Python start sooner: start/sitecustomize.py.
    more = {"EVENER_COMPILE_DIR": compiled, "PYTHONPATH": START}
    env = environment(Path(sys.executable).parent, **more)
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    pages = [call.params["page"] for call in calls if call and "page" in call.params]
    with ThreadPoolExecutor(2) as pool:
        yield {
            page: pool.submit(
                go_through, page, env, tmp_path_factory.mktemp(page.stem), str(NO_LAB or "")
            )
            for page in dict.fromkeys(pages)
            if page in PAGES
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", [p for p in PAGES if RUN[p]], ids=lambda p: p.stem)
def test_the_commands_of_a_page_run(page: Path, readers: dict[Path, Future[Walk]]) -> None:
    skipped = readers[page].result().skipped
    if len(skipped) == len(RUN[page]):
        pytest.skip("; ".join(skipped))


@pytest.mark.parametrize("page", [QUICKSTART], ids=["quickstart"])
def test_the_first_projects_learn_and_say_little(
    page: Path, readers: dict[Path, Future[Walk]]
) -> None:
    """Each by the command that `evener quickstart` prints, which the page shows."""
    printed = readers[page].result().printed
    assert len(printed) == len(KINDS)
    for kind, text in zip(("ddp", "fsdp", "one-gpu", "tensorflow"), printed, strict=True):
        losses = [float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", text)]
        assert len(losses) >= 2 and losses[-1] < losses[0], text
        said = [line for line in text.splitlines() if re.match(r"(\[\d+@\w+\] )?evener", line)]
        assert len(said) <= MOST_LINES, "\n".join(said)
        if kind in ("ddp", "fsdp"):
            assert any("goes on with Evener" in line for line in said), text


@pytest.mark.parametrize("block", [b for b in ALL if b.mark == "output"], ids=str)
def test_a_first_run_says_little(block: Block) -> None:
    said = [x for x in block.text.splitlines() if re.match(r"(\[\d+@\w+\] )?evener", x)]
    assert len(said) <= MOST_LINES, "\n".join(said)


def parsed(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` name, and what is left for it."""
    command: click.Command = evener
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(click.Context(command), name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        command = found
    return command, words


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that commands of the guide name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/asterfusion/map.yaml", tmp_path / "map.yaml")
    for name in ("nccl.*.log", "step.json", "steps.json", "train.py", "hosts.sh"):
        (tmp_path / name).touch(0o755)
    for name in ("DIR", "stats"):
        (tmp_path / name).mkdir()
    for block in ALL:
        if block.mark == "file":
            (tmp_path / block.argument).write_text(block.text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.language == "sh" and b.mark in ("cluster", "run")], ids=str
)
def test_evener_takes_the_command_line(
    block: Block, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    # What may not be reached by a dry run: any other host.
    monkeypatch.setenv("PATH", f"{desk}:{os.environ['PATH']}")
    (desk / "ssh").write_text("#!/bin/sh\necho reached >> ssh.log\nexit 1\n")
    (desk / "ssh").chmod(0o755)

    def execv(program: str, argv: list[str]) -> None:
        """Instead of becoming the launcher: only for a dry run of it."""
        assert "--dry-run" in argv[: argv.index("-np")]
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    for words in commands(block.text):
        given = evener_words(words)
        if given is None:
            continue
        given = [word.replace("/shared/stats", "stats") for word in given]
        command, rest = parsed(given)
        with contextlib.suppress(click.exceptions.Exit):  # --version and its like end there
            command.make_context(command.name, list(rest))
        names = [name for parameter in command.params for name in parameter.opts]
        if "--dry-run" in names and block.mark == "cluster":
            done = CliRunner().invoke(command, ["--dry-run", *rest])
            assert done.exit_code == 0, f"{block}: {words}\n{done.output}\n{done.exception!r}"
    assert not (desk / "ssh.log").exists(), f"{block}: a dry run asked another host"


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.language == "python" and b.mark == "piece"], ids=str
)
def test_pieces_of_scripts_name_what_there_is(block: Block) -> None:
    compile(block.text, str(block), "exec")
    for name in re.findall(r"\bevener(?:\.[a-z_]+)+", block.text):
        parts = name.split(".")
        found = importlib.import_module("evener")
        for part in parts[1:]:
            if not hasattr(found, part):
                try:
                    importlib.import_module(f"{found.__name__}.{part}")
                except UsageError as missing:
                    # The module is there; the framework that it is for is not.
                    assert "install" in missing.fix
                    break
            found = getattr(found, part)


def test_every_block_says_what_is_done_with_it() -> None:
    for block in ALL:
        assert block.mark in MARKS, f"{block}: {block.mark!r} is none of {MARKS}"
        assert block.mark != "skip" or block.argument, f"{block}: skipped without a reason"
        assert block.language != "sh" or block.mark != "piece", f"{block}: mark it: {MARKS}"
        if not block.language:
            named = re.search(r"^(evener|mpirun|torchrun|python|make) ", block.text, re.MULTILINE)
            assert not named, f"{block}: commands in a fence without a language"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block in ALL:
        for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{block}: make {target}"


def test_the_lossless_way_comes_first() -> None:
    """What a reader copies first from each page changes no arithmetic."""
    for page in ("README.md", "docs/guide/ddp.md", "docs/guide/horovod.md"):
        launches = [
            words
            for block in blocks(ROOT / page)
            if block.language == "sh"
            for line in commands(block.text)
            if (words := evener_words(line)) and words[0] == "launch"
        ]
        assert launches, f"{page} shows no launch"
        before_program = launches[0][: launches[0].index("python")]
        lossy = ("--floor", "LIGHT_TOPK", "LIGHT_FP16", "EVENER_DDP=")
        assert not [w for w in before_program if w.startswith(lossy)], f"{page}: {launches[0]}"


def test_the_recipes_of_contributing_name_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^### Add (.+?)\n(.+?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL))
    wanted = {"form", "finding", "optimizer", "plug-in interface", "Horovod operation"}
    assert all(any(word in title for title in recipes) for word in wanted), recipes.keys()
    for title, recipe in recipes.items():
        named = re.findall(r"`((?:python|crates|tests|benchmarks|scripts)/[\w/.-]+)`", recipe)
        missing = [path for path in named if not (ROOT / path).exists()]
        assert named or "wild" in recipe, f"Add {title}: names no file"
        assert not missing, f"Add {title}: {missing}"
