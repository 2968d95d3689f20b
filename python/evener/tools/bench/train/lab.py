"""The benchmark's cluster in a lab: simulated nodes, real processes, links of a stated rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.errors import UsageError
from evener.tools.bench.train.clusters import Cluster, Loopback, OnLine
from evener.tools.lab import Lab, Spec, unavailable


class LabCluster:
    """A lab that is built when `run` is called and gone when it returns."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.nodes, self.slots, self.sizes = spec.nodes, spec.sizes[0], spec.uneven

    def describe(self) -> dict[str, Any]:
        return {"kind": "lab", "spec": str(self.spec), "nodes": self.nodes, "slots": self.slots}

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        def hear(rank: int, node: str, stream: str, line: str) -> None:
            del node
            on_line(rank, stream, line)

        with Lab(self.spec) as lab:
            return lab.launch(list(argv), timeout=timeout, on_line=hear).status


def make(text: str) -> tuple[Cluster, str]:
    """The cluster that `text` describes, and "" or why it is loopback processes instead.

    Raises UsageError where `text` describes none.
    """
    spec = Spec.parse(text)
    why = unavailable()
    if why and spec.uneven:
        raise UsageError(
            f"a lab of uneven nodes ({text}) cannot be built here: {why}",
            f"give even nodes: --lab {spec.nodes}x{spec.slots} runs on loopback then",
        )
    if why:
        return Loopback(spec.nodes, spec.slots, why), why
    return LabCluster(spec), ""
