"""Variables of upstream's that a job may set and Evener does not read.

`horovodrun` puts its options into variables that Evener reads, or says why there is none; this is
for those that a script, an image or mpirun's -x sets. Names are those of upstream's common.h.
"""

from __future__ import annotations

from collections.abc import Mapping

_LEVELS = "LIGHT_2D_ALLREDUCE=1 asks for two levels"
_PLANNER = "the planner measures a few steps instead"
UNREAD = {
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _LEVELS,
    "HOROVOD_TORUS_ALLREDUCE": _LEVELS,
    "HOROVOD_HIERARCHICAL_ALLGATHER": "all-gathers go in one level",
    "HOROVOD_AUTOTUNE_LOG": _PLANNER,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _PLANNER,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _PLANNER,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _PLANNER,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _PLANNER,
    "HOROVOD_NUM_NCCL_STREAMS": "each stage of a reduction has a stream of its own",
    "HOROVOD_THREAD_AFFINITY": "Evener does not pin its threads",
    "HOROVOD_DISABLE_GROUP_FUSION": "buckets follow HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_ENABLE_XLA_OPS": "XLA cannot compile the operations",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "EVENER_TIMEOUT says how long a rank waits",
    "HOROVOD_LOG_LEVEL": "EVENER_LOG says what is printed",
}
"""Name > why it has no effect, or what has."""
_OFF = ("", "0", "false")


def unread(env: Mapping[str, str]) -> list[str]:
    """A line for each of them that `env` sets."""
    return [
        f"{name}={env[name]} has no effect: {why}"
        for name, why in UNREAD.items()
        if env.get(name, "").strip().lower() not in _OFF
    ]
