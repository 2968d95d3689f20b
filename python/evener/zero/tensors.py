"""safetensors files: initial weights chunk by chunk, and the trained model for others to read.

The safetensors library reads: it maps the file and checks its header. Writing is ours, as the
library wants all tensors at once: here they come one at a time, gathered from the ranks, and the
whole model is never in memory. The format (huggingface.co/docs/safetensors): 8 bytes with the
length of a JSON header, the header with dtype, shape and place of every tensor, then the bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from evener.base.given import given
from evener.errors import UsageError
from evener.zero import packed
from evener.zero.engine import Engine

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def opened(folder: str | Path) -> dict[str, Any]:
    """The open file of each tensor, by its name, in the *.safetensors of a folder, or in one file:
    those that `model.safetensors.index.json` names, where it is there.

    A tensor is a view of its file, mapped into memory: it is read when it is used, and never twice.
    """
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            raise UsageError(f"{index} is no whole index", "fetch it again") from None
        files = [folder / name for name in sorted(names)]
    if not files:
        raise UsageError(f"{folder} holds no *.safetensors", "give a model's folder")
    found: dict[str, Any] = {}
    for path in files:
        try:
            handle = safe_open(path, framework="pt")
            found.update(dict.fromkeys(handle.keys(), handle))
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{path} is no whole safetensors file: {error}", "fetch it again"
            ) from None
    return found


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state_dict has."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@given
def export(engine: Engine, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model as one safetensors file, visible when it is whole. `dtype`: the compute dtype
    by default; buffers keep theirs. All ranks call it; rank 0 writes, and its buffers."""
    if packed.marks(engine.module):
        raise UsageError(
            "the model has weights in 4 bits, and a safetensors file of them needs their scales",
            "save the adapter: model.save_pretrained(folder) of peft",
        )
    engine.drain()
    path = Path(path)
    if path.suffix != ".safetensors":
        path = path / "model.safetensors"
    dtype = dtype or engine.store.dtype
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for chunk in engine.chunks():
        for piece in chunk.group.pieces:
            end = place + piece.numel * dtype.itemsize
            header[piece.name] = {
                "dtype": _NAMES[dtype],
                "shape": list(piece.shape),
                "data_offsets": [place, end],
            }
            place = end
    kept = dict(buffers(engine.module))
    for name, buffer in kept.items():
        if buffer.dtype not in _NAMES:
            raise UsageError(f"buffer {name} is {buffer.dtype}", "register it as not persistent")
        end = place + buffer.nbytes
        header[name] = {
            "dtype": _NAMES[buffer.dtype],
            "shape": list(buffer.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    work = path.with_name(f".{path.name}.writing")
    first = engine.ranks.number == 0
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
    with work.open("wb") if first else open(os.devnull, "wb") as file:  # noqa: PTH123
        file.write(struct.pack("<Q", len(text)) + text)
        for chunk in engine.chunks():
            full = chunk.full()
            if engine.world > 1:
                mine = full.to(engine.device.device)
                full = torch.empty(
                    mine.numel() * engine.world, dtype=mine.dtype, device=mine.device
                )
                engine.ranks.collect(full, mine)
            for piece in chunk.group.pieces:
                data = full[piece.offset : piece.offset + piece.numel].to("cpu", dtype)
                file.write(data.contiguous().view(torch.uint8).numpy().tobytes())
        for buffer in kept.values():
            data = buffer.detach().to("cpu").contiguous().reshape(-1)
            file.write(data.view(torch.uint8).numpy().tobytes())
        file.flush()
        if first:
            os.fsync(file.fileno())
    if first:
        work.replace(path)
    return path
