"""`evener --version`: what a bug report needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener import __version__
from evener.cli import evener
from evener.net import PluginError
from evener.tools import about


def test_version_names_build_and_plugin() -> None:
    lines = CliRunner().invoke(evener, ["--version"]).output.splitlines()
    assert lines[0] == f"evener {__version__}"
    assert lines[1].startswith("build: ") and "abi3" in lines[1]
    assert "versions 6 to 12" in lines[2] and "libnccl-net-evener.so" in lines[2]
    assert lines[3].startswith("runs on: python 3.") and "torch 2." in lines[3]


def test_a_plugin_that_was_not_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise PluginError("it is not there", "build it")

    monkeypatch.setattr(about, "plugin_path", none)
    assert "plug-in: none: it is not there (build it)" in about.describe()


def test_the_page_names_the_extras_of_the_package() -> None:
    root = Path(__file__).parents[1]
    # As pyproject.toml has them: what is installed for development may be older.
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    page = (root / "docs/guide/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `evener\[(\w+)\]`", page, re.MULTILINE)) == declared
    assert {"bench", "tensorflow", "dev"} <= declared
