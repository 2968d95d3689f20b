"""`horovod.runner.elastic`: what launchers of others take from upstream's."""
