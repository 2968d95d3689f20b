"""How Evener's pages of one measurement begin: a title, and the style that they share.

A page is one HTML file that needs nothing from elsewhere: no script, no font, no picture. It is
read on a screen, on a phone and on paper. Drawings come twice, `.wide` and `.narrow`, as text in a
drawing shrinks with it.
"""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --quiet: #57606a;
        --rule: #d0d7de; --grid: #e3e7eb; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --quiet: #9198a1; --rule: #3d444d; --grid: #262c34; }
  svg rect, svg polyline, svg circle, .key, .bar i { filter: brightness(1.35); }
}
body { margin: 0; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 0 20px 60px; }
header { border-bottom: 3px solid var(--ink); padding: 28px 0 18px; }
header p { margin: 0; color: var(--quiet); } h1 { font-size: 1.6rem; margin: 4px 0 0; }
h2 { font-size: 1.2rem; margin: 36px 0 10px; border-bottom: 1px solid var(--rule);
     overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { text-align: right; padding: 2px 14px 2px 0; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid var(--rule); }
.scroll { overflow-x: auto; } svg { width: 100%; display: block; } .narrow { display: none; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg line { stroke: var(--grid); }
@media screen and (max-width: 600px) {
  .wide { display: none; } .narrow { display: block; }
  main { padding: 0 14px 40px; } h1 { font-size: 1.3rem; }
  table { font-size: .8rem; } td, th { padding-right: 7px; }
}
"""


def opening(title: str, style: str = "") -> str:
    """From the doctype to `<main>`, which the page closes. `title`: plain text. `style`: CSS of
    this page alone; it comes last."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style></head><body><main>"
    )
