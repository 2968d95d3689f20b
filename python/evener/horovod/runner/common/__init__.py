"""`horovod.runner.common`: what launchers of others take from upstream's."""

__all__ = ["util"]
