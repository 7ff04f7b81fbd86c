"""Lines of the log name kvstore also in programs that have configured no logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

BARE = """
import logging, kvstore, connector.worker.tasks
{configured}
logging.getLogger("kvstore.node").warning("a warning")
connector.worker.tasks.log.warning("of a worker")
logging.getLogger("kvstore.node").info("more")
logging.getLogger("elsewhere").warning("of others")
"""


def lines(configured: str) -> list[str]:
    code = BARE.format(configured=configured)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr.splitlines()


def test_a_program_without_logging_shows_who_warns() -> None:
    ours, of_worker, of_others = lines("")
    assert ours.endswith("WARNING kvstore.node: a warning")
    assert of_worker.endswith("WARNING kvstore.connector.worker.tasks: of a worker")
    assert of_others == "of others", "what is not ours stays as it is"


@pytest.mark.parametrize(
    "configured",
    [
        "logging.basicConfig(format='%(name)s!')",
        "logging.basicConfig(format='%(name)s!'); import importlib; importlib.reload(kvstore)",
    ],
)
def test_whoever_has_configured_logging_sees_each_line_once(configured: str) -> None:
    assert lines(configured) == ["kvstore.node!", "kvstore.connector.worker.tasks!", "elsewhere!"]


def test_a_handler_of_the_stores_own_logger_is_enough() -> None:
    own = "one = logging.StreamHandler(); logging.getLogger('kvstore').addHandler(one)"
    assert lines(own) == ["a warning", "of a worker", "of others"]


def test_a_program_that_silences_the_store_hears_nothing() -> None:
    silent = "logging.getLogger('kvstore').addHandler(logging.NullHandler())"
    assert lines(silent) == ["of others"]
