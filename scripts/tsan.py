"""The engine's and the feature store's tests under ThreadSanitizer: `make tsan`. Needs nightly Rust
with rust-src.

One kind of report of the engine is expected and counted, not failed: a piece that went over two
paths (one was cut, or it was late) is placed twice, by two workers at once, with the same bytes at
the same place. ThreadSanitizer cannot know that the bytes are the same. All others fail. With -p
the packages are the caller's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

PLACING = re.compile(r"conn::Conn>?>::(fill|unstage)")


def is_expected(report: str) -> bool:
    """Whether both sides of a report place bytes that came from a peer."""
    access = re.compile(
        r"^  (?:Atomic )?(?:[Pp]revious )?(?:atomic )?(write|read) of size", re.I | re.M
    )
    found = list(access.finditer(report))
    if len(found) != 2 or any(one[1].lower() != "write" for one in found):
        return False
    ends = [found[1].start(), len(report)]
    stacks = [
        # A stack ends with an empty line.
        report[one.start() : end].partition("\n\n")[0]
        for one, end in zip(found, ends, strict=True)
    ]
    return all(PLACING.search(stack) for stack in stacks)


def main() -> int:
    if subprocess.run(["cargo", "+nightly", "--version"], capture_output=True).returncode:
        print("skipped: cargo +nightly does not run here")
        print("  fix: rustup toolchain install nightly --component rust-src")
        return 0
    about = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = next(line.split()[1] for line in about.splitlines() if line.startswith("host:"))
    packages = [f"-p=evener-{name}" for name in ("engine", "embedding")]
    packages = [] if any(arg.startswith("-p") for arg in sys.argv[1:]) else packages
    command = ["cargo", "+nightly", "test", "--locked", "-Zbuild-std", "--target", host]
    command += ["--target-dir", "target/tsan", *packages, "--tests", *sys.argv[1:]]
    env = {**os.environ, "RUSTFLAGS": "-Zsanitizer=thread", "TSAN_OPTIONS": "exitcode=0"}
    run = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith(("test ", "error", "   Compiling evener")):
            print(line, end="", flush=True)
    status = run.wait()
    reports = "".join(lines).split("WARNING: ThreadSanitizer: ")[1:]
    reports = [report.partition("==================")[0] for report in reports]
    others = [report for report in reports if not is_expected(report)]
    for report in others:
        print(f"WARNING: ThreadSanitizer: {report}")
    expected = len(reports) - len(others)
    print(
        f"{len(others)} races; {expected} times a piece that came twice was placed by two at once"
    )
    return status or bool(others)


if __name__ == "__main__":
    sys.exit(main())
