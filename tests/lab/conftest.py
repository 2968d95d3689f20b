"""Shared by the lab's tests: skip, with the reason, where this machine allows no lab."""

from __future__ import annotations

import pytest

from evener.tools.lab import unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("lab") and (reason := unavailable()):
            item.add_marker(pytest.mark.skip(reason=reason))
