"""What was gathered of a job, as a zip; and its verdict, by the code of `evener analyze`."""

from __future__ import annotations

import json
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.tools.analyze import (
    Finding,
    Picture,
    collect,
    document,
    picture,
    run_checks,
    terminal,
)

_TRIES = 100


def keep(folder: Path, files: Mapping[str, str]) -> Path:
    """Write `files` into a new evener-why-TIME.zip in `folder`. Raises OSError as files do."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(_TRIES):
        path = folder / f"evener-why-{stamp}{f'-{number}' if number else ''}.zip"
        try:
            with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
                for name, text in sorted(files.items()):
                    archive.writestr(name, text)
        except FileExistsError:  # noqa: S112 - taken: the next name
            continue
        return path
    raise FileExistsError(f"{_TRIES} bundles of one second")


class Verdict:
    """What a bundle says."""

    def __init__(self, path: Path) -> None:
        self.picture: Picture = picture(collect([path]), None)
        self.findings: list[Finding] = run_checks(self.picture)

    @property
    def first(self) -> Finding | None:
        """The finding that explains the rest, None where there is none."""
        known = [finding for finding in self.findings if finding.severity != "note"]
        return known[0] if known else None

    def text(self) -> str:
        """For a terminal: the first finding whole, the others by their titles."""
        first = self.first
        if first is None:
            return "nothing here says why; the bundle holds all that was seen"
        lines = [first.title]
        if first.detail:
            lines.append(f"  why   {first.detail}")
        if first.do:
            lines.append(f"  do    {first.do}")
        if first.command:
            lines.append(f"        {first.command}")
        lines += [
            f"  also  {finding.title}"
            for finding in self.findings
            if finding is not first and finding.severity == "problem"
        ][:4]
        return "\n".join(lines)

    def whole(self) -> str:
        """As `evener analyze` prints it."""
        return terminal(self.picture, self.findings)

    def document(self) -> dict[str, Any]:
        """As `evener analyze --json` writes it."""
        found: dict[str, Any] = json.loads(json.dumps(document(self.picture, self.findings)))
        return found


def moving(files: Mapping[str, str]) -> set[str]:
    """What is wrong with a job that moves: the ids of findings about it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        (Path(folder) / "watch.json").write_text('{"evener_watch": 1, "moving": true}')
        found = {finding.id for finding in Verdict(Path(folder)).findings}
    return found & {"cause.slow-rank", "cause.clock"}
