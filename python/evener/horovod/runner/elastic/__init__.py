"""`horovod.runner.elastic`: what launchers of others take from upstream's."""

__all__ = ["discovery", "driver", "settings"]
