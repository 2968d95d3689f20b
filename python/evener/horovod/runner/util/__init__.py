"""`horovod.runner.util`."""
