"""IBM's batch system LSF."""

from __future__ import annotations

import os


class LSFUtils:
    """What LSF says of the job that this process is in."""

    @staticmethod
    def using_lsf() -> bool:
        """Whether there is one."""
        return "LSB_JOBID" in os.environ

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Its hosts, from LSB_MCPU_HOSTS (`host1 4 host2 4`), without the one that submitted it."""
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        return words[2::2] if len(words) > 2 else words[::2]
