"""What `evener pipeline plan` and `report` do; `evener.tools.plan.pipeline` has their options."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from evener.base import units
from evener.errors import UsageError
from evener.pipeline import report
from evener.pipeline.plan import NoFitError, Plan, network
from evener.pipeline.plan import plan as make_plan
from evener.pipeline.profile import Rates

_PIPE_WIDTH = 160  # of output that no terminal shows
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run_plan(model: str, **given: Any) -> None:
    """Plan, and print what was planned. Exit(1): it does not fit."""
    console = Console(stderr=given["as_json"])
    if not console.is_terminal:
        console = Console(stderr=given["as_json"], width=_PIPE_WIDTH, highlight=False)
    click.echo(f"tracing {model} without memory", err=True)
    found = _model(model, given["batch"], _DTYPES[given["dtype"]])
    rates = _rates(given["flops"], given["bandwidth"])
    if rates is None:
        click.echo("timing its operations, one at a time", err=True)
    try:
        made = make_plan(
            found["model"],
            found["example"],
            target=found.get("target"),
            loss=found.get("loss"),
            stages=given["stages"],
            schedule=given["schedule"],
            stages_per_rank=given["stages_per_rank"],
            microbatches=_count(given["microbatches"]),
            memory=_per_rank(given["memory"]),
            speeds=_speeds(given["speeds"]),
            optimizer=given["optimizer"],
            recompute={"yes": True, "no": False}.get(given["recompute"], "auto"),
            network=network(given["inside"], given["network"], given["per_node"]),
            activations=given["activations"],
            device=given["device"],
            rates=rates,
        )
    except NoFitError as error:
        if given["as_json"]:
            click.echo(json.dumps({"schema": "evener.pipeline/1", "fits": False,
                                   "problem": error.problem, "fix": error.fix}))  # fmt: skip
            raise click.exceptions.Exit(1) from None
        raise
    record = {"schema": "evener.pipeline/1", "fits": True, "plan": made.to_dict()}
    if given["output"]:
        _write(Path(given["output"]), json.dumps(record) + "\n")
    if given["html"]:
        _write(Path(given["html"]), report.page(record))
    if given["as_json"]:
        click.echo(json.dumps(record))
    else:
        show(made, console)


def show(made: Plan, console: Console) -> None:
    """Print a plan: its stages, what to expect, and what other cuts would give."""
    how = f"{made.microbatches} microbatches of {made.rows} row(s), {made.schedule}"
    console.print(
        f"[bold]{made.parameters / 1e6:,.1f} M parameters[/] over {made.ranks} ranks, {how}; "
        f"operations {made.profile}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("stage", "rank", "blocks", "operations", "forward ms", "backward ms",
                  "parameters MB", "sends MB", "in flight", "memory GB"):  # fmt: skip
        table.add_column(title, justify="left" if title == "blocks" else "right")
    for stage in made.stages:
        table.add_row(
            str(stage.index),
            str(stage.rank),
            stage.blocks,
            str(stage.operations),
            f"{stage.forward * 1e3:.2f}",
            f"{(stage.input + stage.weight) * 1e3:.2f}",
            f"{stage.parameters / 1e6:.1f}",
            f"{stage.sent / 1e6:.2f}",
            str(stage.in_flight),
            f"{stage.memory / 1e9:.2f}",
        )
    console.print(table)
    ways = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("cuts", "step ms", "longest / mean", "bubble", "memory GB", "fits"):
        ways.add_column(title, justify="left" if title == "cuts" else "right")
    ways.add_row("[bold]planned[/]", f"[bold]{made.step_seconds * 1e3:.2f}[/]",
                 f"{made.imbalance:.3f}", f"{made.bubble:.1%}",
                 f"{max(made.memory) / 1e9:.2f}", "yes")  # fmt: skip
    for name, other in made.alternatives.items():
        if other.cuts is None:
            ways.add_row(name, "cannot be cut so", "", "", "", "")
            continue
        ways.add_row(name, f"{other.step_seconds * 1e3:.2f}", f"{other.imbalance:.3f}",
                     f"{other.bubble:.1%}", f"{other.memory / 1e9:.2f}",
                     "yes" if other.fits else "no")  # fmt: skip
    console.print(ways)
    if made.bound > 1:
        console.print(f"The largest operation alone enforces {made.bound:.3f} of longest / mean.")
    if made.recompute:
        console.print("Forward runs again before backward: without that nothing fits.")
    for names in made.tied:
        console.print(f"{' = '.join(names)}: its gradients are summed over several stages")
    if made.estimated:
        shown = ", ".join(made.estimated[:5])
        console.print(f"{len(made.estimated)} operation(s) could not be timed alone: {shown}")
    console.print("[dim](a prediction, not a measurement)[/]")


def write_report(recording: str, output: str | None) -> None:
    """Write the page of `evener pipeline report`."""
    record = report.read(recording)
    path = Path(output) if output else Path(recording).with_suffix(".html")
    _write(path, report.page(record))
    click.echo(f"{report.headline(record)}: {path}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}", "give another path") from None


def _count(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit():
        raise UsageError(f"{text!r} microbatches are no number", "give a number, or auto")
    return int(text)


def _per_rank(text: str | None) -> str | list[str] | None:
    if text is None or "," not in text:
        return text
    return [part.strip() for part in text.split(",")]


def _speeds(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"speeds {text!r} are no numbers", "write them as 1,1,0.5") from None


def _rates(flops: str | None, bandwidth: str | None) -> Rates | None:
    if flops is None and bandwidth is None:
        return None
    if flops is None or bandwidth is None:
        raise UsageError("--flops and --bandwidth belong together",
                         "give both, as --flops 400T --bandwidth 3TB/s")  # fmt: skip
    letter = flops[-1:].upper()
    scale = {"G": 1e9, "T": 1e12, "P": 1e15}.get(letter)
    try:
        rate = float(flops[:-1]) * (scale or 0.0)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise UsageError(f"--flops {flops!r} is no rate", "write it as 400T or 900G")
    return Rates(rate, units.parse_rate(bandwidth, "--bandwidth") / 8)


def _model(name: str, batch: str, dtype: torch.dtype) -> dict[str, Any]:
    """The model on the meta device, and its example."""
    kind, _, rest = name.partition(":")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            if kind == "torchvision":
                return _torchvision(rest, batch)
            if kind.endswith(".py"):
                return _function(Path(kind), rest)
            return _config(Path(name), batch)
    finally:
        torch.set_default_dtype(before)


def _function(path: Path, name: str) -> dict[str, Any]:
    if not name:
        raise UsageError(f"{path} names no function", f"write {path}:make")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} is not there", "give a Python file and a function, as my.py:make")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise UsageError(f"{path} has no function {name}", "write FILE.py:FUNCTION")
    found = function()
    if isinstance(found, tuple) and len(found) == 2:
        found = {"model": found[0], "example": found[1]}
    if not isinstance(found, dict) or not isinstance(found.get("model"), nn.Module):
        raise UsageError(
            f"{path}:{name} returns {type(found).__name__}",
            "return a dict with model, example, and where needed loss and target",
        )
    return found


def _numbers(batch: str, wanted: int) -> list[int]:
    try:
        found = [int(part) for part in batch.lower().split("x")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(found) < wanted:
        raise UsageError(f"batch {batch!r} is not known", "write it as 16x512 (rows x tokens)")
    return found


def _torchvision(name: str, batch: str) -> dict[str, Any]:
    try:
        from torchvision import models
    except ImportError:
        raise UsageError("torchvision is not installed", "pip install torchvision") from None
    if name not in models.list_models(module=models):
        raise UsageError(f"torchvision has no model {name!r}", "try torchvision:resnet152")
    rows = _numbers(batch, 1)[0]
    return {
        "model": models.get_model(name),
        "example": (torch.empty(rows, 3, 224, 224),),
        "target": torch.empty(rows, dtype=torch.long),
        "loss": nn.functional.cross_entropy,
    }


def _config(path: Path, batch: str) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: {error}", "give a config.json, torchvision:NAME or FILE.py:FUNCTION"
        ) from None
    try:
        import transformers  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UsageError(
            "a config.json is read by transformers, which is not installed",
            "pip install transformers, or write a function and give FILE.py:FUNCTION",
        ) from None
    rows, tokens = _numbers(batch, 2)[:2]
    kind = str(read.pop("model_type", ""))
    try:
        config = transformers.AutoConfig.for_model(kind, **read)
    except (ValueError, KeyError) as error:
        said = str(error).split("\n")[0][:200]
        raise UsageError(f"{path}: {said}", "give the config.json of a model") from None
    named = [str(one) for one in read.get("architectures") or ()]
    architecture = getattr(transformers, named[0], None) if named else None
    if architecture is not None:
        model = architecture(config)
    elif config.is_encoder_decoder:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    elif kind in ("bert", "roberta", "electra", "distilbert", "albert", "deberta-v2"):
        model = transformers.AutoModelForMaskedLM.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    tokens_of = torch.zeros(rows, tokens, dtype=torch.long)
    return {"model": model, "example": {"input_ids": tokens_of, "labels": tokens_of.clone()}}
