"""The checks of tests/embedding/tensorflow, in one process of their own.

TensorFlow takes seconds to import, and it must work where no torch is: so one child runs all of
them, and each of its outcomes is a test here.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent / "tensorflow"
NAMES = [
    f"{path.stem}::{node.name}"
    for path in sorted(HERE.glob("check_*.py"))
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name > "" or what went wrong."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    report = tmp_path_factory.mktemp("tensorflow") / "report.xml"
    done = subprocess.run(
        f"{sys.executable} -m pytest -q -p no:cacheprovider -o timeout=120 "
        f"-o python_files=check_*.py --junitxml={report} {HERE}".split(),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").rsplit(".", 1)[-1]
        name = f"{module}::{case.get('name', '').split('[')[0]}"
        bad = [f"{x.get('message')}\n{x.text}" for x in case if x.tag in ("failure", "error")]
        found.setdefault(name, []).extend(bad)
    return {name: "\n".join(bad) for name, bad in found.items()}


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, Refuse())
import evener.embedding.tensorflow as de
import evener.embedding.tensorflow.keras, evener.compile.tensorflow, evener.precision.keras

table = de.get_variable("table", 1.0, dim=2)
assert table.lookup([5]).numpy().tolist() == [[1.0, 1.0]]
print("no torch")
"""


@pytest.mark.timeout(200)
def test_it_works_where_no_torch_is() -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "no torch", done.stderr[-2000:]


@pytest.mark.timeout(600)  # the first one waits for all of them
@pytest.mark.parametrize("name", NAMES)
def test_inside_tensorflow(name: str, outcomes: dict[str, str]) -> None:
    """Each check passed in the child."""
    assert name in outcomes, f"it did not run: {sorted(outcomes)}"
    assert not outcomes[name], outcomes[name]
