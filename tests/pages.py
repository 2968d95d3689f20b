"""HTML pages as a browser of a given width lays them out. Needs chromium; see `browser`."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

WIDTHS = (390, 1280)  # pixels: a phone, a laptop

# The page stands in one frame per width, as headless chromium has no window narrower than 500
# pixels, and as starting it once is cheaper. What is wider than the page, and not inside something
# that scrolls, is cut off on a phone.
_FRAME = """<!doctype html><body style="margin:0">
{frames}
<pre id="said"></pre>
<script>
addEventListener("load", () => {{
  const measure = (inside, width) => {{
    const cut = [], sideways = [];
    const scrolls = e => {{
      for (let up = e; up && up !== inside.body; up = up.parentElement)
        if (/auto|scroll/.test(getComputedStyle(up).overflowX)) return true;
      return false;
    }};
    for (const e of inside.body.querySelectorAll("*")) {{
      const box = e.getBoundingClientRect();
      if (box.width && (box.right > width + 1 || box.left < -1) && !scrolls(e))
        cut.push(e.tagName + ": " + (e.textContent || "").trim().slice(0, 40));
      if (/auto|scroll/.test(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1)
        sideways.push(e.firstElementChild ? e.firstElementChild.tagName.toLowerCase() : "");
    }}
    const letters = [...inside.querySelectorAll("svg text")].filter(e => e.getClientRects().length)
      .map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().d);
    return {{width: inside.documentElement.scrollWidth, cut: cut, sideways: sideways,
             letters: Math.min(...letters, 99), text: inside.body.innerText}};
  }};
  document.getElementById("said").textContent = JSON.stringify(
    [...document.querySelectorAll("iframe")].map(f => measure(f.contentDocument, Number(f.width))));
}});
</script>"""


@dataclass(frozen=True)
class Layout:
    """A page at one width."""

    width: int  # what it takes
    cut: list[str]  # what is wider than it may be
    sideways: list[str]  # what scrolls sideways: svg, table
    letters: float  # pixels of the smallest letters in its drawings
    text: str  # what is seen


def browser() -> str | None:
    """chromium, where it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


needs_browser = pytest.mark.skipif(not browser(), reason="no chromium (package chromium)")


def lay_out(page: str, folder: Path, picture: Path | None = None) -> dict[int, Layout]:
    """The page at each of WIDTHS. `picture`: where to write a screenshot of all, side by side."""
    program = browser()
    assert program is not None
    frame = folder / "frame.html"
    frames = "".join(
        f'<iframe width="{width}" height="2400" style="border:0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width in WIDTHS
    )
    frame.write_text(_FRAME.format(frames=frames), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={sum(WIDTHS) + 20},2400"]
    if picture is not None:
        subprocess.run([*command, f"--screenshot={picture}", frame.as_uri()],
                       check=True, capture_output=True, timeout=90)  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", frame.as_uri()],
                          check=True, capture_output=True, text=True, timeout=90)  # fmt: skip
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None, done.stdout[-500:]
    found = json.loads(html.unescape(said[1]))
    return {width: Layout(**layout) for width, layout in zip(WIDTHS, found, strict=True)}


def nothing_is_clipped(page: str, folder: Path) -> dict[int, Layout]:
    """Check that a page fits each width, that no drawing scrolls, and that its words are read."""
    layouts = lay_out(page, folder)
    for width, found in layouts.items():
        assert found.width == width
        assert found.cut == []
        assert "svg" not in found.sideways, f"a drawing scrolls sideways at {width} pixels"
        assert found.letters >= 9, f"letters of {found.letters:.1f} pixels at {width} pixels"
    return layouts
