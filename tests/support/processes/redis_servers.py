"""Real Redis processes for tests: one server, a cluster, one behind Sentinel.

Fixtures of the same names are in tests/conftest.py. Every process dies with the test run,
even when that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.index.embedded_redis.server import find_server
from kvstore.testing.stopping import stop

START_TIMEOUT_S = 20.0
ENDED_WITHIN_S = 60.0
"""What was killed: a machine that is short of memory takes its time to free it."""
SLOTS = 16384
_libc = ctypes.CDLL(None)


def free_port() -> int:
    """Return a TCP port that is free, as is the one 10,000 above (a cluster's bus)."""
    for _ in range(200):
        port = random.randint(20_000, 50_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wait_until(condition, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
        time.sleep(0.01)


class RedisServer:
    """One redis-server on a Unix socket, and on a TCP port if `port` is given."""

    def __init__(self, *options: str, port: int = 0, args: tuple[str, ...] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvr-"))
        self.port = port
        self.socket = self.directory / "redis.sock"
        self.options = options
        self._args = args
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = ["--port", str(self.port), "--unixsocket", str(self.socket), "--save", ""]
        options += ["--bind", "127.0.0.1", "--dir", str(self.directory), *self.options]
        self.process = subprocess.Popen(
            [str(find_server().path), *self._args, *options],
            stdout=(self.directory / "log").open("ab"),
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _libc.prctl(1, signal.SIGKILL),
        )
        wait_until(self.answers, "Redis answers")

    def answers(self) -> bool:
        log = (self.directory / "log").read_text()
        assert self.process.poll() is None, log
        try:
            return self.admin().ping()
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False

    def admin(self, **options: object) -> redis.Redis:
        once = Retry(NoBackoff(), 0)
        return redis.Redis(
            unix_socket_path=str(self.socket), socket_timeout=10, retry=once, **options
        )

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ENDED_WITHIN_S)

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RedisCluster:
    """Three masters that share the slots."""

    def __init__(self) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes: list[RedisServer] = []
        try:
            for _ in range(3):
                self.nodes.append(RedisServer(*options, port=free_port()))
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _join(self) -> None:
        first = self.nodes[0]
        share = -(-SLOTS // len(self.nodes))
        for i, node in enumerate(self.nodes):
            slots = range(i * share, min((i + 1) * share, SLOTS))
            node.admin().execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            node.admin().execute_command("CLUSTER", "ADDSLOTS", *slots)
            if node is not first:
                node.admin().execute_command("CLUSTER", "MEET", "127.0.0.1", first.port)
        wait_until(lambda: all(map(self._is_whole, self.nodes)), "the cluster is whole")

    def _is_whole(self, node: RedisServer) -> bool:
        info = node.admin().execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(SLOTS)

    def flush(self) -> None:
        for node in self.nodes:
            node.admin().flushall()

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class RedisSentinel:
    """A master and one sentinel that watches it under the name `main`."""

    def __init__(self) -> None:
        self.master = RedisServer(port=free_port())
        try:
            conf = self.master.directory / "sentinel.conf"
            conf.write_text(f"sentinel monitor main 127.0.0.1 {self.master.port} 1\n")
            self.sentinel = RedisServer(port=free_port(), args=(str(conf), "--sentinel"))
        except BaseException:
            self.master.close()
            raise

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/main"

    def close(self) -> None:
        self.sentinel.close()
        self.master.close()


@contextlib.contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """Stop the server's process meanwhile: it hangs, but its socket still accepts."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def gone(pid: int) -> bool:
    """Tell whether the process has ended (also as a zombie that nobody reaps)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
