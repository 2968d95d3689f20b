"""`horovod.tensorflow`: the checks of tests/horovod/tensorflow on both ranks of one world.

TensorFlow takes seconds to import, and no torch may be in its process: so two children run all of
the checks, and what came of each on both is a test here.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evener.base.ports import free_port

HERE = Path(__file__).parent / "tensorflow"
NAMES = [
    f"{path.stem}::{node.name}"
    for path in sorted(HERE.glob("check_*.py"))
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def start(rank: int, port: int, *command: str, **more: str) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMPI_")},
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EVENER_TIMEOUT": "30",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name > "" or what went wrong, on either rank."""
    folder = tmp_path_factory.mktemp("tensorflow")
    port = free_port()
    options = "-m pytest -q -p no:cacheprovider -o timeout=60 -o python_files=check_*.py"
    reports = [folder / f"{rank}.xml" for rank in range(2)]
    texts = finish(
        [
            start(rank, port, *options.split(), f"--junitxml={reports[rank]}", str(HERE))
            for rank in range(2)
        ],
        400,
    )
    found: dict[str, list[str]] = {}
    for rank, report in enumerate(reports):
        assert report.exists(), f"rank {rank}: {texts[rank][-4000:]}"
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname", "").rsplit(".", 1)[-1]
            name = f"{module}::{case.get('name', '').split('[')[0]}"
            bad = [
                f"rank {rank}, {case.get('name')}: {each.get('message')}\n{each.text}"
                for each in case
                if each.tag in ("failure", "error")
            ]
            found.setdefault(name, []).extend(bad)
    return {name: "\n".join(bad) for name, bad in found.items()}


@needs_tensorflow
@pytest.mark.timeout(420)  # the first one waits for all of them
@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(name: str, outcomes: dict[str, str]) -> None:
    """Each check passed on both ranks."""
    assert name in outcomes, f"it did not run: {sorted(outcomes)}"
    assert not outcomes[name], outcomes[name]


ENDS = """
import os, sys
import tensorflow as tf
import evener.horovod.tensorflow as hvd
hvd.init()
hvd.allreduce(tf.ones(3))
if hvd.rank() == 1:
    os._exit(0)
try:
    hvd.allreduce(tf.ones(3), name="alone")
except hvd.HorovodInternalError as error:
    print("named:", error)
"""


@needs_tensorflow
@pytest.mark.timeout(200)
def test_a_rank_that_dies_is_an_error_of_the_others() -> None:
    """And not a hang: the collective's and the process's end come soon."""
    port = free_port()
    texts = finish([start(rank, port, "-c", ENDS) for rank in range(2)], 180)
    assert "named: " in texts[0], texts[0]
    assert "rank 1" in texts[0], texts[0]


MIXED = "import evener.horovod.{} as hvd; hvd.init()"


@needs_tensorflow
@pytest.mark.timeout(400)  # TensorFlow takes its time on a busy machine
def test_frameworks_do_not_mix() -> None:
    """Either way round, since rank 0 holds the store in which they meet."""
    pytest.importorskip("torch")
    for first, second in (("torch", "tensorflow"), ("tensorflow", "torch")):
        port = free_port()
        programs = [MIXED.format(first), MIXED.format(second)]
        texts = finish([start(r, port, "-c", p) for r, p in enumerate(programs)], 180)
        for text in texts:
            assert "RendezvousError" in text, text
            assert "same framework" in text, text
