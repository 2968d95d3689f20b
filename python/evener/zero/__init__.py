"""Train a model larger than the GPU: weights, gradients and states over GPU and host memory,
planned from what this machine measures.

    plan = evener.zero.plan(model, budget={"gpu": "24GB", "host": "110GB"})
    engine, optimizer, _, scheduler = evener.zero.initialize(model=model, config="ds_config.json")
    loss = engine(x); engine.backward(loss); engine.step()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evener.base.budget import Budget
from evener.zero import report
from evener.zero.api import initialize, plan
from evener.zero.boundary import NoRoomError
from evener.zero.config import Config, ConfigError
from evener.zero.engine import Engine
from evener.zero.frameworks.accelerate import accelerate
from evener.zero.frameworks.trainer import trainer
from evener.zero.loss import cross_entropy
from evener.zero.optimizer import ZeroOptimizer
from evener.zero.planner import Machine, Plan
from evener.zero.planning import NoFitError
from evener.zero.pretrained import empty_weights, from_pretrained
from evener.zero.probe import Probe, probe
from evener.zero.split import MuonAdamW
from evener.zero.tensors import export
from evener.zero.values import give_back

if TYPE_CHECKING:
    from evener.zero import checkpoint as checkpoint
    from evener.zero.checkpoint import CheckpointError, Save
    from evener.zero.checkpoint import begin as begin_checkpoint
    from evener.zero.checkpoint import load as load_checkpoint
    from evener.zero.checkpoint import save as save_checkpoint

__all__ = [
    "Budget",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "Machine",
    "MuonAdamW",
    "NoFitError",
    "NoRoomError",
    "Plan",
    "Probe",
    "Save",
    "ZeroOptimizer",
    "accelerate",
    "begin_checkpoint",
    "cross_entropy",
    "empty_weights",
    "export",
    "from_pretrained",
    "give_back",
    "initialize",
    "load_checkpoint",
    "plan",
    "probe",
    "report",
    "save_checkpoint",
    "trainer",
]

_OF_CHECKPOINT = {
    "CheckpointError": "CheckpointError",
    "Save": "Save",
    "begin_checkpoint": "begin",
    "load_checkpoint": "load",
    "save_checkpoint": "save",
}


# `torch.distributed.checkpoint` takes half a second of a core: it is imported when it is used.
def __getattr__(name: str) -> Any:
    if name != "checkpoint" and name not in _OF_CHECKPOINT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.checkpoint")
    value = module if name == "checkpoint" else getattr(module, _OF_CHECKPOINT[name])
    globals()[name] = value
    return value
