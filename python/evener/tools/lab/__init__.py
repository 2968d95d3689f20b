"""Simulated clusters in Linux namespaces: `with Lab(Spec.parse("2x2@25gbit")) as lab: ...`.

A node has its own network, host name, mounts and processes; between the nodes lie routers with
equal-cost paths, rates, queues and faults. docs/guide/lab.md shows it from outside.
"""

from evener.tools.lab.errors import LabError, LabUnavailableError
from evener.tools.lab.faults import Event
from evener.tools.lab.host import Node
from evener.tools.lab.lab import Lab, unavailable
from evener.tools.lab.launch import Result
from evener.tools.lab.spec import Spec

__all__ = [
    "Event",
    "Lab",
    "LabError",
    "LabUnavailableError",
    "Node",
    "Result",
    "Spec",
    "unavailable",
]
