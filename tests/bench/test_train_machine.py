"""What the results say of the machine, and what they must never say."""

from evener.tools.bench.train import machine


def test_what_may_change_a_figure_is_kept_and_secrets_are_not() -> None:
    env = {
        "NCCL_ALGO": "RING",
        "LIGHT_TOPK_RATIO": "0.001",
        "OMP_NUM_THREADS": "1",
        "EVENER_LOG": "debug",
        "EVENER_NOT_DECLARED": "x",
        "HOME": "/somewhere",
        "TORCH_HUB_TOKEN": "hidden",
        "NCCL_API_KEY": "hidden",
        "UCX_PROXY": "http://me:hidden@proxy",
        "AWS_SECRET_ACCESS_KEY": "hidden",
    }
    assert machine.environment(env) == {
        "EVENER_LOG": "debug",
        "LIGHT_TOPK_RATIO": "0.001",
        "NCCL_ALGO": "RING",
        "OMP_NUM_THREADS": "1",
    }


def test_the_machine_is_named_by_its_parts_not_by_its_host() -> None:
    import socket

    found = machine.describe()
    assert found["cores"] >= 1
    assert found["cpu"] and found["kernel"]
    assert socket.gethostname() not in found.values()
    assert {"python", "evener", "torch"} <= set(machine.versions())
