"""One short text from rank 0 to all, through the PMIx server of the launcher that started us.

mpirun (Open MPI 2 and later) and srun --mpi=pmix run a PMIx server for their processes. libpmix is
there wherever they are, so ctypes reaches it without a build and without mpi4py: init, put, commit,
fence with data collection, get, finalize. Finalize follows at once, because mpirun takes a process
that ends between init and finalize for a crash; a later init (by MPI itself, say) is allowed.

The structures are those of the PMIx standard 4.1, chapters 3 and 5; they are the same in the ABI
libpmix.so.2 from version 2 on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

LIBRARY = "libpmix.so.2"

_KEY = b"evener.rendezvous"
_STRING, _BOOL = 3, 1
_GLOBAL = 3


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("flag", ctypes.c_bool), ("string", ctypes.c_char_p), ("room", ctypes.c_char * 24))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class PmixError(Exception):
    """A PMIx call failed."""


def load() -> ctypes.CDLL | None:
    """The libpmix that the launcher itself uses, else the system's, None where there is none."""
    return load_first([LIBRARY])


def load_first(names: list[str]) -> ctypes.CDLL | None:
    """The first of `names` that loads: beside the launcher's own libraries, then anywhere.

    A machine may have several MPIs, and versions of PMIx that cannot talk to each other.
    """
    folders = [launchers_folder()]
    if os.environ.get("OPAL_PREFIX"):
        folders.append(Path(os.environ["OPAL_PREFIX"], "lib"))
    if found := shutil.which("mpirun"):
        folders += [Path(found).resolve().parent.parent / lib for lib in ("lib", "lib64")]
    for name in names:
        candidates = [str(folder / name) for folder in folders if folder is not None]
        # The launcher's own first, then what the loader finds, then guesses.
        order = 1 if folders[0] is not None else 0
        for candidate in [*candidates[:order], name, *candidates[order:]]:
            # Global, because these libraries load plug-ins that look for their symbols.
            with contextlib.suppress(OSError):
                return ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
    return None


def launchers_folder() -> Path | None:
    """The folder of the libpmix that mpirun or its daemon, above this process, has loaded."""
    pid = os.getppid()
    for _ in range(8):  # a shell or two may stand between
        try:
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if "/libpmix.so" in line:
                    return Path(line[line.index("/") :]).parent
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


def share(text: str | None, library: ctypes.CDLL) -> str:
    """Rank 0's `text` (the others give None), on every rank. Blocks until all have called it.

    Raises PmixError with the call's name and status.
    """
    me, none = _Proc(), ctypes.c_size_t(0)
    _call(library, "PMIx_Init", ctypes.byref(me), None, none)
    try:
        if text is not None:
            value = _Value(type=_STRING)
            value.data.string = text.encode()
            _call(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
        _call(library, "PMIx_Commit")
        collect = _Info(key=b"pmix.collect")
        collect.value.type = _BOOL
        collect.value.data.flag = True
        _call(library, "PMIx_Fence", None, none, ctypes.byref(collect), ctypes.c_size_t(1))
        root, answer = _Proc(me.nspace, 0), ctypes.POINTER(_Value)()
        _call(library, "PMIx_Get", ctypes.byref(root), _KEY, None, none, ctypes.byref(answer))
        # The value stays PMIx's: a hundred bytes once in a process's life, not worth its free().
        return bytes(answer.contents.data.string).decode()
    finally:
        library.PMIx_Finalize(None, none)


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise PmixError(f"{name} returned {status}")
