"""An elastic job on GPUs loses a rank in the middle of its steps: the others go on from the commit.

The rank dies after its gradients' all-reduce has been started on the other one, which then waits on
the GPU for a peer that is gone: only an abort of NCCL's communicators frees it.

On one GPU the two ranks take turns, each an NCCL host of its own: the abort is tested, NVLink is
not. Without NVIDIA's MPS: a process that dies in the middle of its kernels may leave MPS's server,
and so the other process, in a state that is not defined (NVIDIA's Multi-Process Service, on early
client termination).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.tools.lab.environment import mps

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPUS == 0 or (GPUS == 1 and mps() is not None),
        reason="needs 2 GPUs, or one without NVIDIA's MPS: its server may not survive the death",
    ),
]

TRAIN = """
import faulthandler, os, signal, sys, time
# Two ranks of one host may not have one GPU.
if "TEST_HOSTS_APART" in os.environ:
    os.environ["NCCL_HOSTID"] = os.environ["HOROVOD_HOSTNAME"]
# A hang shows where: every thread's stack. Only the start takes long on a busy machine.
faulthandler.dump_traceback_later(80, exit=True)
import torch, horovod.torch as hvd

AT, WAY = 25, sys.argv[1]
hvd.init()
torch.cuda.set_device(int(os.environ["HOROVOD_HOSTNAME"][1:]) % torch.cuda.device_count())
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, log=[], total=0.0)
began = time.time()

def say(*words):
    print(f"{time.time() - began:.2f} s:", *words, flush=True)

@hvd.elastic.run
def train(state):
    say("ENTER", hvd.rank(), hvd.size(), state.step, len(state.log))
    total = sum(p.double().sum().item() for p in model.parameters())
    assert abs(total - state.total) < 1e-6 or state.step == 0, (total, state.total)
    while state.step < 60:
        optimizer.zero_grad()
        loss = model(torch.ones(64, 1024, device="cuda")).square().mean()
        dies = hvd.size() == 2 and state.step == AT and hvd.rank() == 1
        if dies and WAY == "before":
            say("DYING"), os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if dies:
            say("DYING"), os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.log = [*state.log, hvd.size()]
        if len(state.log) == 1:
            say("FIRST STEP")
            limit = float(os.environ.get("TEST_DUMP_AFTER", "40"))
            faulthandler.dump_traceback_later(limit, exit=True)
        if WAY == "item":
            loss.item()
        if state.step % 10 == 0:
            state.total = sum(p.double().sum().item() for p in model.parameters())
            state.commit()

train(state)
finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
say("DONE", hvd.size(), state.step, state.log.count(2), state.log.count(1), finite)
"""


@pytest.mark.parametrize("way", ["before", "item"])
def test_the_survivor_goes_on_from_the_last_commit(tmp_path: Path, way: str) -> None:
    """before: the peer has not begun the all-reduce. item: the survivor waits for its loss."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "rsh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (tmp_path / "rsh").chmod(0o755)
    launcher = [sys.executable, "-c", "from evener.cli import main; main()", "horovodrun"]
    done = subprocess.run(
        [
            *launcher,
            *("--rsh", "./rsh", "--gloo-timeout-seconds", "30", "--verbose"),
            *("-np", "2", "--min-np", "1", "-H", "g0:1,g1:1", sys.executable, "train.py", way),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_NCHANNELS": "2",
            **({"TEST_HOSTS_APART": "1", "NCCL_NET": "Socket"} if GPUS == 1 else {}),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = done.stdout + done.stderr
    print(shown)
    assert done.returncode == 0, shown
    entered = re.findall(r"ENTER (\d) (\d) (\d+) (\d+)", done.stdout)
    assert sorted(entered) == [("0", "1", "20", "20"), ("0", "2", "0", "0"), ("1", "2", "0", "0")]
    assert "DONE 1 60 20 40 True" in done.stdout, shown
    assert "back to the last commit" in done.stderr
