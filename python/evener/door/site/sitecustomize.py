"""Run by Python at its start, where this folder is first on PYTHONPATH: opens Evener's door, and
lets `evener launch` watch a rank.

A sitecustomize that was on the path before runs too: this one only stands in front of it.
"""

import os
import sys


def _next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs time
    import importlib.machinery
    import importlib.util

    others = [part for part in sys.path if os.path.abspath(part) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if asked := [name for name in ("EVENER_DDP", "EVENER_FSDP", "EVENER_ZERO") if os.environ.get(name)]:
    try:
        from evener.door.enter import arm
    except ImportError:
        sys.stderr.write(f"evener: {asked[0]} has no effect: this Python finds no evener\n")
    else:
        arm()
if os.environ.get("EVENER_LAUNCH_WATCH"):
    try:
        from evener.watch.inside import arm as watch
    except ImportError:  # noqa: S110 - the launcher says how many ranks it sees
        pass
    else:
        watch()
_next()
