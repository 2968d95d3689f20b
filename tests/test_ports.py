"""Ports that jobs of one host choose."""

from __future__ import annotations

import random

from evener.base.ports import free_port


def test_jobs_with_one_seed_choose_other_ports() -> None:
    random.seed(0)
    first = free_port()
    random.seed(0)
    assert free_port() != first
