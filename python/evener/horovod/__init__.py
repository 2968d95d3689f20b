"""Horovod's programming interface on Evener's collectives: `import horovod.torch as hvd`.

The package that users import is called `horovod`; it is not part of this installation's path but a
small one of its own (`compat/horovod`, or `evener launch --horovod`), whose every module is the one
of the same name below this package: `horovod.torch` is `evener.horovod.torch`. Start reading at
`torch/__init__.py` (the surface), then `engine.py` (how an operation runs), `torch/optimizer.py`.
"""

from __future__ import annotations

# The release of upstream's interface that is followed, so that version checks of scripts pass.
__version__ = "0.28.1+evener"

from evener.horovod.runner import run

__all__ = ["__version__", "run"]
