"""Benchmarks' results as JSON: nccl-tests' report (`-J`, version 3), Evener's own, which keeps its
fields, and rccl-tests' lines (`-Z json`).

config{devices[{rank, hostname, pid, device, device_hex, device_info}]}, results[{size, count, type,
redop, root, out_of_place{time, alg_bw, bus_bw, nwrong}, in_place{...}}], average_bus_bandwidth
{bandwidth}, out_of_bounds{count}. With -C 1 `time` is `cpu_time`. Fields that are missing or of
another type are taken as absent: the format is not documented.

rccl-tests writes a line per size and side: {name, size, type, redop, inPlace: 0 or 1, time, algBw,
busBw, "#wrong": "0" or "N/A"}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from evener.tools.analyze.parse.table import Device, Row, Side, Starting, Summary


def is_report(document: Any) -> bool:
    """Whether a JSON document looks like a report of nccl-tests."""
    return isinstance(document, dict) and isinstance(document.get("results"), list)


def report(document: dict[str, Any]) -> Iterator[Device | Row | Starting | Summary]:
    """The records of a report, in the order in which the text would show them."""
    args = document.get("args")
    program = str(args[0]) if isinstance(args, list) and args else ""
    yield Starting(program.rpartition("/")[2].removesuffix("_perf"))
    config = document.get("config")
    devices = config.get("devices") if isinstance(config, dict) else None
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("rank"), int):
            yield Device(
                rank=device["rank"],
                host=str(device.get("hostname", "")),
                pid=_int(device.get("pid")),
                device=_int(device.get("device")),
                bus=str(device.get("device_hex", "")),
                name=str(device.get("device_info", "")),
            )
    for result in document["results"]:
        if not isinstance(result, dict) or _int(result.get("size"), -1) < 0:
            continue
        sides = [_side(result.get("out_of_place")), _side(result.get("in_place"))]
        if sides == [None, None]:
            continue
        yield Row(
            size=_int(result["size"]),
            count=_int(result.get("count")),
            type=str(result.get("type", "")),
            redop=str(result.get("redop", "")),
            root=_int(result["root"]) if isinstance(result.get("root"), (int, str)) else None,
            out_of_place=sides[0],
            in_place=sides[1],
        )
    for name, what in (("average_bus_bandwidth", "average"), ("out_of_bounds", "out_of_bounds")):
        value = document.get(name)
        if isinstance(value, dict):  # {"bandwidth": x} or {"count": n, "okay": true}
            value = next((v for v in value.values() if _float(v) is not None), None)
        if (read := _float(value)) is not None:
            yield Summary(what, read)


RCCL = b'"algBw"'
"""What is in the lines that `rccl_lines` reads."""


def rccl_lines(text: bytes) -> list[Row | Starting]:
    """The records of rccl-tests' JSON lines; none where `text` is something else."""
    found: list[Row | Starting] = []
    sides: dict[int, Side] = {}
    last: dict[str, Any] = {}

    def end() -> None:
        if sides:
            size, redop = _int(last.get("size")), str(last.get("redop", ""))
            kind = str(last.get("type", ""))
            found.append(Row(size, 0, kind, redop, None, sides.get(0), sides.get(1)))
            sides.clear()

    for line in text.splitlines():
        try:
            fields = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            return []
        if fields is None:
            continue
        if not isinstance(fields, dict) or not {"size", "time", "algBw", "busBw"} <= fields.keys():
            return []
        wrong = str(fields.get("#wrong", ""))
        numbers = [_float(fields[name]) for name in ("time", "algBw", "busBw")]
        place = 1 if fields.get("inPlace") else 0
        name = str(fields.get("name", ""))
        if name != last.get("name"):
            end()
            found.append(Starting(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
        elif place in sides or fields["size"] != last.get("size"):
            end()
        last = fields
        time, algbw, busbw = numbers
        if time is not None and algbw is not None and busbw is not None:
            sides[place] = Side(time, algbw, busbw, float(wrong) if wrong.isdigit() else None)
    end()
    return found


def _side(raw: Any) -> Side | None:
    if not isinstance(raw, dict):
        return None
    time = _float(raw.get("time", raw.get("cpu_time")))
    algbw, busbw = _float(raw.get("alg_bw")), _float(raw.get("bus_bw"))
    if time is None or algbw is None or busbw is None:
        return None
    return Side(time, algbw, busbw, _float(raw.get("nwrong")))


def _float(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return None
    return float(raw) if 0 <= raw < float("inf") else None


def _int(raw: Any, default: int = 0) -> int:
    try:
        return int(raw)
    except (TypeError, ValueError, OverflowError):
        return default
