"""The benchmark's cluster in a lab: simulated nodes, real processes, links of a stated rate."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from evener.bench.train.clusters import Cluster, Loopback, OnLine
from evener.errors import EvenerError


class LabCluster:
    """A lab that is built when `run` is called and gone when it returns."""

    def __init__(self, text: str, spec: Any) -> None:
        self.text, self.spec = text, spec
        self.nodes: int = spec.nodes
        self.slots: int = spec.slots

    def describe(self) -> dict[str, Any]:
        return {"kind": "lab", "spec": self.text, "nodes": self.nodes, "slots": self.slots}

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        def hear(rank: int, node: str, stream: str, line: str) -> None:
            del node
            on_line(rank, stream, line)

        lab = _module()
        with lab.Lab(self.spec) as made:
            status: int = made.launch(list(argv), timeout=timeout, on_line=hear).status
        return status


def make(text: str) -> tuple[Cluster, str]:
    """The cluster that `text` describes, and "" or why it is loopback processes instead.

    Raises UsageError where `text` describes none.
    """
    lab = _module()
    spec = lab.Spec.parse(text)
    why = lab.unavailable()
    if why:
        return Loopback(spec.nodes, spec.slots, why), why
    return LabCluster(text, spec), ""


def _module() -> Any:
    try:
        return importlib.import_module("evener.lab")
    except ImportError as error:
        raise EvenerError(
            f"evener.lab cannot be imported: {error}", "leave --lab out, or install pyroute2"
        ) from error
