"""Buckets under TensorFlow: a check in a process without torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

CHECK = Path(__file__).parent / "check_tensorflow.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK)],
        capture_output=True,
        text=True,
        timeout=380,
        env={
            **os.environ,
            "EVENER_COMPILE_DIR": str(tmp_path),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
    assert list((tmp_path / "xla").glob("evener*")), "XLA kept nothing"
