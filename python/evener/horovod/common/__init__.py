"""What Horovod keeps in `horovod.common`: its exceptions."""
