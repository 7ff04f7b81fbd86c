"""What is started in the background: whose signals it gets, and which processors it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import gone, kill, wait_until

from kvstore import Client
from kvstore.client.nodes.saving.embedded_node import embedded_name
from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.limits import Limits
from kvstore.nodedir import NodeDir
from kvstore.system.background import start_in_background

PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)

AT_A_TERMINAL = """
import os, signal, subprocess, sys
from kvstore.system.background import start_in_background
os.open(sys.argv[1], os.O_RDWR)  # the leader of a session gets it as its terminal
signal.signal(signal.SIGINT, signal.default_int_handler)
behind = start_in_background(["sleep", "60"])
beside = subprocess.Popen(["sleep", "60"])
print(behind.pid, beside.pid, flush=True)
signal.pause()
"""

some_processors = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1, reason="there is one processor only"
)


@pytest.fixture
def bound_to_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before), before
    os.sched_setaffinity(0, before)


@some_processors
def test_what_a_thread_that_is_bound_starts_may_use_every_processor(bound_to_one) -> None:
    processor, every = bound_to_one
    process = start_in_background(["sleep", "60"])
    try:
        assert os.sched_getaffinity(process.pid) == every
        assert os.sched_getaffinity(0) == {processor}
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait()


@some_processors
def test_a_thread_is_bound_as_before_when_nothing_could_be_started(bound_to_one) -> None:
    with pytest.raises(FileNotFoundError):
        start_in_background(["/nowhere/at/all"])
    assert os.sched_getaffinity(0) == {bound_to_one[0]}


def test_it_starts_where_processors_may_not_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert start_in_background(["true"]).wait() == 0


@some_processors
def test_the_node_and_the_redis_of_a_bound_client_share_its_session_and_not_its_core(
    bound_to_one, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_URL", raising=False)
    _, every = bound_to_one
    with Client(run_dir=tmp_path, node_size_bytes=16 << 20, limits=PATIENT) as client:
        assert client.put("k", b"1")
        node = NodeDir(tmp_path, embedded_name("kv:default")).announcement()
        assert node is not None
        with EmbeddedRedis.acquire(tmp_path) as redis:
            for pid in (node.pid, redis.pid, redis.supervisor_pid):
                assert os.getsid(pid) == os.getsid(0)
                assert os.getpgid(pid) != os.getpgid(0)
                assert os.sched_getaffinity(pid) == every


@pytest.mark.parametrize("typed", [b"\x03", b""], ids=["Ctrl-C", "the terminal's end"])
def test_what_ends_those_at_the_terminal_is_not_for_it(typed: bytes) -> None:
    terminal, end = os.openpty()
    leader = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, os.ttyname(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(end)
    with leader:
        assert leader.stdout is not None
        behind, beside = (int(pid) for pid in leader.stdout.readline().split())
        try:
            if typed:
                os.write(terminal, typed)
            else:
                os.close(terminal)
            leader.wait(60)
            wait_until(lambda: gone(beside), "what is in the foreground ends")
            assert not gone(behind)
        finally:
            kill(behind)
            kill(beside)
            leader.kill()
            if typed:
                os.close(terminal)
