"""The configuration: a dataclass, and DeepSpeed's JSON read into it.

Every key is known or refused: a misspelt key that is passed over in silence trains another model
than the one that was meant. Keys that ask for something Evener decides itself (bucket sizes, buffer
counts, pinning) are taken and listed in `ignored`, so that existing files work as they are.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evener.errors import UsageError
from evener.zero.form import names as forms
from evener.zero.rules import AdamW, Rule, configured
from evener.zero.split import rules_of


class ConfigError(UsageError):
    """A key or a value of the configuration cannot be."""


@dataclass
class Config:
    """What `initialize` takes. Sizes of batches are in samples, as in DeepSpeed.

    moments: float32; or rounded stochastically: bfloat16, or int8 (codes of one byte and a scale
    for each 256, but float32 for parameters below 4,096 elements). master: whether bfloat16 weights
    have an exact float32 copy (False: they are rounded stochastically). depth: chunks fetched
    ahead. small: units of at most this many elements stay on the accelerator. checkpointing: False,
    True (blocks are recomputed), "offload" (and their inputs wait on the host), or "auto": what the
    plan finds fastest. loss: "auto" (last layer and loss of a model of transformers in parts of the
    vocabulary), "fused" (of any model), "chunked" (the loss is `zero.cross_entropy`), or "plain".
    tiles: what treats tokens one by one runs in parts of the sequence (`sequence`), and attention
    of recomputed blocks by heads (`heads`). sequence: ranks that share each sequence (`ulysses`).
    balance: whether the optimizer's states stream through the accelerator beside the cores;
    "auto": where the probe shows a gain. stale_updates: a pass does not wait for the optimizer.
    optimizer_in_backward: each chunk is updated when its gradient is whole, and no gradient is
    kept (`in_backward`). compile: each block by torch.compile (a string: its backend). nodes:
    "replicate" (each node has a copy of the states), "shard", or "auto": the faster of what fits,
    by plan. crossing: the form of gradients between nodes (`evener.zero.form.names`). rehearse: one
    unit of each kind runs on the GPU before the plan (`rehearsal`); "auto": where one process plans
    for a GPU. rules: of each group of parameters, where they differ; else all have `rule`. ignored:
    what is not needed. has_optimizer: whether `rule` was asked for.
    muon: options of `MuonAdamW` (`split.OPTIONS`), where that is the optimizer.
    """

    stage: int = 3
    dtype: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32
    master: bool = True
    rule: Rule = field(default_factory=AdamW)
    micro_batch: int | None = None
    accumulation: int = 1
    clipping: float = 0.0
    loss_scale: float = 0.0
    initial_scale: float = 65536.0
    scale_window: int = 1000
    hysteresis: int = 2
    smallest_scale: float = 1.0
    scheduler: tuple[str, dict[str, Any]] | None = None
    budget: str | Mapping[str, str | int] = "auto"
    offload: bool = True
    checkpointing: bool | str = False
    loss: str = "auto"
    tiles: bool = False
    sequence: int = 1
    balance: bool | str = "auto"
    stale_updates: bool = False
    optimizer_in_backward: bool = False
    compile: bool | str = False
    depth: int = 2
    small: int = 100_000
    gradient: torch.dtype | None = None
    seed: int = 0
    device: str = "auto"
    nodes: str = "auto"
    crossing: str = "exact"
    rehearse: bool | str = "auto"
    rules: list[Rule] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    has_optimizer: bool = False
    muon: dict[str, Any] | None = None


_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

MOMENTS = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}

_PASSED_OVER_ZERO = {
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter",
    "reduce_bucket_size", "contiguous_gradients", "sub_group_size", "round_robin_gradients",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_gather_16bit_weights_on_model_save", "load_from_fp32_weights",
    "stage3_gather_fp16_weights_on_model_save", "cpu_offload_use_pin_memory",
    "memory_efficient_linear", "ignore_unused_parameters",
}  # fmt: skip
_PASSED_OVER_OFFLOAD = {
    "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read",
    "pipeline_write", "pipeline",
}  # fmt: skip
_PASSED_OVER = {
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "prescale_gradients", "memory_breakdown", "zero_force_ds_cpu_optimizer",
}  # fmt: skip
_ELSEWHERE = {
    "tensorboard": "curves are written by your script",
    "wandb": "curves are written by your script",
    "comet": "curves are written by your script",
    "csv_monitor": "curves are written by your script",
    "aio": "the SSD tier sets its own block size and depth",
    "communication_data_type": "ranks reduce gradients in data_types.grad_accum_dtype",
    "flops_profiler": "see zero.report",
    "comms_logger": "see zero.report",
    "gradient_predivide_factor": "gradients are averaged in one step",
}
"""Sections of DeepSpeed's that ask for what is done elsewhere, and where."""
_CHECKPOINTS = {
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
    "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
}  # fmt: skip
_TOP = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization",
    "data_types", "activation_checkpointing", "seed", "evener",
}  # fmt: skip
_ZERO = {
    "stage", "offload_optimizer", "offload_param", "stage3_param_persistence_threshold",
}  # fmt: skip
_FP16 = {
    "enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "min_loss_scale",
}  # fmt: skip
_PASSED_OVER_FP16 = {"auto_cast", "consecutive_hysteresis"}
_PASSED_OVER_BF16 = {"immediate_grad_update", "check_grad_overflow"}
_EVENER = {
    "budget", "moments", "master", "depth", "device", "checkpointing", "loss", "balance",
    "stale_updates", "compile", "nodes", "crossing", "rehearse", "tiles",
    "sequence", "optimizer_in_backward",
}  # fmt: skip


def _refuse(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        path = f"{where}.{key}" if where else key
        fix = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"configuration key {path!r} is not known", fix)


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r} is not a section", "give an object {...}")
    return value


def _auto(value: Any, default: Any) -> Any:
    return default if value is None or value == "auto" else value


def _whole(given: Mapping[str, Any], name: str, default: int | None, low: int = 1) -> int | None:
    value = _auto(given.get(name), default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} = {value!r} is not a whole number", f"give {low} or more")
    return value


def _real(given: Mapping[str, Any], name: str, default: float, low: float = 0.0) -> float:
    value = _auto(given.get(name), default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
        raise ConfigError(f"{name} = {value!r} is not a number", f"give {low:g} or more")
    return float(value)


def _choice(
    given: Mapping[str, Any],
    name: str,
    allowed: tuple[bool | str, ...],
    default: bool | str,
    where: str = "evener",
) -> bool | str:
    value: bool | str = given.get(name, default)
    if not any(value is known or (isinstance(known, str) and value == known) for known in allowed):
        words = ", ".join(json.dumps(known) for known in allowed)
        raise ConfigError(f"{where}.{name} = {value!r} is not known", f"give one of {words}")
    return value


def _dtype(name: str, key: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"{key} = {name!r} is not a dtype", "use fp32, bf16 or fp16")
    return _DTYPES[name]


def _read_optimizer(config: Config, section: Mapping[str, Any]) -> None:
    _refuse("optimizer", section, {"type", "params"})
    kind, params = str(section.get("type", "AdamW")), _section(section, "params")
    config.has_optimizer = True
    try:
        if kind.lower() == "muon":
            config.muon = {name: value for name, value in params.items() if value != "auto"}
            rules_of(**config.muon)
        else:
            config.rule = configured(kind, params)
    except UsageError as error:
        raise ConfigError(error.problem, error.fix) from None


def read(source: str | Path | Mapping[str, Any] | Config | None, ranks: int = 1) -> Config:
    """A `Config` from DeepSpeed's JSON (a path or a dict). Raises ConfigError naming the key."""
    if isinstance(source, Config):
        return source
    if source is None:
        return Config()
    if not isinstance(source, Mapping):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"configuration {source}: {error}", "give a JSON file") from None
        if not isinstance(source, Mapping):
            raise ConfigError("the configuration is not an object", "give {...}")
    _refuse("", source, _TOP | _PASSED_OVER | set(_ELSEWHERE))
    config = Config(ignored=sorted(set(source) & _PASSED_OVER))
    config.ignored += [f"{key} ({why})" for key, why in _ELSEWHERE.items() if key in source]
    _read_zero(config, _section(source, "zero_optimization"))
    _read_precision(config, source)
    if "optimizer" in source:
        _read_optimizer(config, _section(source, "optimizer"))
    if "scheduler" in source:
        section = _section(source, "scheduler")
        _refuse("scheduler", section, {"type", "params"})
        config.scheduler = (str(section.get("type")), dict(_section(section, "params")))
    config.clipping = _real(source, "gradient_clipping", 0.0)
    config.seed = _whole(source, "seed", 0, 0) or 0
    own = _section(source, "evener")
    _refuse("evener", own, _EVENER)
    config.sequence = _whole(own, "sequence", 1) or 1
    _read_batches(config, source, max(1, ranks // config.sequence))
    budget = own.get("budget", "auto")
    if isinstance(config.budget, Mapping):  # what nvme_path said of the SSD
        config.budget = {**config.budget, **(budget if isinstance(budget, Mapping) else {})}
    else:
        config.budget = budget
    if "moments" in own:
        if own["moments"] not in MOMENTS:
            known = ", ".join(MOMENTS)
            raise ConfigError(f"evener.moments = {own['moments']!r}", f"use one of {known}")
        config.moments = MOMENTS[own["moments"]]
    config.master = bool(_choice(own, "master", (True, False), True))
    if not config.master and config.dtype != torch.bfloat16:
        raise ConfigError(
            "evener.master = false: only bfloat16 weights can be without an exact copy",
            "set bf16.enabled = true",
        )
    config.depth = _whole(own, "depth", 2) or 2
    config.device = own.get("device", "auto")
    config.checkpointing = _choice(own, "checkpointing", (False, True, "auto", "offload"), False)
    config.balance = _choice(own, "balance", ("auto", False, True), "auto")
    config.stale_updates = bool(_choice(own, "stale_updates", (False, True), False))
    config.optimizer_in_backward = bool(_choice(own, "optimizer_in_backward", (False, True), False))
    config.rehearse = _choice(own, "rehearse", ("auto", False, True), "auto")
    if config.rehearse is True and config.sequence > 1:
        raise ConfigError(
            f"evener.rehearse = true: units of evener.sequence = {config.sequence} wait for other "
            "ranks, and are not run before the plan",
            "leave evener.rehearse out",
        )
    config.nodes = str(_choice(own, "nodes", ("auto", "replicate", "shard"), "auto"))
    config.crossing = str(_choice(own, "crossing", forms(), "exact"))
    config.compile = own.get("compile", False)
    if not isinstance(config.compile, bool | str):
        raise ConfigError(
            f"evener.compile = {config.compile!r} is not known", "give true, false or a backend"
        )
    config.tiles = bool(_choice(own, "tiles", (False, True), False))
    config.loss = str(_choice(own, "loss", ("auto", "plain", "chunked", "fused"), "auto"))
    if "activation_checkpointing" in source:
        section = _section(source, "activation_checkpointing")
        _refuse("activation_checkpointing", section, _CHECKPOINTS)
        away = bool(_choice(section, "cpu_checkpointing", (False, True), False,
                            "activation_checkpointing"))  # fmt: skip
        config.ignored += [
            f"activation_checkpointing.{key}" for key in section if key != "cpu_checkpointing"
        ]
        if "checkpointing" not in own:
            config.checkpointing = "offload" if away else True
    return config


def _read_zero(config: Config, zero: Mapping[str, Any]) -> None:
    _refuse("zero_optimization", zero, _ZERO | _PASSED_OVER_ZERO)
    config.ignored += [f"zero_optimization.{key}" for key in zero if key in _PASSED_OVER_ZERO]
    stage = zero.get("stage", 3)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"zero_optimization.stage = {stage!r}", "give 1, 2 or 3")
    if stage == 0:
        raise ConfigError("zero_optimization.stage = 0", "use 1 to 3; without ZeRO use evener.ddp")
    config.stage = stage
    config.small = _whole(zero, "stage3_param_persistence_threshold", 100_000, 0) or 0
    for name in ("offload_optimizer", "offload_param"):
        section = _section(zero, name) if zero.get(name) is not None else {}
        _refuse(f"zero_optimization.{name}", section, {"device", "nvme_path", "ratio"}
                | _PASSED_OVER_OFFLOAD)  # fmt: skip
        where = section.get("device", "cpu")
        if where == "nvme":
            if not section.get("nvme_path"):
                raise ConfigError(
                    f"zero_optimization.{name} has device nvme and no nvme_path", "name a folder"
                )
            config.budget = {"ssd": str(section["nvme_path"])}
        if where not in ("cpu", "none", "nvme"):
            raise ConfigError(
                f"zero_optimization.{name}.device = {where!r}", "use cpu, nvme or none"
            )
        if name == "offload_param" and section and where != "none" and stage != 3:
            raise ConfigError(
                f"zero_optimization.offload_param contradicts stage {stage}", "use stage 3"
            )
        config.ignored += [
            f"zero_optimization.{name}.{key}"
            for key in section
            if key not in ("device", "nvme_path")
        ]


def _read_precision(config: Config, source: Mapping[str, Any]) -> None:
    fp16 = _section(source, "fp16")
    bf16 = {**_section(source, "bfloat16"), **_section(source, "bf16")}
    _refuse("fp16", fp16, _FP16 | _PASSED_OVER_FP16)
    _refuse("bf16", bf16, {"enabled"} | _PASSED_OVER_BF16)
    config.ignored += [f"fp16.{key}" for key in fp16 if key in _PASSED_OVER_FP16]
    config.ignored += [f"bf16.{key}" for key in bf16 if key in _PASSED_OVER_BF16]
    on16, onb = _auto(fp16.get("enabled"), False), _auto(bf16.get("enabled"), False)
    if on16 and onb:
        raise ConfigError("fp16.enabled and bf16.enabled contradict each other", "choose one")
    config.dtype = torch.float16 if on16 else torch.bfloat16 if onb else torch.float32
    config.loss_scale = _real(fp16, "loss_scale", 0.0)
    config.initial_scale = 2.0 ** _real(fp16, "initial_scale_power", 16)
    config.scale_window = _whole(fp16, "loss_scale_window", 1000) or 1000
    config.hysteresis = _whole(fp16, "hysteresis", 2) or 2
    config.smallest_scale = _real(fp16, "min_loss_scale", 1.0)
    types = _section(source, "data_types")
    _refuse("data_types", types, {"grad_accum_dtype"})
    if types.get("grad_accum_dtype") is not None:
        config.gradient = _dtype(types["grad_accum_dtype"], "data_types.grad_accum_dtype")


def _read_batches(config: Config, source: Mapping[str, Any], ranks: int) -> None:
    total = _whole(source, "train_batch_size", None)
    micro = _whole(source, "train_micro_batch_size_per_gpu", None)
    steps = _whole(source, "gradient_accumulation_steps", None)
    if total is not None and micro is not None:
        wanted, rest = divmod(total, micro * ranks)
        if rest or wanted == 0 or (steps is not None and steps != wanted):
            raise ConfigError(
                f"train_batch_size = {total} is not train_micro_batch_size_per_gpu = {micro} x "
                f"gradient_accumulation_steps = {steps or 1} x {ranks} ranks",
                "leave one of them out, or make them agree",
            )
        steps = wanted
    elif total is not None:
        steps = steps or 1
        micro, rest = divmod(total, steps * ranks)
        if rest or micro == 0:
            raise ConfigError(
                f"train_batch_size = {total} does not divide by {steps} accumulation steps and "
                f"{ranks} ranks",
                "choose a multiple",
            )
    config.micro_batch, config.accumulation = micro, steps or 1
