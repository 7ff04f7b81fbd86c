"""Places to run commands in (places.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from places import Place


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Place]:
    """A place where `kvstore up` runs: for the commands that look into a store."""
    made = Place()
    made.start("up", "--size", "16MiB").wait_for("Ctrl-C ends it.")
    yield made
    made.close()
