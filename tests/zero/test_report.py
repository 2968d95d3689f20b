"""What was recorded: spans, their arithmetic, and the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from evener import zero
from evener.errors import UsageError
from evener.tools.plan.memory import zero_group
from evener.zero.spans import Span, covered, summary
from tests import pages
from tests.zero.engines import configuration
from tests.zero.models import Model, batches, loss_of


def span(kind: str, begin: float, end: float, name: str = "x") -> Span:
    return Span(kind, kind, name, begin, end)


def test_where_the_time_went() -> None:
    spans = [
        span("step", -9, 0),
        span("step", 0, 10),
        span("step", 10, 20),
        span("compute", 0, 4, "forward a"),
        span("compute", 4, 8, "backward a"),
        span("copy", 2, 3),
        span("copy", 2.5, 6),
        span("copy", 9, 10),
        span("optimizer", 7, 10.5),
        span("wait", 8, 9),
        span("communication", 7.5, 12.5),
        span("copy", 30, 40),  # after the last step: not of it
    ]
    assert covered(spans[3:5], [span("copy", 3, 5)]) == (8, 2)
    found = summary(spans)
    assert found["steps"] == 2 and found["step"] == 10
    assert found["forward"] == 2 and found["backward"] == 2
    assert found["transfers"] == 2.5 and found["transfers hidden"] == 1.0
    assert found["optimizer"] == 1.75 and found["exposed optimizer"] == 1.25
    assert found["communication"] == 2.5 and found["communication hidden"] == 0.6
    assert found["waits"] == {"wait": 0.5}


def test_a_recording_and_its_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = zero.initialize(
        model=Model(),
        config=configuration(evener={"budget": {"gpu": "1GB", "host": "4GB"}, "balance": True}),
        machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
        batch=(4, 16),
    )
    engine.record()
    for tokens in batches(3):
        engine.backward(loss_of(engine, tokens))
        engine.step()
    spans = engine.recorded()
    names = {s.name for s in spans if s.kind == "compute"}
    assert {"forward layers.0", "backward layers.3", "forward head"} <= names
    path = zero.report.write(engine, spans, tmp_path / "steps.json")
    shown = CliRunner().invoke(zero_group, ["report", str(path)])
    assert shown.exit_code == 0, shown.output
    page = path.with_suffix(".html").read_text()
    assert "were predicted" in page and "layers.3/0" in page and "<svg" in page
    # A folder that is missing is made; what cannot be written is said, without a traceback.
    there = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(zero_group, ["report", str(path), "-o", str(there)]).exit_code == 0
    assert there.read_text() == page
    (tmp_path / "file").touch()
    inside = ["report", str(path), "-o", str(tmp_path / "file" / "page.html")]
    assert isinstance(CliRunner().invoke(zero_group, inside).exception, UsageError)
    # It needs no network: no address in it.
    assert not re.search(r"https?://|src=|@import", page)
    if pages.browser():
        pages.nothing_is_clipped(page, tmp_path)
    engine.close()
    path.write_text("{}")
    with pytest.raises(UsageError, match="no recording"):
        zero.report.read(path)


def test_the_loss_is_that_of_torch() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.randn(3, 700, 40).to(dtype).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        targets = torch.randint(0, 40, (3, 700))
        targets[:, -1] = -100
        loss = zero.cross_entropy(mine, targets)
        want = functional.cross_entropy(theirs.float().flatten(0, 1), targets.flatten())
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want)
        (2 * loss).backward()
        (2 * want).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
