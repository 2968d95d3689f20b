"""What the analysis says of some files: for tests of verdicts."""

from __future__ import annotations

from pathlib import Path

from tests import incidents as made

from evener.tools.analyze import collect, document, page, picture, run_checks, terminal
from evener.tools.analyze.findings import Finding
from evener.tools.analyze.report.verdict import verdict


def ask(tmp_path: Path, *texts: object, names: tuple[str, ...] = ()) -> tuple[str, list[Finding]]:
    """The verdict and the findings on some files."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / (names[number] if names else f"{number}.log"))
        if isinstance(text, bytes):
            paths[-1].write_bytes(text)
        else:
            lines = text.split("\n") if isinstance(text, str) else list(text)  # type: ignore[call-overload]
            paths[-1].write_text("\n".join(lines) + "\n")
    result = picture(collect(paths))
    findings = run_checks(result)
    document(result, findings)
    page(result, findings)
    terminal(result, findings)
    return verdict(result, findings), findings


def waiting(ranks: range | list[int], seq: int = 77, **more: object) -> list[str]:
    return [line for rank in ranks for line in made.watchdog(rank, seq, **more)]  # type: ignore[arg-type]
