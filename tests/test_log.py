"""Where Evener's own lines go on a terminal that others write to as well."""

import subprocess
import sys

BAR = """
import time
from tqdm import tqdm
from evener.base import log
for step in tqdm(range(3), mininterval=0):
    if step == 1:
        log.info0("a line of step %d", step)
log.info0("the last one")
"""


def test_a_line_leaves_the_bars_of_tqdm_whole() -> None:
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, timeout=60)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    parts = said.replace("\n", "\r").split("\r")
    assert "evener: a line of step 1" in parts, said
    assert "evener: the last one" in parts, said
    assert [part for part in parts if "100%" in part and "3/3" in part], said
