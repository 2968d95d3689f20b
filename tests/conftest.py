"""What the calling shell may have set and what would change the meaning of tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.remote import sshd  # noqa: F401 - a fixture for all
from tests.start import sitecustomize  # noqa: F401 - of what tests start, and of this process

# A suite that is started in the background inherits an ignored SIGINT, and so would every process
# that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, print() writes a line in pieces, and mpirun mixes the pieces of its ranks.
os.environ.pop("PYTHONUNBUFFERED", None)

# Threads of OpenMP spin while they wait for each other. Models here are tiny and parts of the suite
# run side by side: spinning took 20 of 25 s of processor time of tests/precision/test_torch.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Starting is most of what a small program costs: see start/sitecustomize.py.
START = str(Path(__file__).parent / "start")
if START not in (path := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([START, *filter(None, path)])
sys.path.append(START)  # some tests give their programs this process' path

# An example that takes longer on a busy machine is no failure. Environments of other programs
# (`make wild`) have no hypothesis.
with suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("evener", deadline=None)
    settings.load_profile("evener")


def pytest_collection_finish() -> None:
    """What was imported stays: no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip what torch lacks on this Python (`make matrix`)."""
    report = yield
    if report.failed and sys.version_info >= (3, 14):
        from tests.lacks import lacking

        if why := lacking(str(report.longrepr)):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {why}")
    return report
