"""Nodes that do not end or start, and a Redis and nodes that say what is none of it."""

import subprocess
import time

import pytest

from kvstore.cli import fleet
from kvstore.cli.commands.stat import _counters
from kvstore.cli.output import table
from kvstore.errors import IndexUnavailableError, NodeUnavailableError


class Stuck:
    """A process in the kernel, which nothing ends."""

    stdout = None
    kills = 0

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("node", timeout)

    def kill(self):
        self.kills += 1


def test_a_node_that_does_not_end_keeps_no_other_from_ending():
    child = fleet.Child("node-0", [], {})
    child.process = stuck = Stuck()
    child.end_by(time.monotonic())
    assert (child.process, stuck.kills) == (None, 1)


def test_a_node_that_cannot_be_started_again_is_tried_later(monkeypatch):
    said = []
    now = [1.0]
    monkeypatch.setattr(fleet.time, "monotonic", lambda: now[0])
    child = fleet.Child("node-0", ["/no/such/program"], {})
    for count in range(1, fleet.RESTARTS_MAX + 1):
        child.tend(said.append)
        child.tend(said.append)
        assert len(said) == count, "it waits before it tries again"
        now[0] += fleet.BACKOFF_MAX_S
    assert "cannot be started (No such file or directory)" in said[0]
    with pytest.raises(NodeUnavailableError, match="after 5 restarts"):
        child.tend(said.append)


def test_a_redis_that_counts_in_words_is_one_that_cannot_be_asked():
    with pytest.raises(IndexUnavailableError, match="used_memory is no number"):
        _counters([{"used_memory": "lots"}])


def test_a_name_that_somebody_put_into_the_index_moves_no_cursor():
    text = table(("NODE", "HOST"), [("a\x1b[2J", "b\r")], left=2)
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
