"""An embedded Redis that keeps dying is given up, aloud, and started anew for the next user."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from embedded_users import END_TIMEOUT_S, kill_until_given_up, nothing_is_left
from redis_servers import kill, wait_until
from stores import announcement

from kvstore.client.health import NO_KEY, IndexWatch
from kvstore.client.session import BlockSession
from kvstore.errors import IndexBreakerOpenError, IndexUnavailableError
from kvstore.index.embedded_redis import supervisor as supervisor
from kvstore.index.embedded_redis.server import (
    EmbeddedRedis,
)
from kvstore.index.open import open_guarded
from kvstore.limits import Limits
from kvstore.node.publishing.heartbeat import Heartbeat
from kvstore.testing.stopping import stop


def test_a_redis_that_keeps_dying_is_given_up_and_the_next_user_starts_afresh(
    run_dir: Path,
) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    kill_until_given_up(held)
    assert supervisor.given_up(held.socket)
    with EmbeddedRedis.acquire(run_dir) as again:
        assert again.supervisor_pid != held.supervisor_pid
        assert supervisor.answers(again.socket)
        assert not supervisor.given_up(held.socket)
    held.close()
    nothing_is_left(run_dir, again.pid, again.supervisor_pid)


def test_those_who_use_a_redis_that_was_given_up_say_so_and_what_to_do(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its socket too, as the nodes of `kvstore up`; and they go on with the next one."""
    with closing(BlockSession(run_dir=run_dir)) as session:
        held = EmbeddedRedis.acquire(run_dir)
        held.close()
        opened = open_guarded(session.url, key_prefix="kv:up", run_dir=run_dir, limits=Limits())
        beats = Heartbeat(opened.index, announcement(), lambda: None, lambda: 0)
        kill_until_given_up(held)
        words = ("given up", "ended 4 times within 60 s", "it ended with -9", "KVSTORE_URL")
        assert [word for word in words if word not in session.health().index] == []
        caplog.set_level(logging.WARNING)
        beats.beat()
        IndexWatch(session.index).look(time.monotonic())
        for logger in ("kvstore.client", "kvstore.node"):
            said = " ".join(r.getMessage() for r in caplog.records if r.name == logger)
            assert [word for word in words if word not in said] == [], said
        with EmbeddedRedis.acquire(run_dir):
            wait_until(lambda: not session.health().index, "it answers again", END_TIMEOUT_S)
            opened.index.ping()
        opened.close()


def test_why_a_probe_failed_last_is_what_an_open_breaker_says(run_dir: Path) -> None:
    """While it was only away, nobody knew that it would be given up."""
    with closing(BlockSession(run_dir=run_dir)) as session:
        held = EmbeddedRedis.acquire(run_dir)
        held.close()
        index = session.index
        stop(held.supervisor_pid)
        kill(held.pid)
        wait_until(lambda: not supervisor.answers(held.socket), "Redis ends")
        for _ in range(3):
            with pytest.raises(IndexUnavailableError) as raised:
                index.lookup([NO_KEY])
            assert "given up" not in str(raised.value)
        os.kill(held.supervisor_pid, signal.SIGCONT)
        kill_until_given_up(held)

        def why() -> str:
            with pytest.raises(IndexBreakerOpenError) as raised:
                index.lookup([NO_KEY])
            return str(raised.value)

        wait_until(lambda: "given up" in why(), "the probe says it", END_TIMEOUT_S)


class Lives:
    """A Redis whose starts are counted; time passes when somebody sleeps."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, life_s: float, why: str = ""
    ) -> None:
        self.now, self.starts = 0.0, list[float]()
        self.life_s, self.why = life_s, why
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(supervisor, "time", clock)
        self.watched = supervisor.Supervisor(directory, [])
        monkeypatch.setattr(self.watched, "_start", self.start)
        monkeypatch.setattr(self.watched, "_unused", lambda locks: len(self.starts) >= 20)

    def end(self) -> None:
        """Watch over it until it is given up or unused."""
        self.watched._watch({})

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self) -> str:
        self.starts.append(self.now)
        self.now += self.life_s
        return self.why


@pytest.mark.parametrize(("apart_s", "starts"), [(100.0, 20), (1.0, supervisor.RESTARTS_MAX)])
def test_only_ends_of_redis_that_are_close_together_make_it_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_s: float, starts: int
) -> None:
    """It dies at once after every start, until the last user goes after 20 of them."""
    lives = Lives(tmp_path, monkeypatch, life_s=apart_s)
    lives.end()
    assert len(lives.starts) == starts
    assert bool(supervisor.given_up(tmp_path / supervisor.SOCKET)) == (starts < 20)


def test_starts_that_fail_are_tried_again_later_and_later_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path, monkeypatch, life_s=0.0, why="no answer within 5 s: it wrote no log")
    lives.end()
    waits = [later - sooner for sooner, later in itertools.pairwise(lives.starts)]
    assert all(
        wait == pytest.approx(least, abs=2 * supervisor.POLL_S)
        for wait, least in zip(waits, supervisor.BACKOFF_S[1:], strict=True)
    )
    assert supervisor.given_up(tmp_path / supervisor.SOCKET).endswith(": it wrote no log")
