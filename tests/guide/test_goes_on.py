"""docs/reference/goes-on.md and the code say the same: each line of the page is there, and each
warning is on the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.guide.blocks import ROOT

PAGE = ROOT / "docs/reference/goes-on.md"
CODE = ROOT / "python/evener"
HOLE = "\0"
# Warnings that are not of less than was asked.
OTHER = {
    "horovod/engine.py": "operations that some ranks have not submitted",
    "horovod/tensorflow/_state.py": "the same, and the guard's line, which comes from Rust",
    "horovod/ray/discovery.py": "a discovery for tests that hides hosts, as it was asked to",
}


def rows() -> list[tuple[str, str]]:
    """(the line, the file) of each row."""
    found = []
    for text in PAGE.read_text(encoding="utf-8").splitlines():
        if text.startswith("| ") and not text.startswith(("| asked", "|---")):
            *_, line, file = (cell.strip() for cell in text.strip("|").split(" | "))
            found.append((line.strip("`").strip(), file.strip().strip("`")))
    return found


def text_of(node: ast.AST) -> str:
    """A string with holes where something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+#0-9.]*[a-zA-Z]", HOLE, node.value).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return HOLE


@cache
def texts(file: str) -> list[str]:
    """The strings of a file of Python, or all of one of Rust."""
    if file.endswith(".rs"):
        code = (ROOT / file).read_text(encoding="utf-8")
        return [re.sub(r"\{[\w.:?]*\}", HOLE, re.sub(r"\\\n\s*", "", code))]
    tree = ast.parse((CODE / file).read_text(encoding="utf-8"))
    nodes = ast.walk(tree)
    return [text_of(n) for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr)]


def fits(line: str, text: str) -> bool:
    parts = [re.escape(part) for part in line.split("...") if part]
    return re.search(".*".join(parts) or ".", text, re.DOTALL) is not None


def warnings() -> Iterator[tuple[str, str]]:
    """(file, text) of each call of a logger's `warning`."""
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "warning" and "log" in ast.unparse(node.func.value):
                yield str(path.relative_to(CODE)), text_of(node.args[0])


def test_each_line_of_the_page_is_in_its_file() -> None:
    assert len(rows()) > 100
    gone = [row for row in rows() if not any(fits(row[0], text) for text in texts(row[1]))]
    assert gone == []


def test_each_warning_is_on_the_page() -> None:
    found = [(file, text) for file, text in warnings() if text.strip(HOLE)]
    assert len(found) > 50
    listed = rows()
    missing = [
        (file, text)
        for file, text in found
        if file not in OTHER
        and not any(where == file and fits(line, text) for line, where in listed)
    ]
    assert missing == []


def test_the_comparison_sees() -> None:
    assert fits("falls back from ... to ...", f"step {HOLE}: falls back from {HOLE} to {HOLE}")
    assert not fits("falls back from ... to ...", f"falls {HOLE} to {HOLE}")
    assert not fits("rows stay", "rows go")
