"""horovodrun's options as upstream's variables, for launchers that build an environment themselves.

`evener horovodrun` itself goes by `evener.horovod.runner.launch.KNOBS`, which says what each option
means here.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]

# An option's attribute, its variable, its unit in the variable's.
_VARIABLES = (
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", 1 << 20),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME", 1),
    ("cache_capacity", "HOROVOD_CACHE_CAPACITY", 1),
    ("hierarchical_allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", 1),
    ("hierarchical_allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", 1),
    ("torus_allreduce", "HOROVOD_TORUS_ALLREDUCE", 1),
    ("autotune", "HOROVOD_AUTOTUNE", 1),
    ("autotune_log_file", "HOROVOD_AUTOTUNE_LOG", 1),
    ("autotune_warmup_samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 1),
    ("autotune_steps_per_sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 1),
    ("autotune_bayes_opt_max_samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 1),
    ("autotune_gaussian_process_noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", 1),
    ("timeline_filename", "HOROVOD_TIMELINE", 1),
    ("timeline_mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES", 1),
    ("no_stall_check", "HOROVOD_STALL_CHECK_DISABLE", 1),
    ("stall_check_warning_time_seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", 1),
    ("stall_check_shutdown_time_seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1),
    ("mpi_threads_disable", "HOROVOD_MPI_THREADS_DISABLE", 1),
    ("num_nccl_streams", "HOROVOD_NUM_NCCL_STREAMS", 1),
    ("thread_affinity", "HOROVOD_THREAD_AFFINITY", 1),
    ("gloo_timeout_seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", 1),
    ("log_level", "HOROVOD_LOG_LEVEL", 1),
    ("log_hide_timestamp", "HOROVOD_LOG_HIDE_TIME", 1),
    ("tcp_flag", "NCCL_IB_DISABLE", 1),
)
globals().update({variable: variable for _, variable, _ in _VARIABLES})

# Options that take a number, of which none may be negative.
_NUMBERS = tuple(
    name
    for name, _, _ in _VARIABLES
    if name.endswith(("_mb", "_ms", "_capacity", "_samples", "_sample", "_seconds", "_noise"))
)


def set_env_from_args(env: MutableMapping[str, str], args: Any) -> MutableMapping[str, str]:
    """Put into `env` the variables of the options that were given in `args`; gives `env`."""
    for name, variable, factor in _VARIABLES:
        value = getattr(args, name, None)
        if value is None or (value is False and name in ("tcp_flag", "no_stall_check")):
            continue
        if isinstance(value, bool):
            env[variable] = str(int(value))
        else:
            env[variable] = str(value * factor if factor > 1 else value)
    return env


def set_args_from_config(args: Any, config: dict[str, Any], override_args: Collection[str]) -> None:
    """Set attributes of `args` from a configuration's sections, but for those in override_args."""
    from evener.horovod.runner.launch import KNOBS

    by_place = {knob.config: knob.name for knob in KNOBS if knob.config}
    for section, entries in config.items():
        if not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            name = by_place.get(f"{section}.{key}")
            if name is not None and name not in override_args:
                setattr(args, name, value)


def validate_config_args(args: Any) -> None:
    """Raise ValueError for a number that cannot be."""
    for name in _NUMBERS:
        value = getattr(args, name, None)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} is negative")
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and noise > 1:
        raise ValueError(f"--autotune-gaussian-process-noise {noise} is more than 1")
