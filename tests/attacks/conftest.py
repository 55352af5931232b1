"""Marks all attack tests as slow: each compares two real runs."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/attacks/" in str(item.path) and item.path.name != "test_harness.py":
            item.add_marker("slow")
