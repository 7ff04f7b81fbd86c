"""One way to start, await, stop and end the servers of demos, trials, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import gone, wait_until
from services import Service, end_all, node_command, node_up, redis_command, redis_up

READY = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"


def python(code: str, log: Path, **more: object) -> Service:
    return Service([sys.executable, "-u", "-c", code], log, **more)


def ready(service: Service) -> bool:
    return "ready" in service.said()


def test_a_node_beside_redis_is_up_when_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    redis = redis_command(tmp_path, "--port", "0", "--unixsocket", str(path))
    with closing(Service(redis, tmp_path / "redis").wait(redis_up(path))):
        url = "--url", f"unix://{path}"
        with closing(Service(node_command(tmp_path, "4MiB", *url), tmp_path / "log")) as node:
            up = node_up(tmp_path)
            node.wait(up)
            node.end(signal.SIGKILL)
            assert not node.runs
        again = Service(node_command(tmp_path, "4MiB", *url), tmp_path / "log")
        with closing(again):
            assert not up(again), "what the former one announced is not its word"
            assert up(again.wait(up))


def test_what_ends_at_once_or_takes_too_long_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended at once(?s:.*)no room"):
        python("raise SystemExit('no room')", tmp_path / "log").wait(ready)
    late = python("import time; time.sleep(60)", tmp_path / "log")
    with pytest.raises(RuntimeError, match="not up in 0 s"):
        late.wait(ready, timeout_s=0.3)
    assert not late.runs


def test_a_log_that_goes_on_is_read_from_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(python(READY, log)) as first:
        first.wait(ready)
    with closing(python("import time; time.sleep(60)", log, more_log=True)) as second:
        assert not ready(second)
        assert log.read_text() == "ready\n"


def test_the_end_reaches_what_it_has_started_stopped_or_not(tmp_path: Path) -> None:
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"
    service = python(f"{child}; print(p.pid, flush=True); p.wait()", tmp_path / "log")
    wait_until(lambda: "ready" in service.said(), "it has started another")
    pid = int(service.said().split()[0])
    service.send(signal.SIGSTOP)
    assert service.end()
    wait_until(lambda: gone(pid), "its child has ended")
    assert service.end(), "safe to call twice"
    with pytest.raises(RuntimeError, match="ended by itself"):
        service.send(signal.SIGCONT)


def test_all_end_within_one_deadline(tmp_path: Path) -> None:
    services = [python(STUBBORN, tmp_path / str(i)).wait(ready) for i in range(3)]
    began = time.monotonic()
    end_all(services, timeout_s=0.5)
    assert time.monotonic() - began < 10
    for service in services:
        assert not service.runs
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid, 0)
            raise AssertionError("it is there still")
