"""`horovod.runner`: jobs that are started from Python, and `horovodrun`."""
