"""safetensors files: initial weights chunk by chunk, and the trained model for others to read.

The format (huggingface.co/docs/safetensors): 8 bytes with the length of a JSON header, the header
with dtype, shape and place of every tensor, then the bytes. It is read through a map and written
one tensor at a time, so the whole model is never in memory.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero.engine import Engine
from evener.zero.store import Source

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _header(path: Path, view: mmap.mmap) -> dict[str, Any]:
    try:
        (length,) = struct.unpack("<Q", view[:8])
        if length > len(view) - 8:
            raise ValueError("the header is longer than the file")
        read = json.loads(view[8 : 8 + length])
        entries = {}
        for name, entry in read.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            if not 0 <= begin <= end <= len(view) - 8 - length:
                raise ValueError(f"{name} lies beyond the end of the file: it was cut short")
            if end - begin != shape.numel() * dtype.itemsize:
                raise ValueError(f"{name} has {end - begin} bytes, not those of its shape")
            entries[name] = (dtype, shape, 8 + length + begin)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UsageError(
            f"{path} is no whole safetensors file: {error}", "fetch it again"
        ) from None
    return entries


def source(folder: str | Path) -> Source:
    """Initial values from the *.safetensors of a folder, or from one file."""
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no *.safetensors", "give a model's folder")
    found: dict[str, tuple[mmap.mmap, torch.dtype, torch.Size, int]] = {}
    for path in files:
        with path.open("rb") as file:
            if path.stat().st_size < 8:
                raise UsageError(f"{path} is no whole safetensors file", "fetch it again")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for name, (dtype, shape, place) in _header(path, view).items():
            found[name] = (view, dtype, shape, place)

    def give(name: str, _parameter: nn.Parameter) -> torch.Tensor:
        if name not in found:
            raise UsageError(f"{folder} has no {name}", "give the weights of this model")
        view, dtype, shape, place = found[name]
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        data = bytearray(view[place : place + shape.numel() * dtype.itemsize])
        return torch.frombuffer(data, dtype=dtype).view(shape)

    return give


def export(engine: Engine, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model as one safetensors file, visible when it is whole. `dtype`: the compute dtype
    by default. All ranks call it; rank 0 writes."""
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
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    work = path.with_name(f".{path.name}.writing")
    if engine.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    with work.open("wb") if engine.rank == 0 else open(os.devnull, "wb") as file:  # noqa: PTH123
        file.write(struct.pack("<Q", len(text)) + text)
        for chunk in engine.chunks():
            full = chunk.states.full()
            if engine.world > 1:
                mine = full.to(engine.device.device)
                full = torch.empty(
                    mine.numel() * engine.world, dtype=mine.dtype, device=mine.device
                )
                engine.ranks.gather(full, mine)
            for piece in chunk.group.pieces:
                data = full[piece.offset : piece.offset + piece.numel].to("cpu", dtype)
                file.write(data.contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        if engine.rank == 0:
            os.fsync(file.fileno())
    if engine.rank == 0:
        work.replace(path)
    return path
