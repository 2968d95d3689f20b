"""`horovod`, served by Evener: every module here is the one of that name in `evener.horovod`."""

from evener.horovod import __version__, run
from evener.horovod.aliases import install

install(__name__, __file__)

__all__ = ["__version__", "run"]
