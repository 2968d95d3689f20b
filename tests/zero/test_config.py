"""DeepSpeed's JSON: what is read, what is passed over, what is refused and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.zero.config import ConfigError, read

EXAMPLE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1000,
    },
    "evener": {"budget": {"gpu": "24GB"}, "moments": "bf16", "depth": 3},
}


def test_a_file_that_exists_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(EXAMPLE))
    config = read(path, ranks=2)
    assert (config.stage, config.accumulation, config.micro_batch) == (3, 4, 4)
    assert config.dtype == torch.bfloat16 and config.moments == torch.bfloat16
    assert config.clipping == 1.0 and config.depth == 3 and config.small == 1000
    assert config.rule.values["betas"] == (0.9, 0.95) and config.rule.name == "adamw"
    assert "zero_optimization.overlap_comm" in config.ignored
    assert "zero_optimization.offload_optimizer.pin_memory" in config.ignored


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_cliping": 1.0}, "'gradient_cliping' is not known\n.*'gradient_clipping'"),
        ({"zero_optimization": {"stge": 3}}, r"'zero_optimization\.stge'.*\n.*'stage'"),
        ({"zero_optimization": {"stage": 0}}, "stage = 0"),
        ({"zero_optimization": {"stage": 4}}, "stage = 4"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "contradicts"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "no nvme_path"),
        ({"fp16": {"enabled": True}}, "contradict each other"),
        ({"fp16": {"enabled": "auto", "loss_scal": 1}}, r"fp16\.loss_scal.*\n.*'loss_scale'"),
        ({"train_batch_size": 33}, "train_batch_size = 33"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps = 3"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1"),
        ({"gradient_clipping": True}, "gradient_clipping = True"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam.*\n.*AdamW, Adam, SGD or Lion"),
        ({"optimizer": {"type": "SGD", "params": {"beta": 1}}}, "sgd has no parameter beta"),
        ({"evener": {"moments": "fp16"}}, "moments = 'fp16'.*\n.*bf16, bfloat16, int8"),
        ({"evener": {"master": "no"}}, "master = 'no'"),
        ({"bf16": {"enabled": False}, "evener": {"master": False}}, "only bfloat16.*\n.*bf16"),
        ({"evener": {"buget": 1}}, r"'evener\.buget'.*\n.*'budget'"),
        ({"bf16": 1}, "bf16 = 1 is not a section"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception, match=named) as refused:
        read({**EXAMPLE, **changes}, ranks=2)
    assert getattr(refused.value, "exit_code", None) == 2


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a JSON file"):
        read(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="not an object"):
        read(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("kind", "mode", "want"),
    [
        ("Adam", None, "adamw"),
        ("Adam", False, "adam"),
        ("FusedAdam", None, "adamw"),
        ("Lion", None, "lion"),
        ("FusedLion", None, "lion"),
    ],
)
def test_deepspeeds_adam_is_adamw_unless_told(kind: str, mode: bool | None, want: str) -> None:
    params = {} if mode is None else {"adam_w_mode": mode}
    config = read({"optimizer": {"type": kind, "params": params}})
    assert config.rule.name == want


def test_own_keys() -> None:
    made = read({"evener": {"checkpointing": "offload", "balance": False, "stale_updates": True,
                            "loss": "chunked", "compile": "aot_eager"}})  # fmt: skip
    assert (made.checkpointing, made.balance, made.stale_updates) == ("offload", False, True)
    assert made.loss == "chunked" and made.compile == "aot_eager"
    assert read({}).stale_updates is False and read({}).balance == "auto"
    for key, value in (("checkpointing", "some"), ("balance", 1), ("loss", "short")):
        with pytest.raises(ConfigError, match=rf"evener\.{key} = .* is not known"):
            read({"evener": {key: value}})


def test_sections_for_what_is_done_elsewhere_are_named_with_where() -> None:
    config = read({
        "tensorboard": {"enabled": True, "output_path": "logs"},
        "wandb": {"enabled": True, "project": "x"},
        "aio": {"block_size": 1048576, "queue_depth": 8},
        "communication_data_type": "fp32",
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    })  # fmt: skip
    said = "; ".join(config.ignored)
    assert "aio (the SSD tier sets its own block size and depth)" in said
    assert "communication_data_type (ranks reduce gradients in data_types" in said
    assert "tensorboard (curves" in said
    assert "wandb (curves" in said
    assert "activation_checkpointing.partition_activations" in said
    assert config.checkpointing == "offload"
    assert read({"activation_checkpointing": {}}).checkpointing is True
    with pytest.raises(ConfigError, match="cpu_checkpoint") as found:
        read({"activation_checkpointing": {"cpu_checkpoint": True}})
    assert "cpu_checkpointing" in found.value.fix
