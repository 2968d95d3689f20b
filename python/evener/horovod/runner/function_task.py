"""A rank of `horovod.run`: gets the function, calls it, brings the result (see function.py)."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from evener.base import settings
from evener.comm.world import elastic, ranks
from evener.errors import EvenerError
from evener.horovod.common import pickling
from evener.horovod.runner import channel


def _ask(message: tuple[str, int, Any]) -> bytes:
    places, key = json.loads(settings.EVENER_RUN.get())
    tried: list[str] = []
    for address, port in places:
        try:
            with channel.reach(address, port, bytes.fromhex(key), 10.0) as connection:
                connection.send(message)
                return connection.recv_bytes()
        except Exception as error:  # noqa: BLE001 - the next address may be the right one
            tried.append(f"{address} port {port}: {error or type(error).__name__}")
    raise EvenerError(
        f"the process that called horovod.run cannot be reached: {'; '.join(tried)}",
        "open the firewall of its host to the other hosts",
    )


def _rank() -> int:
    member = elastic.member()
    return member.ranks.rank if member is not None else ranks.detect().rank


def main() -> int:
    work = pickling.loads(_ask(("work", -1, None)))
    sys.path += [entry for entry in work["path"] if entry not in sys.path]
    try:
        func, args, kwargs = pickling.loads(work["function"])
        result = pickling.dumps(func(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - horovod.run raises it again
        try:
            data: bytes | None = pickling.dumps(error)
        except Exception:  # noqa: BLE001 - then only its text travels
            data = None
        _ask(("error", _rank(), (traceback.format_exc(), data)))
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    _ask(("result", _rank(), result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
