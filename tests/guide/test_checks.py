"""The checks of pages and imports find what they are for."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.guide import outputs
from tests.guide.blocks import ROOT


def test_a_page_of_the_site_keeps_its_links_to_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = script("site")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "See [b](b.md#there), [code](x.py), [it](#here).\n- one\n- two\n"
        "```sh run: exits 1\n[b](x.py)\n- three\n```\n"
    )
    assert site.staged(Path("a.md"), {Path("a.md"), Path("b.md")}) == (
        "See [b](b.md#there), code, [it](#here).\n\n- one\n- two\n```sh\n[b](x.py)\n- three\n```\n"
    )


def test_output_is_compared_without_its_numbers_and_its_order() -> None:
    page = "[0@a] evener 0: 2 ranks, 1.2 MB\nstep 50: loss 0.96\n"
    assert outputs.same(page, "step 50: loss 1.03\n[0@a] evener 0: 2 ranks, 1.25 MB\n")
    assert outputs.same(page, page + "I0000 00:00:1.2 1 port.cc:153] oneDNN\n")
    assert not outputs.same(page, page + "[0@a] evener 0: warning: another line\n")
    assert not outputs.same(page, "step 50: loss 0.96\n")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DOCS = "docs"  # apart from the rest of a path, or the check would look for these pages here
GOOD = "# Home\n\nSee [there](guide/there.md#a-place-twice-1).\n"
THERE = "# There\n\n## A place twice\n\n## A place: twice\n\nBack [home](../README.md).\n"


@pytest.mark.parametrize(
    ("page", "text", "said"),
    [
        (f"{DOCS}/guide/there.md", THERE, None),
        (f"{DOCS}/guide/there.md", THERE + "[x](lost.md)\n", "lost.md leads nowhere"),
        (f"{DOCS}/README.md", GOOD.replace("-1)", "-2)"), "no heading for #a-place-twice-2"),
        (f"{DOCS}/guide/alone.md", "# Alone\n", "no page links to it"),
        (f"{DOCS}/guide/there.md", THERE + "word " * 41 + ".\n", "a sentence of 41 words"),
        (f"{DOCS}/guide/there.md", THERE + "word " * 40 + ".\n", None),
        (f"{DOCS}/guide/there.md", THERE + "- word\n" * 41, None),
        (f"{DOCS}/guide/there.md", THERE + "\n" * 400, "lines, 400 at most"),
        (f"{DOCS}/guide/there.md", THERE + "Two streams a communicator.\n", "write per"),
        (f"{DOCS}/guide/there.md", THERE + "`code.py::test_b`\n", "code.py has no test_b"),
        (f"{DOCS}/guide/there.md", THERE + "`code.py::test_a`\n", None),
        ("code.py", f"# {DOCS}/gone.md\n", f"{DOCS}/gone.md is not there"),
    ],
)
def test_pages(
    page: str, text: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    for name, content in {
        f"{DOCS}/README.md": GOOD,
        f"{DOCS}/guide/there.md": THERE,
        "code.py": "def test_a(): ...\n",
        page: text,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    check = script("check_docs")
    pages = check.tracked("*.md")
    problems = [*check.check_links(pages), *(p for page in pages for p in check.check_text(page))]
    if said is None:
        assert problems == []
    else:
        assert len(problems) == 1 and said in problems[0], problems


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""So many."""\n', []),
        ('x = f"{n} ranks a node"\n', ["ranks a node"]),
        ('def f():\n    """Hardly."""\n    say("of late")\n', ["of late"]),
        ('@click.command()\ndef f():\n    """Hardly."""\n', ["Hardly"]),
    ],
)
def test_words_that_the_program_says(source: str, words: list[str], tmp_path: Path) -> None:
    module = tmp_path / "a.py"
    module.write_text(source)
    problems = list(script("check_docs").check_said(module))
    assert [next(w for w in words if repr(w) in p) for p in problems] == words


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("a.py", "x = 1  # so many\n", 1),
        ("a.py", 'def f():\n    """Good.\n\n    Of late.\n    """\n', 4),
        ("a.py", 'def f():\n    """`of late` is a name."""\n    return "# of late"\n', 0),
        ("a.rs", "/// One stream.\nfn f() {} // two bytes per step, one line a step\n", 2),
        ("a.rs", 'fn f() -> &str { "x://hardly" }\n', 0),
    ],
)
def test_words_of_comments(name: str, source: str, line: int, tmp_path: Path) -> None:
    module = tmp_path / name
    module.write_text(source)
    problems = list(script("check_docs").check_comments(module))
    assert [problem.split(":")[1] for problem in problems] == ([str(line)] if line else [])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"comm/a.py": "from evener.errors import E\n"}, None),
        (
            {"comm/a.py": "from evener.tools.launch import x\n"},
            "pillar comm imports tool tools.launch",
        ),
        ({"comm/a.py": "def f():\n    import evener.ddp\n"}, "pillar comm imports door ddp"),
        ({"comm/a.py": "from evener.net import x\n"}, "pillar comm imports pillar net"),
        ({"novel/a.py": ""}, "novel has no level"),
        ({"horovod/runner/a.py": "from evener.tools.launch import x\n"}, None),
        (
            {"horovod/a.py": "from evener.tools.launch import x\n"},
            "door horovod imports tool tools.launch",
        ),
        ({"zero/a.py": "from evener.comm import x\nfrom evener.comm.b import y\n"}, None),
        ({"zero/a.py": "from evener.comm import z\n"}, "z is not in __all__ of evener.comm"),
        ({"zero/a.py": "from evener.comm.c import z\n"}, "c is not in __all__ of evener.comm"),
        (
            {"comm/a.py": "from evener.comm import b\n", "comm/b.py": "import evener.comm.a\n"},
            "circle: evener.comm.a > evener.comm.b > evener.comm.a",
        ),
        (
            {
                "comm/a.py": "from evener.comm import b\n",
                "comm/b.py": "def f():\n    from evener.comm.a import x\n",
            },
            "circle: evener.comm.a > evener.comm.b > evener.comm.a",
        ),
        (
            {
                "comm/a.py": "from evener.comm import b\n",
                "comm/b.py": "if TYPE_CHECKING:\n    from evener.comm.a import x\n",
            },
            "circle: evener.comm.a > evener.comm.b > evener.comm.a",
        ),
    ],
)
def test_imports(
    files: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = script("check_imports")
    monkeypatch.setattr(check, "KNOWN", {})
    monkeypatch.setattr(check, "USES", {("horovod.runner", "tools.launch"), ("zero", "comm")})
    empty = ("zero", "net", "ddp", "tools", "horovod", "horovod/runner")
    content = {"__init__.py": "", **{f"{name}/__init__.py": "" for name in empty}}
    content |= {"comm/__init__.py": '__all__ = ["b", "x"]\n', "comm/b.py": "", "comm/c.py": ""}
    content |= {
        "tools/launch/__init__.py": '__all__ = ["x"]\n',
        "net/__init__.py": '__all__ = ["x"]\n',
    }
    for name, text in {**content, **files}.items():
        path = tmp_path / "evener" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = check.modules(tmp_path / "evener")
    checks = (check.without_level, check.directions, check.faces, check.circles)
    problems = [p for each in checks for p in each(known) if "any more" not in p]
    assert [said in p for p in problems] == ([True] if said else []), problems
