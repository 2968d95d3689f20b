"""HTML pages as a browser of a given width lays them out. Needs chromium; see `browser`."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

WIDTHS = (390, 1280)

# The page stands in a frame, as headless chromium has no window narrower than 500 pixels. What is
# wider than the page, and not inside something that scrolls, is cut off on a phone.
_FRAME = """<!doctype html><body style="margin:0">
<iframe id="page" width="{width}" height="2400" style="border:0" srcdoc="{page}"></iframe>
<pre id="said"></pre>
<script>
addEventListener("load", () => {{
  const inside = document.getElementById("page").contentDocument;
  const cut = [];
  const scrolls = e => {{
    for (let up = e; up && up !== inside.body; up = up.parentElement)
      if (/auto|scroll/.test(getComputedStyle(up).overflowX)) return true;
    return false;
  }};
  for (const e of inside.body.querySelectorAll("*")) {{
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > {width} + 1 || box.left < -1) && !scrolls(e))
      cut.push(e.tagName + ": " + (e.textContent || "").trim().slice(0, 40));
  }}
  document.getElementById("said").textContent = JSON.stringify(
    {{width: inside.documentElement.scrollWidth, cut: cut, text: inside.body.innerText}});
}});
</script>"""


def browser() -> str | None:
    """chromium, where it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def lay_out(page: str, width: int, folder: Path, picture: Path | None = None) -> dict[str, object]:
    """`width` that the page takes, `cut`: what is wider than it may be, `text` that is seen."""
    program = browser()
    assert program is not None
    frame = folder / f"frame-{width}.html"
    frame.write_text(_FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},2400"]
    if picture is not None:
        subprocess.run([*command, f"--screenshot={picture}", frame.as_uri()],
                       check=True, capture_output=True, timeout=90)  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", frame.as_uri()],
                          check=True, capture_output=True, text=True, timeout=90)  # fmt: skip
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None, done.stdout[-500:]
    found: dict[str, object] = json.loads(html.unescape(said[1]))
    return found
