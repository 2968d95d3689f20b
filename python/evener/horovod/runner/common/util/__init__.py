"""`horovod.runner.common.util`: what launchers of others take from upstream's."""

__all__ = ["secret", "timeout"]
