"""Lines that a collector of logs put into JSON: docker, GCP, CloudWatch, journald, Loki, fluentd.

    {"log": "text\\n", "stream": "stderr", "time": "2024-12-06T14:00:00.1Z"}
    {"textPayload": "text", "resource": {"labels": {"pod_name": "worker-0"}}, "timestamp": ...}
    {"timestamp": 1733493602000, "message": "text"}
    {"MESSAGE": "text", "_HOSTNAME": "node-7", "__REALTIME_TIMESTAMP": "..."}
One to a line, or an array of them in one document. What is in no such shape stays as it is.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TEXTS = (
    "log", "textPayload", "message", "MESSAGE", "msg", "line", "Message", "LogMessage", "log_line",
    "LogEntry", "content", "body",
)  # fmt: skip
_INNER = ("jsonPayload", "fields", "event", "_source", "structuredPayload", "data", "attributes")
_HOSTS = (
    "pod_name",
    "pod",
    "_HOSTNAME",
    "hostname",
    "host",
    "node_name",
    "instance",
    "logStreamName",
    "container_name",
)
_HOLDERS = ("resource", "labels", "kubernetes", "metadata", "stream")
_LISTS = (
    "events",
    "entries",
    "results",
    "hits",
    "logs",
    "records",
    "data",
    "streams",
    "result",
    "searchedLogStreams",
)
_KEY = re.compile(rb'"(?:%s)"\s*:' % b"|".join(t.encode() for t in _TEXTS))
_PREFIX = 200
_DEPTH = 3


def line(raw: bytes, depth: int = 0) -> tuple[list[bytes], str] | None:
    """The lines in one line of JSON and the host that it names; None where it is not wrapped.

    Anything may precede the JSON (a time, a pod), and its text may be JSON again: collectors stand
    in a row.
    """
    text = raw.strip().rstrip(b",")
    begin = text.find(b"{", 0, _PREFIX)
    text = text[begin:] if begin >= 0 else b""
    if text[-1:] != b"}" or not _KEY.search(text):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = _text(record)
    if found is None:
        return None
    texts, host = _split(found), _host(record)
    if len(texts) == 1 and depth < _DEPTH and (inner := line(texts[0], depth + 1)):
        return inner[0], inner[1] or host
    return texts, host


def document(value: Any) -> list[tuple[list[bytes], str]] | None:
    """The entries of a document of wrapped lines, oldest first; None where it is none."""
    entries = _entries(value, 0)
    found = []
    for entry in entries:
        text = _text(entry)
        if text is not None:
            texts, host = _split(text), _host(entry)
            if len(texts) == 1 and (inner := line(texts[0], 1)):
                texts, host = inner[0], inner[1] or host
            found.append((texts, host, _time(entry)))
    if not found or len(found) < 0.5 * len(entries):
        return None
    times = [time for _, _, time in found]
    if all(times) and times[0] > times[-1]:
        found.reverse()
    return [(lines, host) for lines, host, _ in found]


def _entries(value: Any, depth: int) -> list[Any]:
    if isinstance(value, list):
        if value and isinstance(value[0], list) and len(value[0]) == 2:
            return [
                {"line": v[1], "timestamp": v[0]}
                for v in value
                if isinstance(v, list) and len(v) == 2
            ]
        return [v for v in value if isinstance(v, dict)]
    if isinstance(value, dict) and depth < 4:
        for key in _LISTS:
            inner = value.get(key)
            if isinstance(inner, list | dict):
                entries = _entries(inner, depth + 1)
                if key in ("streams", "result") or any("values" in e for e in entries):
                    entries = [
                        {**e.get("stream", {}), **one} if isinstance(e.get("stream"), dict) else one
                        for e in entries
                        for one in _entries(e.get("values", []), depth + 1)
                    ] or entries
                if entries:
                    return entries
    return []


def _text(record: Any, depth: int = 0) -> str | None:
    if not isinstance(record, dict):
        return None
    for key in _TEXTS:
        value = record.get(key)
        if isinstance(value, str):
            return value
        if key == "MESSAGE" and isinstance(value, list):
            try:
                return bytes(value).decode("utf-8", "replace")
            except (TypeError, ValueError):
                return None
    if depth < 2:
        for key in _INNER:
            if (value := _text(record.get(key), depth + 1)) is not None:
                return value
    return None


def _host(record: dict[str, Any], depth: int = 0) -> str:
    for key in _HOSTS:
        value = record.get(key)
        if isinstance(value, str) and 0 < len(value) < 200 and " " not in value:
            return value.rsplit("/", 1)[-1]
    if depth < 2:
        for key in _HOLDERS:
            inner = record.get(key)
            if isinstance(inner, dict) and (found := _host(inner, depth + 1)):
                return found
    return ""


def _time(record: dict[str, Any]) -> str:
    for key in ("timestamp", "time", "@timestamp", "receiveTimestamp", "__REALTIME_TIMESTAMP"):
        value = record.get(key)
        if isinstance(value, str | int | float):
            return str(value)
    return ""


def _split(text: str) -> list[bytes]:
    if len(text) > 1 << 20:
        text = text[: 1 << 20]
    return text.rstrip("\n").replace("\r\n", "\n").encode("utf-8", "replace").split(b"\n")
