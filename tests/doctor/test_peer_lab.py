"""Between two nodes of a lab with four paths: several ways are seen, and one flow is measured."""

import json
import subprocess
import sys

import pytest

from evener.tools.lab import Lab, Spec, unavailable


@pytest.mark.lab
def test_four_paths() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    doctor = [sys.executable, "-m", "evener", "doctor"]
    with Lab(Spec(nodes=2, link="400mbit", paths=4)) as lab:
        server = lab.nodes[1].popen([*doctor, "--serve"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split()[1]
            shown = lab.nodes[0].run(
                [*doctor, "--peer", "node1", "--port", port, "--json"], timeout=120
            )
        finally:
            server.kill()
            server.wait()
    lines = {line["name"]: line for line in json.loads(shown.stdout)["lines"]}
    # Routers limit how often they answer, so the number may be less than four, and never one.
    assert lines["paths"]["found"].startswith("at least ")
    assert "by number of flows: 1:" in lines["flows"]["found"]
