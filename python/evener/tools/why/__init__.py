"""`evener why`, and what `evener launch` watches a job with.

folders   where rings lie, and the removal of what a killed job left
process   what Linux says of a process
ras       NCCL's own account, over its socket
host      one host's ranks: rings, processes, answers
stall     when a job stands still, and who is slow: pure, in the caller's time
bundle    what was gathered, in a zip that `evener analyze` reads
look      the same once, of any processes: `evener why`
watch     all hosts of a job: one thread beside the launcher
"""

from evener.tools.why.folders import folder_of
from evener.tools.why.watch import Watch

__all__ = ["Watch", "folder_of"]
