"""The text that `evener analyze` prints: the verdict, then each finding, plain when piped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from evener.tools.analyze.findings import Finding
from evener.tools.analyze.findings.base import FOLLOWS
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.report.verdict import facts, verdict
from evener.tools.analyze.words import count

_COLOURS = {"problem": "red", "warning": "yellow", "note": "blue"}
_SHOWN = 5


def terminal(picture: Picture, findings: list[Finding], width: int = 96) -> str:
    """Lines with colours; click.echo removes them where the output is not a terminal."""
    return "\n".join(_lines(picture, findings, width)) + "\n"


def _lines(picture: Picture, findings: list[Finding], width: int) -> Iterator[str]:
    yield click.style(verdict(picture, findings), bold=True)
    known = facts(picture)
    if known:
        yield ""
    for name, value in known:
        yield from textwrap.wrap(
            f"{name:<12} {value}", width, subsequent_indent=" " * 13, break_on_hyphens=False
        )
    failed = any(finding.root > FOLLOWS for finding in findings)
    apart = False
    for number, finding in enumerate(findings, 1):
        yield ""
        if failed and not finding.root and not apart:
            apart = True
            yield "Also seen, and no reason for it:"
            yield ""
        mark = click.style(f"{finding.severity}:", fg=_COLOURS[finding.severity], bold=True)
        yield f"{number}. {mark} {finding.title}  [{finding.id}, {finding.confidence}]"
        yield from _wrap(finding.detail, width)
        places = [picture.run.cite(where) for where in finding.evidence]
        for name, text in (
            ("seen", ", ".join(places[:_SHOWN])),
            ("do", finding.do),
            ("expect", finding.expect),
        ):
            if text:
                yield from _wrap(f"{name + ':':<8}{text}", width, "        ")
        if finding.command:
            yield f"     $ {finding.command}"  # never wrapped: it is there to be copied
    run = picture.run
    yield ""
    yield (
        f"{count(run.lines, 'line')} read, {run.nccl_lines} of NCCL, "
        f"{run.unknown} of them not understood."
    )


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width - 3,
        initial_indent="   ",
        subsequent_indent="   " + indent,
        break_on_hyphens=False,
    )
