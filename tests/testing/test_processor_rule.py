"""What takes over five seconds of processor is marked long; real engines are smoked by five."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SLOW = """
import time, pytest
def burn():
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
def test_burns(): burn()
@pytest.mark.long
def test_is_long(): burn()
def test_waits(): time.sleep(0.5)
"""
SMOKES = """
import pytest
pytestmark = pytest.mark.smoke
@pytest.mark.parametrize("i", range({count}))
def test_engine(i): pass
"""


@pytest.fixture
def ran(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests with the rules of this one, and a hundredth of the time."""
    text = (Path(__file__).parents[1] / "conftest.py").read_text()
    assert "PROCESSOR_S_MAX = 5.0\n" in text
    pytester.makeconftest(text.replace("PROCESSOR_S_MAX = 5.0\n", "PROCESSOR_S_MAX = 0.1\n"))
    pytester.makeini("[pytest]\nmarkers =\n    long\n    smoke\n    nightly\n")
    return pytester


def test_what_takes_processor_and_is_not_long_fails(ran: pytest.Pytester) -> None:
    ran.makepyfile(SLOW)
    outcomes = ran.runpytest_inprocess("-o", "processor_slack=2")
    outcomes.assert_outcomes(passed=2, failed=1)
    outcomes.stdout.fnmatch_lines(["*test_burns took * s of processor*"])
    ran.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)


@pytest.mark.parametrize(("count", "code"), [(5, pytest.ExitCode.OK), (6, 4)])
def test_smokes_are_five_at_most(ran: pytest.Pytester, count: int, code: int) -> None:
    ran.makepyfile(SMOKES.format(count=count))
    assert ran.runpytest_inprocess().ret == code
