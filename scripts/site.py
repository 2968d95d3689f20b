"""The pages of the repository as a site: search, light and dark, every link checked.

    make site                    # .build/site/index.html
    make site ARGS=--serve       # and serve it on 127.0.0.1:8000

Pages are copied as they lie in the repository, so that their links stay right, and are given what
the site's Markdown needs: fences without the marks of `tests/guide/blocks.py`, and a blank line
before a list. A link to a file that is no page (a test, a script) becomes its text. Reading a page
fetches nothing from other hosts. A link or an anchor that leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
BUILD = ROOT / ".build"
STAGED = BUILD / "site-pages"
PARTS = {
    "First ten minutes": [
        *(f"docs/guide/{name}.md" for name in ("install", "quickstart", "ddp", "fsdp")),
        *(f"docs/guide/{name}.md" for name in ("horovod", "operator", "one-gpu")),
    ],
    "Guide": ["docs/guide/*.md"],
    "When something is wrong": ["docs/troubleshooting.md", "docs/troubleshooting/*.md"],
    "Reference": ["docs/reference/*.md"],
    "API": ["docs/reference/api/*.md"],
    "Benchmarks": ["docs/benchmarks/*.md"],
    "How it is built": ["docs/architecture.md", "docs/architecture/*.md"],
    "Project": ["CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md"],
    "Beside the code": ["compat/**/*.md", "examples/**/*.md", "tests/**/*.md"],
}


def pages() -> list[Path]:
    """All that git knows or would take, apart from what is not for readers of a site."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    left_out = (".github/", "python/")
    return [Path(name) for name in found.splitlines() if not name.startswith(left_out)]


def staged(page: Path, known: set[Path]) -> str:
    """The page's text as the site's Markdown wants it."""
    lines: list[str] = []
    fence = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if mark := re.match(r"\s*(`{3,})(\w*)", line):
            if not fence:
                fence = mark[1]
                line = line[: mark.end()]
            elif line.strip() == fence:
                fence = ""
        elif not fence:
            line = _links(line, page, known)
            if re.match(r"([-*+]|\d+\.) ", line) and lines and _is_paragraph(lines[-1]):
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _is_paragraph(line: str) -> bool:
    return bool(line.strip()) and not re.match(r"\s|[-*+|#<>]|\d+\. |`{3}", line)


def _links(line: str, page: Path, known: set[Path]) -> str:
    def one(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = target.partition("#")[0]
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        there = (ROOT / page.parent / path).resolve().relative_to(ROOT)
        return found[0] if there in known else text

    return re.sub(r"(?<!!)\[([^]]*)\]\(([^)\s]+)\)", one, line)


def configuration(known: set[Path]) -> dict[str, object]:
    """mkdocs.yml."""
    listed: set[Path] = {Path("README.md"), Path("docs/README.md")}
    nav: list[dict[str, object]] = [{"Evener": "README.md"}, {"All pages": "docs/README.md"}]
    for title, patterns in PARTS.items():
        found = [p for pattern in patterns for p in sorted(ROOT.glob(pattern))]
        own = [p.relative_to(ROOT) for p in found]
        own = [p for p in dict.fromkeys(own) if p in known and p not in listed]
        listed |= set(own)
        nav.append({title: [str(p) for p in own]})
    if missing := known - listed:
        raise SystemExit(f"no part of the site lists {', '.join(map(str, sorted(missing)))}")
    toggle = {"icon": "material/brightness-6", "name": "light or dark"}
    return {
        "site_name": "Evener",
        "docs_dir": str(STAGED),
        "site_dir": str(BUILD / "site"),
        "use_directory_urls": False,  # it can be read without a server
        "theme": {
            "name": "material",
            "font": False,
            "features": ["navigation.indexes", "navigation.top", "content.code.copy", "toc.follow"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "toggle": toggle},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "toggle": toggle},
            ],
        },
        # `offline` lets pages be opened as files; search then loads a shim from the internet.
        "plugins": ["search", "offline"],
        "markdown_extensions": [
            "tables",
            "pymdownx.superfences",
            "pymdownx.highlight",
            {"toc": {"permalink": True, "slugify": "SLUGIFY"}},
        ],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"},
        },
        "nav": nav,
    }


def main() -> int:
    """Stage, build, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    known = set(pages())
    shutil.rmtree(STAGED, ignore_errors=True)
    for page in sorted(known):
        (STAGED / page).parent.mkdir(parents=True, exist_ok=True)
        (STAGED / page).write_text(staged(page, known), encoding="utf-8")
    shutil.copytree(ROOT / "docs/images", STAGED / "docs/images")
    text = yaml.safe_dump(configuration(known), sort_keys=False)
    # Anchors as GitHub makes them.
    slug = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
    (BUILD / "mkdocs.yml").write_text(text.replace("SLUGIFY", slug), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "serve" if given.serve else "build", "--strict"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*command, "-f", str(BUILD / "mkdocs.yml")], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
