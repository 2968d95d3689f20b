"""A real OpenMPI across nodes: through the lab's remote agent, and through a real sshd."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from evener.tools.lab import Lab, Node
from evener.tools.lab.sshd import find

pytestmark = pytest.mark.lab
no_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (package openmpi-bin)"
)
no_sshd = pytest.mark.skipif(
    find() is None or shutil.which("ssh") is None,
    reason="sshd or ssh is not installed (packages openssh-server, openssh-client)",
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("2x2") as built:
        yield built


def mpirun(node: Node, *command: str) -> tuple[int, list[str]]:
    argv = ["mpirun", "-np", "4", "-H", "node0:2,node1:2", *command]
    done = node.run(argv, timeout=90)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, sorted(done.stdout.splitlines())


SAY = 'echo "$OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK $(hostname) $NCCL_HOSTID"'
SAID = ["0 0 node0 node0", "1 1 node0 node0", "2 0 node1 node1", "3 1 node1 node1"]


@pytest.mark.mpi
@no_mpi
def test_mpirun_through_the_agent(lab: Lab) -> None:
    assert mpirun(lab.nodes[0], "sh", "-c", SAY) == (0, SAID)


@pytest.mark.mpi
@no_mpi
def test_mpirun_from_the_other_node(lab: Lab) -> None:
    # OpenMPI counts from the node it is started on.
    said = ["0 0 node1 node1", "1 1 node1 node1", "2 0 node0 node0", "3 1 node0 node0"]
    assert mpirun(lab.nodes[1], "sh", "-c", SAY) == (0, said)


@pytest.mark.mpi
@no_mpi
def test_a_rank_that_fails_on_the_other_node_ends_the_job(lab: Lab) -> None:
    script = "if [ $OMPI_COMM_WORLD_RANK = 3 ]; then exit 7; fi; sleep 60"
    status, _ = mpirun(lab.nodes[0], "sh", "-c", script)
    assert status == 7


def test_the_agent_runs_commands_on_a_host(lab: Lab) -> None:
    agent = lab.nodes[0].environment()["OMPI_MCA_plm_rsh_agent"].split()
    done = lab.nodes[0].run([*agent, "-x", "node1", "hostname;", "cat;", "exit", "3"], input="hi")
    assert (done.stdout, done.returncode) == ("node1\nhi", 3)
    unknown = lab.nodes[0].run([*agent, "node7", "true"])
    assert unknown.returncode == 255
    assert "node7" in unknown.stderr and "node0, node1" in unknown.stderr


def test_a_command_goes_with_its_agent(lab: Lab) -> None:
    agent = lab.nodes[0].environment()["OMPI_MCA_plm_rsh_agent"].split()
    with lab.nodes[0].popen([*agent, "node1", "echo up; exec sleep 60"], stdout=-1) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.kill()
    for _ in range(200):
        if "sleep" not in (listed := lab.nodes[1].run(["ps", "-eo", "comm"]).stdout):
            return
    pytest.fail(listed)


@no_sshd
def test_ssh_and_mpirun_over_ssh() -> None:
    with Lab("2x2") as lab:
        if lab.mode != "root":
            pytest.skip("sshd needs root here")
        lab.sshd()
        first, second = lab.nodes
        assert first.run(["ssh", "node1", "hostname; exit 3"], timeout=60).stdout == "node1\n"
        assert second.run(["ssh", "node0", "exit 3"], timeout=60).returncode == 3
        assert second.run(["ssh", "node0", "echo $NCCL_HOSTID"], timeout=60).stdout == "node0\n"
        assert not any(name.startswith("OMPI_MCA_plm") for name in first.environment())
        if shutil.which("mpirun"):
            assert mpirun(first, "sh", "-c", SAY) == (0, SAID)
