"""Checkpoints: resumed bit for bit, whole after a kill at any stage, clear where they are not."""

from __future__ import annotations

import copy
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero import checkpoint, entries
from tests.zero.engines import configuration, start, weights
from tests.zero.models import Model, batches, loss_of


def train(engine: zero.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in data:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8", "none"])
def test_resume_is_bitwise_on_another_budget(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {} if kind == "fp32" else {kind: {"enabled": True}}
    if kind in ("int8", "none"):
        own = {"moments": "int8"} if kind == "int8" else {"master": False}
        changes = {"bf16": {"enabled": True}, "evener": own}
    data = batches(6)
    torch.manual_seed(0)
    first = start(Model(), {"layers.0/0"}, **changes)
    train(first, data[:3])
    zero.save_checkpoint(first, tmp_path, extra={"row": 3})
    want, end = train(first, data[3:]), weights(first)
    torch.manual_seed(7)
    second = start(Model(), {"layers.2/0", "head/0"}, **changes)
    assert zero.load_checkpoint(second, tmp_path) == {"row": 3}
    assert train(second, data[3:]) == want
    got = weights(second)
    assert all(torch.equal(got[name], end[name]) for name in end)
    assert second.global_steps == first.global_steps
    first.close()
    second.close()


KILLED = """
import os, signal, sys, torch
from evener import zero
from tests.zero.models import Model, batches
from tests.zero.test_checkpoint import start, train
torch.set_num_threads(1)

def child(folder, stage):
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    zero.save_checkpoint(engine, folder)
    train(engine, batches(1))
    calls = 0
    def count(event, arguments):
        nonlocal calls
        interesting = event in ("open", "os.rename", "os.mkdir", "os.remove")
        if interesting and folder in str(arguments[0]):
            calls += 1
            if calls == stage:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    zero.save_checkpoint(engine, folder)

# Once before, so that no child imports anything; its threads end with it.
torch.manual_seed(0)
engine = start(Model())
train(engine, batches(1))
zero.save_checkpoint(engine, sys.argv[1] + "/first")
engine.close()
for stage in map(int, sys.argv[2:]):
    pid = os.fork()
    if not pid:
        child(f"{sys.argv[1]}/{stage}", stage)
        os._exit(0)
    print(stage, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_kill_at_any_stage_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Every opening, renaming and making of a file in turn is the last thing that the job does."""
    stages = [*range(1, 11), 99]
    command = [sys.executable, "-c", KILLED, str(tmp_path), *map(str, stages)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=150)
    torch.manual_seed(0)
    engine = start(Model())
    ends, steps = [], []
    for line in run.stdout.splitlines():
        stage, status = line.split()
        zero.load_checkpoint(engine, tmp_path / stage)
        ends.append(int(status))
        steps.append(engine.global_steps)
    assert len(ends) == len(stages) and set(ends) == {0, -signal.SIGKILL}
    assert ends[0] == -signal.SIGKILL and steps[0] == 1
    assert ends[-1] == 0 and steps[-1] == 2 and steps == sorted(steps)
    engine.close()


def test_damage_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    path = zero.save_checkpoint(engine, tmp_path)
    before = {name: value.clone() for name, value in weights(engine).items()}
    train(engine, batches(1))
    after = {name: value.clone() for name, value in weights(engine).items()}
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    with pytest.raises(zero.CheckpointError, match=r"bytes, it was written with .*\n.*damaged"):
        zero.load_checkpoint(engine, tmp_path)
    assert all(torch.equal(after[n], v) for n, v in weights(engine).items())
    data.write_bytes(whole)
    zero.load_checkpoint(engine, tmp_path)
    assert all(torch.equal(before[n], v) for n, v in weights(engine).items())
    other = start(Model(width=16))
    with pytest.raises(zero.CheckpointError, match=r"elements in .* in the model"):
        zero.load_checkpoint(other, tmp_path)
    with pytest.raises(zero.CheckpointError, match="holds no checkpoint"):
        zero.load_checkpoint(other, tmp_path / "nothing")
    other.close()
    engine.close()


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    path = zero.save_checkpoint(engine, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    train(engine, batches(1))
    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(zero.CheckpointError, match=r"No space left.*\n.*as it was"):
        zero.save_checkpoint(engine, tmp_path)
    assert checkpoint.find(tmp_path) == path
    monkeypatch.undo()
    # And by the system itself: no file of this process may grow beyond a few pages.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        reason = r"not written: rank 0: .*(too large|unexpected pos).*GB are free.*\n.*as it was"
        with pytest.raises(zero.CheckpointError, match=reason):
            zero.save_checkpoint(engine, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.find(tmp_path) == path
    # With room again the next one is written, and is then the last.
    again = zero.save_checkpoint(engine, tmp_path)
    assert again != path and checkpoint.find(tmp_path) == again
    assert not list(tmp_path.glob(".*"))
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_out_and_in(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    engine = start(Model(tied=True))
    train(engine, batches(2))
    zero.export(engine, tmp_path, dtype)
    want = weights(engine)
    with torch.device("meta"):
        empty = Model(tied=True)
    config = zero.Config(device="cpu", small=0)
    second, *_ = zero.initialize(model=empty, config=config, weights=tmp_path, resident=set())
    got = weights(second)
    assert all(torch.equal(got[n], want[n].to(dtype).float()) for n in want)
    assert loss_of(second, batches(1)[0]).isfinite()
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-10], whole[:4], b"", b"\xff" * 64, whole[:8] + b"}" + whole[9:]):
        file.write_bytes(broken)
        with torch.device("meta"):
            empty = Model(tied=True)
        with pytest.raises(UsageError, match=r"model\.safetensors is no whole safetensors file"):
            zero.initialize(model=empty, config=config, weights=tmp_path, resident=set())
    engine.close()
    second.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """A slow writer: the next steps begin, wait chunk by chunk, and what is saved is the state of
    the moment when it was asked for."""
    read: list[str] = []
    inner = entries.Progress.reading

    def slow(self: Any, chunk: Any) -> None:
        time.sleep(0.01)
        read.append(chunk.group.name)
        inner(self, chunk)

    monkeypatch.setattr(entries.Progress, "reading", slow)
    data = batches(8)
    torch.manual_seed(0)
    engine, *_ = zero.initialize(
        model=Model(), config=configuration(), resident={"layers.1/0"}, streaming=streaming
    )
    train(engine, data[:2])
    saved = {name: value.clone() for name, value in weights(engine).items()}
    saving = zero.begin_checkpoint(engine, tmp_path, extra={"row": 2})
    begun = not saving.done()
    want = train(engine, data[2:4])
    path = saving.result()
    assert begun and path.name == "step-00000002"
    # Read in the order of the next forward pass, so that it waits least.
    assert read.index("embed/0") < read.index("layers.0/0") < read.index("head/0")
    end = {name: value.clone() for name, value in weights(engine).items()}
    again = zero.begin_checkpoint(engine, tmp_path)
    again.wait()
    assert zero.load_checkpoint(engine, path) == {"row": 2}
    assert all(torch.equal(saved[name], value) for name, value in weights(engine).items())
    assert train(engine, data[2:4]) == want
    assert all(torch.equal(end[name], value) for name, value in weights(engine).items())
    engine.close()


def test_what_fails_beside_training_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    good = zero.save_checkpoint(engine, tmp_path)
    train(engine, batches(1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_all", full)
    saving = zero.begin_checkpoint(engine, tmp_path)
    saving.wait()
    train(engine, batches(2))  # nobody waits for a writer that is gone
    with pytest.raises(zero.CheckpointError, match="No space left"):
        zero.begin_checkpoint(engine, tmp_path)
    assert checkpoint.find(tmp_path) == good
    engine.close()


def test_safetensors_with_the_library(tmp_path: Path) -> None:
    """What we write, the format's own library reads; what it writes, in mixed dtypes, we read."""
    torch.manual_seed(0)
    engine = start(Model(), bf16={"enabled": True})
    train(engine, batches(1))
    path = zero.export(engine, tmp_path / "ours")
    want = weights(engine)
    read = load_file(path)
    assert set(read) == set(want)
    assert all(torch.equal(read[n], want[n].bfloat16()) for n in want)
    (tmp_path / "theirs").mkdir()
    theirs = {name: torch.randn(value.shape) for name, value in want.items()}
    theirs["embed.weight"] = theirs["embed.weight"].half()
    save_file(theirs, tmp_path / "theirs/model.safetensors")
    with torch.device("meta"):
        empty = Model()
    config = zero.Config(device="cpu", small=0)
    second, *_ = zero.initialize(
        model=empty, config=config, weights=tmp_path / "theirs", resident=set()
    )
    got = weights(second)
    assert all(torch.equal(got[name], theirs[name].float()) for name in theirs)
    engine.close()
    second.close()


def test_a_model_of_transformers_goes_there_and_back(tmp_path: Path) -> None:
    """A Llama of Hugging Face's library, trained and exported, is what `from_pretrained` reads."""
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers, which Evener does not depend on"
    )
    shape = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape)
    engine = start(model)
    tokens = batches(1)[0]
    for _ in range(2):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    engine.drain()
    zero.export(engine, tmp_path, torch.float32)
    shape.save_pretrained(tmp_path)
    want = engine(input_ids=tokens, labels=tokens).loss.item()
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert back(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(want, rel=1e-6)
    engine.close()


def test_latest_says_what_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Back to an earlier step, saved there again, it is that one, and not the highest number."""
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    early = zero.save_checkpoint(engine, tmp_path)
    train(engine, batches(2))
    late = zero.save_checkpoint(engine, tmp_path)
    zero.load_checkpoint(engine, early)
    train(engine, batches(1, seed=9))
    branch = zero.save_checkpoint(engine, tmp_path)
    assert branch.name == "step-00000002" and late.name == "step-00000003"
    zero.load_checkpoint(engine, tmp_path)
    assert engine.global_steps == 2
    # A mark that names nothing is said, and the highest whole one taken.
    (tmp_path / "latest").write_text("step-00000007")
    with caplog.at_level("WARNING", "evener.zero"):
        assert checkpoint.find(tmp_path) == late
    assert "step-00000007" in caplog.text
    engine.close()


def test_a_step_that_is_saved_again_is_never_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new one is whole and `latest` names it, the old one is there."""
    torch.manual_seed(0)
    engine = start(Model())
    train(engine, batches(1))
    first = zero.save_checkpoint(engine, tmp_path, extra="first")
    seen: list[bool] = []
    finish = checkpoint._finish

    def watched(meta: Any, work: Path, final: Path) -> None:
        finish(meta, work, final)
        seen.append((first / "meta.json").exists())

    monkeypatch.setattr(checkpoint, "_finish", watched)
    second = zero.save_checkpoint(engine, tmp_path, extra="second")
    assert seen == [True] and second != first and not first.exists()
    third = zero.save_checkpoint(engine, tmp_path, extra="third")
    assert [path.name for path in tmp_path.glob("step-*")] == [third.name]
    assert zero.load_checkpoint(engine, tmp_path) == "third"
    assert engine.global_steps == 1
    engine.close()


@pytest.mark.parametrize("resident", [set(), {"layers.1/0"}])
def test_the_optimizer_s_state_goes_to_torch_and_back(resident: set[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    engine, optimizer, _, scheduler = zero.initialize(
        model=model,
        config=configuration(gradient_clipping=0),
        resident=resident,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )
    train(engine, batches(3))
    state = copy.deepcopy(optimizer.state_dict())
    want = train(engine, batches(3, seed=5))
    end = {name: value.clone() for name, value in weights(engine).items()}
    # torch's AdamW takes it as its own.
    theirs = torch.optim.AdamW(plain.parameters(), lr=1.0)
    theirs.load_state_dict(copy.deepcopy(state))
    first = theirs.state[plain.embed.weight]
    assert first["step"] == 3 and first["exp_avg"].shape == plain.embed.weight.shape
    assert theirs.param_groups[0]["lr"] == state["param_groups"][0]["lr"]
    # And back: into the groups that the scheduler has.
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0] is group is engine.param_groups[0]
    assert group["lr"] == state["param_groups"][0]["lr"]
    assert all(chunk.steps == [3] * len(chunk.steps) for chunk in engine.chunks())
    rate = group["lr"]
    scheduler.step()
    scheduler.step()
    assert engine.param_groups[0]["lr"] != rate
    other = torch.optim.SGD(Model(width=16).parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(UsageError, match="has 3 elements"):
        optimizer.load_state_dict(state)
    bad = other.state_dict()
    bad["param_groups"][0]["params"].pop()
    with pytest.raises(UsageError, match="load the state of this model"):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    assert want and end
    engine.close()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.first(x)))
        return out


def _trained(steps: int) -> zero.Engine:
    torch.manual_seed(0)
    engine = start(Normed())
    for _ in range(steps):
        engine.backward(engine(torch.randn(16, 8) * 3 + 1).square().mean())
        engine.step()
    return engine


def test_buffers_are_in_checkpoints_exports_and_what_is_read_of_them(tmp_path: Path) -> None:
    engine = _trained(4)
    state = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    zero.save_checkpoint(engine, tmp_path / "saved")
    zero.export(engine, tmp_path / "out")
    engine.close()
    again = _trained(0)
    zero.load_checkpoint(again, tmp_path / "saved")
    assert all(torch.equal(b, state[name]) for name, b in again.module.named_buffers())
    again.close()
    with zero.empty_weights():
        empty = Normed()
    third, *_ = zero.initialize(
        model=empty, config=configuration(), resident=set(), weights=tmp_path / "out"
    )
    assert all(torch.equal(b, state[name]) for name, b in empty.named_buffers())
    third.close()


@pytest.mark.parametrize("nested", [False, True])
def test_milestones_go_on_after_loading(tmp_path: Path, nested: bool) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)
        if not nested:
            return steps
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [1])

    def run(load: bool, steps: int) -> list[float]:
        torch.manual_seed(0)
        engine, optimizer, *_ = zero.initialize(
            model=Normed(), config=configuration(), resident=set(), lr_scheduler=make
        )
        if load:
            zero.load_checkpoint(engine, tmp_path)
        rates = []
        for step in range(steps):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if not load and step == 0:
                zero.save_checkpoint(engine, tmp_path)
        engine.close()
        return rates

    assert run(False, 7)[1:] == run(True, 6)


def test_saving_within_an_accumulation_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = start(Normed(), gradient_accumulation_steps=2)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    with pytest.raises(zero.CheckpointError, match="waiting for a step"):
        zero.save_checkpoint(engine, tmp_path)
    engine.close()


def test_a_checkpoint_of_another_dtype_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = start(Normed(), bf16={"enabled": True})
    zero.save_checkpoint(engine, tmp_path)
    engine.close()
    other = start(Normed())
    with pytest.raises(zero.CheckpointError, match="train in the same dtype"):
        zero.load_checkpoint(other, tmp_path)
    other.close()


def test_keep_leaves_the_newest(tmp_path: Path) -> None:
    engine = start(Model(), {"layers.0/0"})
    data = batches(6)
    for step in range(3):
        train(engine, data[step : step + 1])
        zero.save_checkpoint(engine, tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000002", "step-00000003"]
    # Back to an older one: what is written next is the newest, whatever its number.
    zero.load_checkpoint(engine, tmp_path / "step-00000002")
    saved = zero.save_checkpoint(engine, tmp_path, keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == [saved.name]
    zero.load_checkpoint(engine, tmp_path)
    assert engine.global_steps == 2
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match="keep"):
            zero.save_checkpoint(engine, tmp_path, keep=wrong)
    engine.close()
