"""`evener analyze`: exit status, refusals, files that are no logs."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from nccl_logs import Job, job

from evener.errors import UsageError
from evener.tools.analyze.command import analyze


def run(*arguments: object) -> object:
    return CliRunner().invoke(analyze, [str(a) for a in arguments])


def test_nothing_found_is_0(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(job(Job("2.28.9")))
    shown = run(path)
    assert shown.exit_code == 0, shown.output
    assert "Nothing found" in shown.output


def test_something_found_is_1(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(job(Job("2.28.9", direct=False)))
    shown = run(path, "--quiet")
    assert shown.exit_code == 1
    assert len(shown.output.splitlines()) == 1


def test_a_run_that_failed_is_1(tmp_path: Path) -> None:
    path = tmp_path / "log"
    failed = "node-a:9:10 [0] misc/socket.cc:58 NCCL WARN Connect to 10.0.0.2<4> failed : refused\n"
    failed += "node-a:9:10 [0] NCCL INFO bootstrap.cc:20 -> 2\n"
    path.write_text(
        job(Job("2.28.9")) + failed + "ncclInit failed: ncclSystemError: Test failure\n"
    )
    shown = run(path)
    assert shown.exit_code == 1
    assert shown.output.lower().index("failed") < shown.output.index("ranks")


@pytest.mark.parametrize("content", [None, "", "epoch 1, loss 0.5\n", "<html></html>", '{"a": 1}'])
def test_what_cannot_be_read_is_2(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_text(content)
    refused = run(path)
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.exit_code == 2
    assert str(path) in str(refused.exception)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path).exception, UsageError)
