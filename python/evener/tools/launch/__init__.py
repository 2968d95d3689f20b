"""`evener launch`: start a job on one host or many, with the engines that are there.

hosts.py reads who has how many slots, plan.py turns that into commands of torchrun or mpirun,
probe.py asks the hosts, job.py runs the commands and says which rank failed first, guard.py is the
process on each host that takes all it started with it when it goes. Nothing here imports torch.
"""

__all__ = [
    "batch",
    "command",
    "discovery",
    "elastic",
    "guard",
    "horovod_env",
    "horovod_path",
    "hosts",
    "job",
    "output",
    "plan",
    "secret",
]
