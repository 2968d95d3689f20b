"""What `import evener...` brings: nothing that takes a second and that most programs never use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evener import zero

LATE = [
    *("torch._dynamo", "torch._inductor", "sympy", "transformers", "tensorflow"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp"),
]
"""torch's compiler takes a second of a core, its checkpoints half of one."""


def test_modules_leave_what_is_slow_to_who_uses_it() -> None:
    code = "import sys, {}; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    modules = "evener.zero, evener.embedding.torch, evener.ddp.model, evener.moe, "
    modules += "evener.horovod.torch, evener.compile, evener.precision"
    done = subprocess.run(
        [sys.executable, "-c", code.format(modules), *LATE],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == []


def test_names_of_zero_that_come_late_are_there() -> None:
    assert zero.checkpoint.begin is zero.begin_checkpoint
    assert all(getattr(zero, name) is not None for name in zero.__all__)
    with pytest.raises(AttributeError, match=r"'evener.zero' has no attribute 'chekpoint'"):
        _ = zero.chekpoint  # type: ignore[attr-defined]
