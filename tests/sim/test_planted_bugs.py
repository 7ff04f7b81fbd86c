"""The simulator must find each of these bugs, or it is broken itself."""

import pytest
from planted import BUGS

from kvstore.testing.sim import run

SEEDS = 100
"""Within how many seeds a bug must be found."""


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_the_simulation_finds(plant, monkeypatch):
    plant(monkeypatch.setattr)
    for seed in range(SEEDS):
        try:
            run(seed)
        except Exception:
            return
    pytest.fail(f"not found in {SEEDS} seeds: {plant.__doc__}")
