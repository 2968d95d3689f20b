"""What a clone needs before `make` can do anything: said in one line each, all at once.

Runs on whatever `python3` is, so it uses nothing newer than Python 3.6 and nothing installed.
"""

import os
import shutil
import sys

NEEDED_GB = 12
problems = []

if sys.version_info < (3, 10):
    problems.append(
        "Python %d.%d is too old, 3.10 or later is needed: make PYTHON=python3.12 ..."
        % sys.version_info[:2]
    )
try:
    import ensurepip

    ensurepip.version()
except Exception:
    problems.append("python3 has no ensurepip: install the package python3-venv")
if not shutil.which("cargo"):
    problems.append("cargo is missing: install Rust 1.89 or later from https://rustup.rs")
if not (shutil.which("cc") or shutil.which("gcc")):
    problems.append("no C compiler (cc): install the package gcc")
if not os.path.isdir(".venv"):
    free = shutil.disk_usage(".").free / 1e9
    if free < NEEDED_GB:
        problems.append(
            "%.1f GB of disk are free here, torch and the build need %d" % (free, NEEDED_GB)
        )

for problem in problems:
    sys.stderr.write("missing: %s\n" % problem)
sys.exit(1 if problems else 0)
