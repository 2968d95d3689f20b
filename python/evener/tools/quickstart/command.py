"""The click command of `evener quickstart`."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import click

from evener.errors import UsageError
from evener.tools.quickstart import PROJECTS

KINDS = {
    "ddp": "PyTorch, DistributedDataParallel",
    "fsdp": "PyTorch, a model that fully_shard shards",
    "one-gpu": "PyTorch, a model larger than the GPU",
    "tensorflow": "Keras, a recommender whose tables take any id",
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def quickstart(kind: str, folder: Path) -> None:
    """Write a small working project into DIR, which may not exist or must be empty.

    \b
        ddp         PyTorch, DistributedDataParallel
        fsdp        PyTorch, a model that fully_shard shards
        one-gpu     PyTorch, a model larger than the GPU
        tensorflow  Keras, a recommender whose tables take any id

    It runs as it is. Put your model and your data where the script says so.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "name a new folder: nothing is overwritten")
    source = PROJECTS / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
                click.echo(f"wrote {folder / file.name}")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "name another folder") from None
    click.echo("\nRun it:")
    needs = "tensorflow" if kind == "tensorflow" else "torch"
    if importlib.util.find_spec(needs) is None:
        click.echo(f"  pip install 'evener[{needs}]'")
    click.echo(f"  cd {folder}\n  {first_command(source)}")


def first_command(project: Path) -> str:
    """What its README says to type first."""
    found = re.search(r"```sh\n(.+?)\n```", (project / "README.md").read_text(encoding="utf-8"))
    assert found is not None, project
    return found[1]
