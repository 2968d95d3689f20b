"""A command that ends with whoever started it.

It runs under the guard of `evener launch` (evener.tools.launch.guard): its descendants are ended
when an event is set, and when this process is no more.
"""

from __future__ import annotations

import codecs
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evener.tools.launch import guard

GRACEFUL_TERMINATION_TIME_S = guard.GRACE
_SIGTERM_STATUS = 143


def prefix_connection(
    src_connection: Any,
    dst_stream: Any,
    prefix: str | None,
    index: int | None,
    prefix_output_with_timestamp: bool,
) -> None:
    """Copy text from a connection to a stream, with `[index]<prefix>:` before each line.

    A line is written when it is complete; a carriage return ends one too. Without `prefix` or
    `index` nothing is put before lines.
    """
    marked = prefix is not None and index is not None
    begun, returned = "", False

    def write(text: str, last: bool = False) -> None:
        nonlocal begun, returned
        if returned and text.startswith("\n"):  # of a line that is written
            dst_stream.write("\n")
            text = text[1:]
        returned = text.endswith("\r")
        *whole, begun = _lines(begun + text)
        for line in [*whole, begun] if last and begun else whole:
            if marked and prefix_output_with_timestamp:
                dst_stream.write(time.asctime(time.localtime(time.time())))
            dst_stream.write(f"[{index}]<{prefix}>:{line}" if marked else line)
        dst_stream.flush()

    with os.fdopen(src_connection.fileno(), "rb", buffering=0, closefd=False) as raw:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := raw.read(1 << 16):
            write(decoder.decode(data))
        write(decoder.decode(b"", final=True), last=True)


def _lines(text: str) -> list[str]:
    """The lines of `text` with their ends, and what comes after the last of them."""
    return re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)


def execute(
    command: str | Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run `command` (a shell's, or a list of words) and give its exit status.

    stdout, stderr: streams for its output, this process's by default. index: put `[index]<stdout>:`
    before each line. events: any of them ends it, with status 143.
    """
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    scratch = f"/tmp/evener-shell-{secrets.token_hex(4)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "evener.tools.launch.guard", scratch, *words],
        env=None if env is None else dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    threads = [
        threading.Thread(
            target=prefix_connection,
            args=(source, target, name, index, prefix_output_with_timestamp),
            daemon=True,
        )
        for source, target, name in (
            (process.stdout, stdout or sys.stdout, "stdout"),
            (process.stderr, stderr or sys.stderr, "stderr"),
        )
    ]
    for thread in threads:
        thread.start()
    ended = False
    while process.poll() is None:
        if not ended and any(event.is_set() for event in events or ()):
            ended = True
            assert process.stdin is not None
            process.stdin.close()
        time.sleep(0.05)
    for thread in threads:
        thread.join(GRACEFUL_TERMINATION_TIME_S)
    return _SIGTERM_STATUS if ended else process.returncode
