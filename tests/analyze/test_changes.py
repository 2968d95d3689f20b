"""Two runs: what changed, in order of effect."""

from pathlib import Path

from click.testing import CliRunner
from foreign import TABLE
from nccl_logs import Job, job
from tests import incidents as made

from evener.tools.analyze.command import analyze


def ask(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(analyze, [str(a) for a in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_what_changed_comes_in_order_of_effect(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(job(Job("2.28.9")) + TABLE)
    slow = TABLE.replace("10.75   10.75", " 1.75    1.75").replace("10.73   10.73", " 1.73    1.73")
    setting = "node-a:1:2 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
    bad.write_text(setting + job(Job("2.28.9", direct=False)) + slow)
    code, said = ask("--compare", good, bad)
    assert code == 1
    order = [
        "4 MiB: 1.75 GB/s, was 10.75",
        "GPUDirect RDMA: off, was on",
        "NCCL_IB_DISABLE: 1, was (not set)",
    ]
    assert [said.index(text) for text in order] == sorted(said.index(text) for text in order)
    assert said.startswith(f"{bad} against {good}: ")


def test_equal_runs_do_not_differ(tmp_path: Path) -> None:
    good, bad = tmp_path / "a", tmp_path / "b"
    for path in (good, bad):
        path.write_text(job(Job("2.28.9")) + TABLE)
    assert ask("--compare", good, bad)[0] == 0


def test_a_good_and_a_hung_run_are_told_apart_from_two_files_of_one(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    text = job(Job("2.28.9"))
    good.write_text(text)
    lines = [line for rank in (0, 1, 3) for line in made.watchdog(rank, 7)]
    bad.write_text(text.replace("commId 0x", "commId 0x7") + "\n".join(lines))
    _, said = ask(good, bad)
    assert "only this run ended badly" in said
    bad.write_text("\n".join(lines))
    _, said = ask(good, bad)
    assert " against " not in said


def test_compare_wants_two(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(job(Job("2.28.9")))
    done = CliRunner().invoke(analyze, ["--compare", str(path)])
    assert "two runs" in str(done.exception)
