"""Ports that jobs of one host choose."""

from __future__ import annotations

import random

from evener.base.ports import free_port


def test_jobs_with_one_seed_choose_other_ports() -> None:
    chosen = []
    for _ in range(2):
        random.seed(0)
        chosen.append([free_port() for _ in range(3)])
    assert chosen[0] != chosen[1]
