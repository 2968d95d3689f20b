"""EVENER_ZERO: a program's Trainer becomes one under the memory engine, or the program ends.

transformers is not in this environment. A package of its name stands for it, with what the door
touches; `make wild` runs trl's own scripts.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from evener.door import enter
from tests.door.test_door import python
from tests.door.test_sharded import ROOT

TRAINER = """
from types import SimpleNamespace as Bag

class Trainer:
    def __init__(self, model=None, args=None):
        self.model, self.args = model, args
        self.create_accelerator_and_postprocess()

    def create_accelerator_and_postprocess(self):
        self.accelerator = Bag(prepare=len, clip_grad_norm_=len)

def arguments(**given):
    return Bag(gradient_accumulation_steps=1, per_device_train_batch_size=2, n_gpu=1, **given)
"""
PROGRAM = """
from transformers.trainer import Trainer, arguments

class Mine(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.mine = True

one = Mine(model="tiny", args=arguments(model_init_kwargs={"dtype": "float32"}))
two = Mine(args=arguments())
print(type(one).__name__, isinstance(one, Mine), one.mine, type(one) is type(two))
print(one.accelerator.prepare is not len, one.args.model_init_kwargs)
"""
STEP = (
    "import torch; p = torch.nn.Parameter(torch.ones(1)); p.grad = p.detach().clone();"
    "torch.optim.SGD([p], lr=0.1).step()"
)


@pytest.fixture
def path(tmp_path: Path) -> list[str]:
    """A PYTHONPATH with the door and something that is called transformers."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trainer.py").write_text(TRAINER)
    return [str(enter.SITE), str(tmp_path), str(ROOT / "python")]


def ran(code: str, path: list[str], value: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python(code, path, EVENER_ZERO=value, EVENER_LOG="info", **env)


def test_a_trainer_becomes_one_under_the_engine(path: list[str]) -> None:
    done = ran(PROGRAM, path, "on")
    assert done.stdout.splitlines() == [
        "ZeroMine True True True",
        "True {'device_map': {'': 'cpu'}, 'dtype': 'float32'}",
    ], done.stderr
    assert done.stderr.count("EVENER_ZERO: Mine trains under evener.zero") == 1, done.stderr
    assert "never took over" not in done.stderr


def test_off_leaves_it_as_it_is(path: list[str]) -> None:
    done = ran(PROGRAM, path, "off")
    assert done.stdout.splitlines() == [
        "Mine True True True",
        "False {'dtype': 'float32'}",
    ], done.stderr
    assert "evener" not in done.stderr


def test_a_script_that_names_the_engine_keeps_its_own(path: list[str]) -> None:
    code = PROGRAM.replace("one =", "from evener import zero; Mine = zero.trainer(Mine)\none =")
    done = ran(code, path, "missing.json")
    assert done.stdout.startswith("ZeroMine True True True"), done.stderr


@pytest.mark.parametrize(
    ("value", "config", "said"),
    [
        ("missing.json", "", "configuration missing.json: "),
        ("ds.json", '{"zero_optimisation": {}}', "did you mean 'zero_optimization'?"),
    ],
)
def test_what_cannot_be_ends_the_program(
    path: list[str], value: str, config: str, said: str, tmp_path: Path
) -> None:
    if config:
        value = str(tmp_path / value)
        Path(value).write_text(config)
    done = ran(PROGRAM, path, value)
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert done.stdout == ""


def test_a_model_that_runs_before_the_engine_has_it_is_refused(path: list[str]) -> None:
    given = 'model_init_kwargs=None, precompute_ref_log_probs=True, device=Bag(type="{}")'
    code = "from transformers.trainer import *\nTrainer(model='tiny', args=arguments(GIVEN))"
    done = ran(code.replace("GIVEN", given.format("cuda")), path, "on")
    assert "precompute_ref_log_probs = True" in done.stderr, done.stderr
    done = ran(code.replace("GIVEN", given.format("cpu")), path, "on")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "rank", "said"),
    [
        (STEP, "", True),
        (STEP, "0", True),
        (STEP, "1", False),
        ("import torch", "", False),  # a launcher, or a tool beside it
        (f"{STEP}; raise ValueError", "", False),
    ],
)
def test_training_without_a_trainer_is_said(
    code: str, rank: str, said: bool, path: list[str]
) -> None:
    done = ran(code, path, "on", **({"RANK": rank} if rank else {}))
    line = "evener 0: EVENER_ZERO=on never took over: the program trained without"
    assert done.stderr.count(line) == said, done.stderr
