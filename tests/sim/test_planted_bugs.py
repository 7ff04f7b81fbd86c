"""The simulator must find each of these bugs, or it is broken itself."""

import traceback
from pathlib import Path

import planted_others  # noqa: F401
import planted_reading  # noqa: F401
import planted_restart  # noqa: F401
import planted_saving  # noqa: F401
import pytest
from planting import BUGS

from kvstore.testing.sim import run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1200),  # of a machine that is busy with other things
]

SEEDS = 400
"""Within how many seeds a bug must be found."""

RARE = {
    "client_forgets_to_say_what_it_holds",
    "client_lets_its_lease_go_with_the_node",
    "lost_connection_counts_as_death",
    "old_hello_believed",
    "record_says_how_long_a_block_is",
}
"""Found by few seeds, one in several hundred: 10 to 60 s each."""
SEEDS_RARE = 2400
FOUND_BY = {
    "a_pin_ends_although_a_view_lives": 4,
    "answer_nobody_waits_for_any_more_taken": 17,
    "commit_of_a_cleared_block_seals_it": 16,
    "half_written_header_trusted": 12,
    "lease_ends_with_who_took_it": 1,
    "moved_block_stays_at_its_old_place_too": 172,
    "no_check_after_reading_a_batch": 13,
    "no_generation_check": 7,
    "no_generation_check_after_a_batch": 77,
    "old_hello_believed": 1560,
    "removals_not_repeated_after_a_failover": 37,
    "restart_forgets_pins": 12,
    "restart_frees_what_is_reserved": 10,
    "restart_takes_reservations_for_shorter": 6,
}
"""Seeds that found what the first ones do not. They are tried first: until the simulation takes
other steps that is all it needs, and after that a test takes longer."""
CASES = [pytest.param(*bug, id=bug[0].__name__) for bug in BUGS]


def test_what_is_rare_is_the_name_of_a_bug():
    assert {plant.__name__ for plant, _ in BUGS} >= RARE | set(FOUND_BY)


def raised_by_a_plant(error):
    """Return whether it is an error of a planted function itself, which finds nothing."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and Path(frames[-1].filename).name.startswith("planted_"):
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
    seeds = SEEDS_RARE if name in RARE else SEEDS
    for seed in (*([FOUND_BY[name]] if name in FOUND_BY else ()), *range(seeds)):
        try:
            run(seed, faults)
        except Exception as e:
            if raised_by_a_plant(e):
                pytest.fail("the planted function does not fit any more")
            return
    pytest.fail(f"not found in {seeds} seeds: {plant.__doc__}")
