"""IBM's jsrun: not driven. Start the ranks by `jsrun` yourself; they find each other."""

from __future__ import annotations

import shutil
from typing import Any

from evener.horovod.common.exceptions import NotServedError
from evener.horovod.runner.common.util import safe_shell_exec
from evener.horovod.runner.util import lsf


def is_jsrun_installed() -> bool:
    """Whether `jsrun` is on the PATH."""
    return shutil.which("jsrun") is not None


def js_run(*_: Any, **__: Any) -> None:
    """Raises NotServedError."""
    raise NotServedError(
        "horovod.runner.js_run.js_run is not served", "start the ranks by jsrun yourself"
    )


def generate_jsrun_rankfile(*_: Any, **__: Any) -> str:
    """Raises NotServedError."""
    raise NotServedError(
        "horovod.runner.js_run.generate_jsrun_rankfile is not served",
        "start the ranks by jsrun yourself",
    )


__all__ = ["generate_jsrun_rankfile", "is_jsrun_installed", "js_run", "lsf", "safe_shell_exec"]
