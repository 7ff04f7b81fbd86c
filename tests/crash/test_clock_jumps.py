"""The wall clock is set forward or back by hours while nodes live, die and come back.

A file keeps the time that it was written at, so setting the clock is the same as giving the files
another time: what a process wrote down itself stays.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from clocks import clock_was_set, died_ago
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess

from kvstore import Client
from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import NodeDir, sweep
from kvstore.segment.abandoned import Sweeper, free_abandoned
from kvstore.system import host_clock
from kvstore.system.host_clock import Moment, age_s, passed_s, ran_s, wall_age_s

HOURS_S = 5 * 3600.0
VALUE = b"v" * 10_000
BOOT = bytes(range(16))


@pytest.fixture
def killed(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """A node that was killed with a block in it, a moment ago."""
    with NodeProcess(redis_server, size=8 * MIB) as node:
        with Client(**node.client_options) as client:
            assert client.put("k", VALUE)
        wait_until(node.directory.keep.exists, "it says that it may come back")
        node.kill()
        yield node


@pytest.mark.parametrize("forward_s", [HOURS_S, -HOURS_S])
def test_a_node_that_has_just_died_keeps_its_memory_whatever_the_clock_does(
    killed: NodeProcess, forward_s: float
) -> None:
    clock_was_set(forward_s, killed.directory.keep, *killed.segment_files())
    Sweeper(killed.run_dir).sweep()
    assert sweep(killed.run_dir) == free_abandoned() == []
    assert RESTART_WITHIN_S - 60 < killed.directory.kept_for_s() <= RESTART_WITHIN_S
    killed.start()
    with Client(**killed.client_options) as client:
        wait_until(lambda: client.get("k") == VALUE, "a hit after the restart")


@pytest.mark.parametrize("in_run_dir", [True, False])
def test_memory_whose_time_is_over_goes_although_the_clock_was_set_back(
    killed: NodeProcess, in_run_dir: bool
) -> None:
    files = killed.segment_files()
    died_ago(RESTART_WITHIN_S + 60, keep=killed.directory.keep, files=files)
    clock_was_set(-HOURS_S, killed.directory.keep, *files)
    if in_run_dir:
        assert sweep(killed.run_dir) == [killed.name]
    else:
        assert [one.base for one in free_abandoned()] == [files[0].with_suffix("")]
    assert not any(path.exists() for path in files)


def test_a_living_node_is_not_swept_whatever_the_clock_does(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server, size=8 * MIB) as node, Client(**node.client_options) as client:
        assert client.put("k", VALUE)
        wait_until(node.directory.keep.exists, "it says that it may come back")
        for forward_s in (HOURS_S, -HOURS_S):
            clock_was_set(forward_s, node.directory.keep, *node.segment_files())
            Sweeper(node.run_dir).sweep()
            assert client.get("k") == VALUE
            assert all(path.exists() for path in node.segment_files())


def test_a_node_that_was_stopped_for_long_is_not_swept_when_it_is_killed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a night of the machine's sleep: BOOTTIME goes on, and MONOTONIC does not."""
    with NodeProcess(redis_server, size=8 * MIB) as node:
        wait_until(node.directory.keep.exists, "it says that it may come back")
        node.signal(signal.SIGKILL)
        node.process.wait(10)
        now = host_clock.now
        slept_ms = int(HOURS_S * 1e3)
        monkeypatch.setattr(
            host_clock, "now", lambda: (m := now())._replace(passed_ms=m.passed_ms + slept_ms)
        )
        clock_was_set(HOURS_S, node.directory.keep, *node.segment_files())
        Sweeper(node.run_dir).sweep()
        assert all(path.exists() for path in node.segment_files())


# --- where nothing was written down: left by a node of before --------------------


def test_a_time_in_the_future_counts_from_the_first_look(
    killed: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the memory would be kept until the clock comes to where it was."""
    files = [*killed.segment_files(), killed.directory.keep]
    monkeypatch.setattr(host_clock, "_boot", lambda: host_clock.UNKNOWN_BOOT)
    clock_was_set(-HOURS_S, *files)
    Sweeper(killed.run_dir).sweep()
    assert all(path.exists() for path in files)
    over = time.time() + RESTART_WITHIN_S + 60
    monkeypatch.setattr(host_clock.time, "time", lambda: over)
    Sweeper(killed.run_dir).sweep()
    assert not any(path.exists() for path in files)


# --- moments -----------------------------------------------------------------------


def test_a_moment_is_read_as_it_was_written() -> None:
    assert Moment.unpack(host_clock.now().pack()) == Moment.unpack(Moment(*host_clock.now()).pack())
    moment = Moment(BOOT, 5, 7)
    assert Moment.unpack(moment.pack()) == moment
    for raw in (b"", moment.pack()[:-1], moment.pack() + b"x", bytes(len(moment.pack()))):
        assert Moment.unpack(raw) is None


def test_moments_of_one_boot_can_be_compared_and_others_not() -> None:
    until = Moment(BOOT, 5000, 9000)
    assert (ran_s(Moment(BOOT, 3000, 4000), until), passed_s(Moment(BOOT, 3000, 4000), until)) == (
        2.0,
        5.0,
    )
    assert ran_s(until, until) == passed_s(until, until) == 0.0
    for other in (None, Moment(BOOT[::-1], 3000, 4000), Moment(BOOT, 5001, 9001)):
        assert ran_s(other, until) is None
        assert passed_s(other, until) is None


def test_the_age_of_a_file_is_that_of_what_is_written_else_the_clocks() -> None:
    now = host_clock.now()
    assert age_s(now, time.time() - HOURS_S) < 60
    assert HOURS_S <= age_s(None, time.time() - HOURS_S) < HOURS_S + 60
    assert HOURS_S <= age_s(Moment(BOOT, 0, 0), time.time() - HOURS_S) < HOURS_S + 60
    assert wall_age_s(time.time() + HOURS_S) == 0.0


def test_a_sign_of_life_is_of_this_boot(killed: NodeProcess) -> None:
    written = Moment.unpack(NodeDir(killed.run_dir, killed.name).keep.read_bytes())
    assert written is not None
    assert written.boot == host_clock.now().boot
    assert 0 <= (ran_s(written, host_clock.now()) or 0) < 60
