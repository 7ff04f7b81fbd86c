"""The simulator must find each of these bugs, or it is broken itself."""

import traceback
from pathlib import Path

import planted_others  # noqa: F401
import planted_reading  # noqa: F401
import planted_restart  # noqa: F401
import planted_saving  # noqa: F401
import pytest
from planting import BUGS, PlantedError

from kvstore.testing.sim import run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1200),  # of a machine that is busy with other things
]

SEEDS = 1000
"""Within how many seeds a bug must be found."""

FOUND_BY = {
    "client_lets_its_lease_go_with_the_node": 75,
    "connection_kept_that_did_not_answer": 89,
    "no_generation_check_after_a_batch": 129,
    "old_hello_believed": 102,
    "record_says_how_long_a_block_is": 58,
    "removals_not_repeated_after_a_failover": 115,
}
"""Seeds that found what the first fifty do not. They are tried first: until the simulation takes
other steps that is all it needs, and after that a test takes longer."""
CASES = [pytest.param(*bug, id=bug[0].__name__) for bug in BUGS]


def test_what_was_found_is_the_name_of_a_bug():
    assert {plant.__name__ for plant, _ in BUGS} >= set(FOUND_BY)


def raised_by_a_plant(error):
    """Return whether it is an error of a planted function itself, which finds nothing: one that
    calls what is not there any more, or is called with other arguments."""
    while error is not None and not isinstance(error, PlantedError):
        frames = traceback.extract_tb(error.__traceback__)
        planted = frames and Path(frames[-1].filename).name.startswith("planted_")
        if planted or isinstance(error, AttributeError | TypeError | NameError):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.fixture(scope="module", autouse=True)
def without_a_bug():
    """Or whatever is broken would count as found."""
    for seed in range(3):
        run(seed)


@pytest.mark.parametrize(("plant", "faults"), CASES)
def test_the_simulation_finds(plant, faults, monkeypatch):
    plant(monkeypatch.setattr)
    name = plant.__name__
    for seed in (*([FOUND_BY[name]] if name in FOUND_BY else ()), *range(SEEDS)):
        try:
            run(seed, faults)
        except Exception as e:
            if raised_by_a_plant(e):
                pytest.fail("the planted function does not fit any more")
            return
    pytest.fail(f"not found in {SEEDS} seeds: {plant.__doc__}")
