"""What a page shows as the output of a command, beside what it prints now.

    python -m tests.guide.outputs       write what they print now into all pages

A block ```text output stands behind the block that prints it. Shown are all lines of the program
and of Evener; those of torch and TensorFlow are left out. Times and sizes differ from run to run,
so numbers are not compared, nor is the order of lines, which come from several processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

# Of others, and what a machine with other work on it adds.
_NOT_SHOWN = re.compile(
    r"absl::InitializeLog|^[IWE]\d{4} |To enable the following instructions|"
    r"^(?!evener ).*site-packages|"  # not Evener's own path, in a wheel
    r"^  return func|is interrupted, Evener waits|no overlap across the step|"
    r"expect .* the plan's speed"
)
_TAG = re.compile(r"^\[\d+@[\w.-]+\] ")


def shown(text: str) -> str:
    """The lines that a page shows."""
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if not _NOT_SHOWN.search(_TAG.sub("", line))).strip()


def same(shown_before: str, printed: str) -> bool:
    """Whether a page still shows what is printed."""
    return _normal(shown_before) == _normal(printed)


def _normal(text: str) -> list[str]:
    found = []
    for line in shown(text).splitlines():
        # How two times compare is noise on a small program.
        line = re.sub(r"(\(median of \d+\)): .*", r"\1", line)
        line = re.sub(r"communication (hidden|.* exposed)", "communication", line)
        line = re.sub(r"plan: (kept .*|step .*)", "plan", line)
        line = re.sub(r"is Evener's, from \S+", "is Evener's", line)
        # What is measured at start chooses these.
        line = re.sub(r"stages, \w+, \d+ microbatches of \d+ rows?", "stages", line)
        found.append(re.sub(r"\d[\d.,]*", "0", line))
    return sorted(filter(None, found))


def rewrite(page: Path, printed: Iterable[str]) -> None:
    """Put these outputs, in their order, into the page's blocks."""
    left = iter(printed)
    text = re.sub(
        r"(?ms)^```text output\n.*?^```$",
        lambda _: f"```text output\n{shown(next(left))}\n```",
        page.read_text(encoding="utf-8"),
    )
    page.write_text(text, encoding="utf-8")


def main() -> int:
    from tests.guide.walk import PAGES, environment, go_through

    for page in PAGES:
        if "```text output" in page.read_text(encoding="utf-8"):
            found = go_through(page, environment(Path(sys.executable).parent), check=False)
            rewrite(page, found.printed)
            print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
