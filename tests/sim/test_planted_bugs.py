"""The simulator must find each of these bugs, or it is broken itself."""

import planted_others  # noqa: F401
import planted_reading  # noqa: F401
import planted_restart  # noqa: F401
import planted_saving  # noqa: F401
import pytest
from planting import BUGS

from kvstore.testing.sim import run

pytestmark = pytest.mark.timeout(600)  # of a machine that is busy with other things

SEEDS = 400
"""Within how many seeds a bug must be found."""


@pytest.fixture(scope="module", autouse=True)
def without_a_bug():
    """Or whatever is broken would count as found."""
    for seed in range(3):
        run(seed)


@pytest.mark.parametrize(("plant", "faults"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_the_simulation_finds(plant, faults, monkeypatch):
    plant(monkeypatch.setattr)
    for seed in range(SEEDS):
        try:
            run(seed, faults)
        except Exception:
            return
    pytest.fail(f"not found in {SEEDS} seeds: {plant.__doc__}")
