"""What a clone needs before `make` can do anything: said in one line each, all at once.

Runs on whatever `python3` is, so it uses nothing newer than Python 3.6 and nothing installed.
"""

import os
import re
import shutil
import subprocess
import sys

NEEDED_GB = 12
problems = []


def run(*command):
    """What a command prints, or nothing."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL).decode()
    except (OSError, subprocess.CalledProcessError):
        return ""


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
found = re.search(r"(\d+)\.(\d+)", run("cargo", "--version"))
with open("Cargo.toml") as cargo:
    needed = re.search(r'^rust-version = "(\d+)\.(\d+)', cargo.read(), re.M)
if not found:
    problems.append(
        "cargo is missing: install Rust %s.%s or later from https://rustup.rs" % needed.groups()
    )
elif [int(part) for part in found.groups()] < [int(part) for part in needed.groups()]:
    problems.append(
        "cargo %s.%s is too old, %s.%s or later is needed: rustup update stable, or https://rustup.rs"
        % (found.groups() + needed.groups())
    )
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
