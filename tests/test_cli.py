"""The command line itself: help without torch, errors without a traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from evener import cli


def evener(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from evener.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_no_help_imports_torch() -> None:
    """Checks all commands in one process: torch alone would take seconds."""
    code = """
import sys
import click
from evener.cli import evener

def leaves(command, path=()):
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from leaves(command.get_command(click.Context(command), name), (*path, name))
    else:
        yield path

for path in [(), *leaves(evener)]:
    try:
        evener([*path, "--help"])
    except SystemExit as end:
        assert end.code == 0, path
    assert not {"torch", "numpy", "evener._native"} & {*sys.modules}, path
assert len([*leaves(evener)]) > 30
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_settings_as_json() -> None:
    shown = evener("settings", "--json", LIGHT_TOPK_RATIO="0.001")
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["LIGHT_TOPK_RATIO"]["value"] == "0.001"
    assert rows["LIGHT_TOPK_RATIO"]["set"]


def test_a_key_is_not_shown() -> None:
    done = evener("settings", EVENER_RUN='[[["127.0.0.1", 1]], "5ecret"]')
    assert "EVENER_RUN=<hidden>" in done.stdout
    assert "5ecret" not in done.stdout


def test_a_wrong_value_is_two_lines_and_exit_status_2() -> None:
    shown = evener("settings", LIGHT_TOPK_RATIO="7")
    assert shown.returncode == 2
    assert "LIGHT_TOPK_RATIO='7'" in shown.stderr
    assert "fix: " in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("verb", ["frobnicate"])
def test_an_unknown_verb_is_refused(verb: str) -> None:
    assert evener(verb).returncode == 2


@pytest.mark.parametrize(
    ("line", "problem", "fix"),
    [
        ("lauch -np 2 true", "evener has no command 'lauch'", "`evener launch -np 2 true`"),
        ("bench trian", "has no command 'trian'", "`evener bench train`"),
        ("lab rn -- true", "no such command 'rn'", "did you mean run?"),
        ("net statts", "no such command 'statts'", "did you mean stats?"),
        (
            "launch --dry-rn -np 2 -H gpu1:1 true",
            "evener launch has no option --dry-rn",
            "--dry-run",
        ),
        ("launch --hots gpu1:1 true", "evener launch has no option --hots", "--hosts"),
        ("horovodrun --verbos -np 2 true", "horovodrun has no option --verbos", "--verbose"),
        ("doctor --peeer gpu1", "evener doctor has no option --peeer", "--peer"),
        ("plan --netwrk 25gbit", "evener plan has no option --netwrk", "--network"),
        ("help launch", "evener has no command 'help'", "`evener launch --help`"),
        ("help", "evener has no command 'help'", "`evener --help`"),
        ("version", "evener has no command 'version'", "`evener --version`"),
        ("bench help train", "evener bench has no command 'help'", "`evener bench train --help`"),
        ("--verison", "evener has no option --verison", "--version"),
        ("launch -np x true", "'x' is not a valid integer", "evener launch --help"),
        ("launch -np 2", "missing argument", "evener launch --help"),
    ],
)
def test_what_is_mistyped_gets_a_suggestion_and_reaches_no_host(
    line: str, problem: str, fix: str, tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"  # would say that it was called
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    ssh.chmod(0o755)
    done = evener(*line.split(), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    first, second = done.stderr.strip().splitlines()[-2:]
    assert first.startswith("error: ") and problem in first
    assert second.startswith("  fix: ") and fix in second
    assert not done.stdout
    assert not (tmp_path / "called").exists()


def leaves(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from leaves(found, (*path, name))
    else:
        yield path, command


PLAIN = (click.types.StringParamType, click.types.UnprocessedParamType, click.Path)


def mistakes() -> Iterator[tuple[str, ...]]:
    """For every command an option that is none; for its options no value, and one that is none."""
    for path, command in leaves(cli.evener):
        yield (*path, "--no-such-option")
        for option in command.params:
            if not isinstance(option, click.Option) or option.is_flag or option.nargs != 1:
                continue
            yield (*path, option.opts[0])
            if not isinstance(option.type, PLAIN):
                yield (*path, option.opts[0], "no-such-value")


def test_every_option_refuses_in_a_line_what_it_cannot_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = 0
    for words in mistakes():
        if words == ("doctor", "--serve"):
            continue  # its port may be left out
        monkeypatch.setattr(sys, "argv", ["evener", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        lines = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and lines[0].startswith("error: "), (words, lines)
        assert len(lines) <= 2, (words, lines)
        tried += 1
    assert tried > 800


def test_a_group_alone_shows_its_help() -> None:
    done = evener("lab")
    assert done.returncode == 2
    assert "Simulated clusters" in done.stderr
    assert "error:" not in done.stderr


def test_names_that_are_nearly_settings_are_warned_of() -> None:
    done = evener("settings", EVENER_TIMOUT="5", LIGHT_TOPK_ALLREDCE="1")
    assert done.returncode == 0
    assert "EVENER_TIMOUT is not a setting and has no effect; EVENER_TIMEOUT is one" in done.stderr
    assert "LIGHT_TOPK_ALLREDUCE is one" in done.stderr
    given = ("-np", "1", "-x", "EVENER_TIMOUT=5", "--dry-run", sys.executable)
    assert "-x EVENER_TIMOUT" in evener("launch", *given).stderr
    code = "from evener.base import log; log.set_rank(0); log.set_rank(0)"
    env = {**os.environ, "EVENER_TIMOUT": "5"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.count("EVENER_TIMEOUT is one") == 1


@pytest.mark.parametrize("line", ["--help", "launch --help"])
def test_help_and_completion_import_little(line: str) -> None:
    """What makes the first 0.2 s of every command: nothing heavy, whatever machine it is."""
    heavy = {"torch", "numpy", "rich", "plotly", "jinja2", "pyroute2", "asyncio"}
    code = (
        "import sys\nfrom evener.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(' '.join(sys.modules))"
    )
    asked = {"_EVENER_COMPLETE": "bash_complete", "COMP_WORDS": "evener ", "COMP_CWORD": "1"}
    for env in ({}, asked):
        command = [sys.executable, "-c", code, *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
        assert not heavy & {*done.stderr.split()}
        assert "launch" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    done = evener("completion", shell)
    assert done.returncode == 0 and f"_EVENER_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=done.stdout, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
