"""Check the pages as an outside reader meets them: links, length, sentences, words.

Links and anchors lead somewhere, in Markdown and where code names a page, and tests that a page
names are there. Every page of docs/ is
reached from docs/README.md. No page is longer than 400 lines, README.md not longer than 120. Pages
that say what to do have no sentence of more than 40 words. Words that a reader with English as a
second language stumbles over, or that name twice what has a name, are not used: not in pages, not
in what the program says (help texts, messages, errors), not in comments and docstrings.

    python scripts/check_docs.py
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LONGEST_PAGE = 400
LONGEST_README = 120
MOST_WORDS = 40

# What to do stands in these; reasons and figures stand elsewhere, in longer sentences if they must.
FOR_DOING = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/guide/",
    "docs/troubleshooting",
)

# A rate is written "two streams per communicator".
_COUNTED = (
    "bytes?|steps?|ranks?|streams?|cards?|slots?|rows?|buckets?|GPUs|processes|NICs?|threads?|lines?"
    "|[KMGkm]i?B|ms|us"
)
_EACH = (
    "step|rank|node|host|GPU|parameter|communicator|bucket|card|call|GB|process|server|slot|channel"
    "|path"
)

# What is written > what to write. Case does not matter.
WORDS: dict[str, str] = {
    r"somebody": "name who: you, a user, the planner",
    r"of late": "lately, or the time span",
    r"so many": "the number, or 'this many'",
    r"is no cluster": "is not a cluster",
    r"(of|until) then": "at that time",
    r"cannot be had": "is not there",
    r"in earnest": "and measured",
    r"hardly": "few, or: almost none",
    r"all that there (is|are)": "all",
    r"save (what|that|for)": "except",
    r"all is waited for": "Evener waits for all of it",
    r"wire forms?": "form",
    r"form(s)? on the wire": "form",
    r"on the wire": "between nodes, or on the network",
    r"(images|samples|sequences|tokens)/s an? \w+": "per, as in: images/s per GPU",
    rf"({_COUNTED}) an? ({_EACH})": "per",
    rf"or more an? ({_EACH})": "per",
    r"([KMGkm]?i?B|[Bb]ytes|[Bb]its) an? second": "per",
    r"shall": "must, or the plain verb",
    r"whilst|thereof|thereby|therein|wherein|heretofore": "a plain word",
}
_ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(path for path in map(Path, filter(None, names)) if path.exists())


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) outside of code blocks."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            yield number, line


def anchors(text: str) -> set[str]:
    """What `#...` may name on a page, by GitHub's rule."""
    found: dict[str, int] = {}
    for _, line in prose(text):
        if heading := re.match(r"#{1,6} +(.*)", line):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            found[slug] = found.get(slug, 0) + 1
    return {s if not n else f"{s}-{n}" for s, many in found.items() for n in range(many)}


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line number, target) of what is linked by a relative path or an anchor."""
    for number, line in prose(text):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if not re.match(r"[a-z]+:", target):
                yield number, target


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of what sentences stand in: paragraphs, list items, cells of tables."""
    start, held = 0, ""
    for number, line in [*prose(text), (0, "")]:
        bare = line.strip()
        ends = not bare or bare[0] in "#|<" or re.match(r"([-*+]|\d+\.) ", bare)
        if ends and held:
            yield start, held
            held = ""
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                yield number, cell
        elif bare and not bare.startswith(("<", "#")):
            start = start if held else number
            held = f"{held} {bare}"


def sentences(block: str) -> list[str]:
    """Parts of a block, code and links as one word each."""
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", block))
    plain = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", re.sub(r"^\s*([-*+]|\d+\.) ", "", plain))
    return re.split(r"(?<=[.!?])[)\"*_]*\s+", plain.strip())


def check_links(pages: list[Path]) -> Iterator[str]:
    """Links of pages, and pages that code names."""
    known = {page: anchors(page.read_text(encoding="utf-8")) for page in pages}
    reached = set()
    for page in pages:
        for number, target in links(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = Path(*_normal(page.parent / path)) if path else page
            if path and there != page:
                reached.add(there)
            if target == "#" or not there.exists():
                yield f"{page}:{number}: {target} leads nowhere"
            elif anchor and anchor not in known.get(there, set()):
                yield f"{page}:{number}: {there} has no heading for #{anchor}"
    for page in pages:
        if page.parts[0] == "docs" and page != Path("docs/README.md") and page not in reached:
            yield f"{page}: no page links to it: add it to docs/README.md"
    for page in pages:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for name, test in re.findall(r"`([\w/.-]+\.(?:py|rs))::(\w+)", line):
                there = Path(name).read_text(encoding="utf-8") if Path(name).exists() else ""
                if not re.search(rf"\b(?:def|fn) {test}\b", there):
                    yield f"{page}:{number}: {name} has no {test}"
    for source in tracked("*.py", "*.rs", "*.sh", "Makefile", "*.toml", "*.pyi"):
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            for name in re.findall(r"\bdocs/[\w/-]+\.md\b", line):
                if not Path(name).exists():
                    yield f"{source}:{number}: {name} is not there"


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return parts


def check_text(page: Path) -> Iterator[str]:
    """Length, sentences and words of one page."""
    text = page.read_text(encoding="utf-8")
    limit = LONGEST_README if page == Path("README.md") else LONGEST_PAGE
    lines = len(text.splitlines())
    if lines > limit:
        yield f"{page}: {lines} lines, {limit} at most: make two pages of it"
    if "Made from the" in text[:400]:
        return  # the words are the code's
    if str(page).startswith(FOR_DOING):
        for number, block in blocks(text):
            for sentence in sentences(block):
                words = len(re.findall(r"\b\w[\w'/.,-]*", sentence))
                if words > MOST_WORDS:
                    yield (
                        f"{page}:{number}: a sentence of {words} words, {MOST_WORDS} at most: "
                        f"{sentence[:60].strip()}..."
                    )
    for number, line in prose(text):
        yield from _words(page, number, _bare(line))


def said(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a module may say to users: its strings, and docstrings of commands."""
    tree = ast.parse(source)
    silent = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_command = any(
            "command" in ast.dump(d) or "group" in ast.dump(d)
            for d in getattr(node, "decorator_list", ())
        )
        for child in node.body:
            quiet = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if quiet and not (is_command and child is node.body[0]):
                silent.add(child.value)  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            yield node.lineno, node.value


def check_said(module: Path) -> Iterator[str]:
    """Words of help texts, messages and errors."""
    for number, text in said(module.read_text(encoding="utf-8")):
        yield from _words(module, number, text)


def comments(source: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and docstrings, of Python and of Rust."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".rs":
        for number, line in enumerate(text.splitlines(), 1):
            if found := re.search(r"(?:^|\s)//[/!]?\s?(.*)", line):
                yield number, found[1]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = ast.get_docstring(node, clean=False) or ""
            for number, line in enumerate(words.splitlines(), node.body[0].lineno if words else 0):
                yield number, line


def check_comments(source: Path) -> Iterator[str]:
    """Words of comments and docstrings."""
    whole = source.read_text(encoding="utf-8")
    if not _ANY.search(whole) and not _ANY.search(_bare(whole)):
        return  # nearly all files: no need to take them apart
    for number, text in comments(source):
        yield from _words(source, number, _bare(text))


def _bare(text: str) -> str:
    """Without what stands between backticks."""
    return re.sub(r"`[^`\n]*`", "", text)


def _words(where: Path, number: int, text: str) -> Iterator[str]:
    for pattern, better in WORDS.items():
        if found := re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield f"{where}:{number}: {found[0]!r}: write {better}"


def main() -> int:
    pages = tracked("*.md")
    problems = [*check_links(pages)]
    for page in pages:
        problems += check_text(page)
    for module in tracked("python/evener/**.py"):
        problems += check_said(module)
    for source in tracked("*.py", "*.rs"):
        problems += check_comments(source)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} to mend in the docs", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
