"""Cut a model into the stages of a pipeline, by what each of its operations costs.

plan = evener.pipeline.plan(model, example, stages=4, memory="24GB")
"""

from evener.pipeline import report
from evener.pipeline.api import auto
from evener.pipeline.capture import Captured, capture
from evener.pipeline.checkpoint import weights
from evener.pipeline.example import Example
from evener.pipeline.faults import PipelineError
from evener.pipeline.plan import NoFitError, Plan, Planned, network, plan, planned
from evener.pipeline.profile import Profile, Rates, estimate, measure, probe
from evener.pipeline.running import Pipeline
from evener.pipeline.schedules import KINDS as SCHEDULES
from evener.pipeline.simulate import Link, Network, Simulated, StageCost, simulate

__all__ = [
    "SCHEDULES",
    "Captured",
    "Example",
    "Link",
    "Network",
    "NoFitError",
    "Pipeline",
    "PipelineError",
    "Plan",
    "Planned",
    "Profile",
    "Rates",
    "Simulated",
    "StageCost",
    "auto",
    "capture",
    "estimate",
    "measure",
    "network",
    "plan",
    "planned",
    "probe",
    "report",
    "simulate",
    "weights",
]
