"""`evener launch`: start a job on one host or many, with the launchers that are there.

asked.py holds the options, where.py finds the hosts, environment.py has what ranks are given, and
plan.py makes commands of torchrun or mpirun of that; start.py goes through these in order.
preflight.py looks at the hosts by probe.py, job.py runs the commands and says which rank failed
first, guard.py is the process on each host that takes all it started with it when it goes. Nothing
here imports torch.
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
