"""torch's checks of the processor's vector instructions, kept for the next process.

Before inductor makes code for a CPU it builds small programs and loads each in a new Python with
torch: on a processor with AVX-512 and AMX that is ten processes, 20 to 30 s. It keeps what it built
but not what came out, so each process waits again. `remember` keeps the answers that were yes, in a
file, by what they depend on: the program, the compiler with its version and flags, torch, Python,
and the processor's own list of what it can do. A no is asked again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

from evener.base.log import info0
from evener.compile import store

_MARK = "_evener_remembers"


def remember() -> None:
    """From now on, in this process. A torch that checks in another way is left as it is."""
    try:
        from torch._inductor import cpu_vec_isa

        kind: Any = cpu_vec_isa.VecISA
        asks, fingerprint = kind.check_build, cpu_vec_isa._get_isa_dry_compile_fingerprint
    except (ImportError, AttributeError):
        info0("compile: what this torch checks of the processor is checked in every process")
        return
    if hasattr(asks, _MARK):
        return

    def check_build(self: Any, code: str) -> bool:
        key = _key(code, fingerprint(self._arch_flags))
        path = store.folder() / "torch" / "vector-instructions.json"
        if key in _read(path):
            return True
        answer = bool(asks(self, code))
        if answer:
            store.replace(path, sorted({*_read(path), key}), "what torch has checked,")
        return answer

    setattr(check_build, _MARK, True)
    kind.check_build = check_build


def _key(code: str, fingerprint: str) -> str:
    parts = (code, fingerprint, sys.executable, sys.version, *platform.uname()[2:], _processor())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _processor() -> str:
    """What the first processor says of itself; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _read(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []
