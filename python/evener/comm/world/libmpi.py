"""One short text from rank 0 to all, through MPI itself, called by ctypes.

The way for a launcher without a PMIx library where MPI's own is at hand. Handles differ between
two ABIs: Open MPI's are addresses of symbols, those of MPICH, Intel, Cray and MVAPICH integers.

MPI cannot be started twice, so it stays up until the process ends; where the program started it
(the user's own mpi4py), it is used as it is and left alone.
"""

from __future__ import annotations

import atexit
import ctypes

from evener.comm.world.pmix import load_first

OPEN_MPI = ["libmpi.so.40", "libmpi.so.80"]
MPICH = ["libmpi.so.12", "libmpich.so.12"]
_ROOM = 4096


class MpiError(Exception):
    """An MPI call failed, or MPI's world is not the launcher's."""


def load(open_mpi_first: bool) -> ctypes.CDLL | None:
    """libmpi of the launcher's kind, else of the other, else None."""
    names = OPEN_MPI + MPICH if open_mpi_first else MPICH + OPEN_MPI
    return load_first([*names, "libmpi.so"])


def share(text: str | None, library: ctypes.CDLL, rank: int, size: int) -> str:
    """Rank 0's `text` (the others give None), on every rank. Blocks until all have called it.

    Raises MpiError where a call fails or MPI's rank and size are not `rank` and `size`.
    """
    world, byte = _handles(library)
    flag = ctypes.c_int()
    _call(library, "MPI_Initialized", ctypes.byref(flag))
    if not flag.value:
        _call(library, "MPI_Init", None, None)
        atexit.register(_finalize, library)
    my_rank, my_size = ctypes.c_int(), ctypes.c_int()
    _call(library, "MPI_Comm_rank", world, ctypes.byref(my_rank))
    _call(library, "MPI_Comm_size", world, ctypes.byref(my_size))
    if (my_rank.value, my_size.value) != (rank, size):
        raise MpiError(
            f"MPI says rank {my_rank.value} of {my_size.value}, the launcher {rank} of {size}"
        )
    room = ctypes.create_string_buffer((text or "").encode(), _ROOM)
    _call(library, "MPI_Bcast", room, ctypes.c_int(_ROOM), byte, ctypes.c_int(0), world)
    return room.value.decode()


def _handles(library: ctypes.CDLL) -> tuple[object, object]:
    """MPI_COMM_WORLD and MPI_BYTE."""
    if hasattr(library, "ompi_mpi_comm_world"):
        return (
            ctypes.cast(library.ompi_mpi_comm_world, ctypes.c_void_p),
            ctypes.cast(library.ompi_mpi_byte, ctypes.c_void_p),
        )
    return ctypes.c_int(0x44000000), ctypes.c_int(0x4C00010D)


def _finalize(library: ctypes.CDLL) -> None:
    done = ctypes.c_int()
    library.MPI_Finalized(ctypes.byref(done))
    if not done.value:
        library.MPI_Finalize()


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise MpiError(f"{name} returned {status}")
