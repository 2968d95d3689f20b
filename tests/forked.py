"""Ranks of a script that are forked when all is imported: imports are most of what a rank costs.

For jobs that want real programs or the nodes of a lab. What `worlds` starts is cheaper still.
"""

from __future__ import annotations

import atexit
import os
import sys


def ranks(*of_nodes: int) -> None:
    """Make this process the ranks of its node, `of_nodes[r]` where it is rank r, one for each node.

    Returns in each of them with torch's variables set. The first, which goes on here, waits at its
    end for the others, and ends with status 1 where one did not end well. Call it before there is
    any thread.
    """
    node, count = int(os.environ["RANK"]), of_nodes[int(os.environ["RANK"])]
    local, others = 0, list[int]()
    for number in range(1, count):
        child = os.fork()
        if child == 0:
            local, others = number, []
            break
        others.append(child)
    os.environ.update(
        RANK=str(sum(of_nodes[:node]) + local),
        WORLD_SIZE=str(sum(of_nodes)),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(count),
    )
    if others:
        atexit.register(_wait, others)


def _wait(others: list[int]) -> None:
    if any(os.waitpid(child, 0)[1] for child in others):
        sys.stdout.flush()
        os._exit(1)
