"""The records of all pillars as Prometheus' text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evener.net import prometheus
from evener.net.prometheus import Sample, metric, process

_BUCKET = {
    "bytes": ("evener_comm_bucket_bytes", "gauge"),
    "bytes_sent": ("evener_comm_bucket_sent_bytes_per_step", "gauge"),
    "measured_ms": ("evener_comm_bucket_exchange_milliseconds", "gauge"),
    "predicted_ms": ("evener_comm_bucket_predicted_milliseconds", "gauge"),
    "residual_ratio": ("evener_comm_bucket_residual_ratio", "gauge"),
    "cosine": ("evener_comm_bucket_cosine", "gauge"),
}


_LOCAL = {
    "steps": ("evener_local_steps_total", "counter"),
    "rounds": ("evener_local_rounds_total", "counter"),
    "every": ("evener_local_steps_per_round", "gauge"),
    "step_ms": ("evener_local_step_milliseconds", "gauge"),
    "exchange_ms": ("evener_local_exchange_milliseconds", "gauge"),
    "bytes_sent": ("evener_local_sent_bytes_per_round", "gauge"),
    "drift": ("evener_local_drift", "gauge"),
}
_HUB = {
    "round": ("evener_hub_rounds_total", "counter"),
    "steps": ("evener_hub_steps_total", "counter"),
    "averaged": ("evener_hub_averaged_steps_total", "counter"),
    "nodes": ("evener_hub_nodes", "gauge"),
    "every": ("evener_hub_steps_per_round", "gauge"),
    "bytes_received": ("evener_hub_received_bytes_total", "counter"),
    "bytes_sent": ("evener_hub_sent_bytes_total", "counter"),
    "drift": ("evener_hub_drift", "gauge"),
}


def text(records: list[dict[str, Any]]) -> str:
    """A metric for each figure that is there; a figure that is not known has no sample."""

    def of(pillar: str, field: str) -> Iterator[Sample]:
        for record in records:
            value = record.get(pillar, {}).get(field)
            if value is not None:
                yield process(record), value

    def buckets(field: str) -> Iterator[Sample]:
        for record in records:
            for index, bucket in enumerate(record.get("comm", {}).get("buckets", [])):
                if bucket.get(field) is not None:
                    form = {"algorithm": bucket["algorithm"], "form": bucket["compressor"]}
                    yield {**process(record), "bucket": index, **form}, bucket[field]

    def tiers(field: str) -> Iterator[Sample]:
        for record in records:
            for tier in record.get("zero", {}).get("tiers", []):
                if tier.get(field) is not None:
                    yield {**process(record), "tier": tier["name"]}, tier[field]

    ages = [(process(record), record["time"]) for record in records]
    lines = metric("evener_record_time_seconds", "gauge", dict(map(_by_process, ages)).values())
    lines += metric("evener_comm_steps_total", "counter", of("comm", "steps"))
    lines += metric("evener_comm_step_milliseconds", "gauge", of("comm", "step_ms"))
    for field, (name, kind) in _BUCKET.items():
        lines += metric(name, kind, buckets(field))
    for pillar, fields in (("local", _LOCAL), ("hub", _HUB)):
        for field, (name, kind) in fields.items():
            lines += metric(name, kind, of(pillar, field))
    lines += metric("evener_zero_steps_total", "counter", of("zero", "steps"))
    lines += metric("evener_zero_skipped_steps_total", "counter", of("zero", "skipped"))
    lines += metric("evener_zero_step_milliseconds", "gauge", of("zero", "step_ms"))
    for field in ("bytes", "used", "peak"):
        name = f"evener_zero_tier_{field.replace('bytes', 'size')}_bytes"
        lines += metric(name, "gauge", tiers(field))
    lines += prometheus.lines([record for record in records if "net" in record])
    return "\n".join(lines) + "\n"


def _by_process(sample: Sample) -> tuple[str, Sample]:
    return str(sample[0]), sample
