"""Real memory nodes for tests: in this process, or as a process that can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis_servers import RedisServer, wait_until
from warm_processes import WarmProcess, command

from kvstore import Client, Limits
from kvstore.index.open import open_guarded
from kvstore.node import Node, NodeConfig
from kvstore.nodedir import Announcement, NodeDir, sweep
from kvstore.testing.stopping import stop

MIB = 1 << 20
SIZE_BYTES = 16 * MIB
"""Of a node. Each client maps all of it, which takes 0.6 ms of processor time a MiB."""
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
"""For tests that are about answers, not about their speed on a busy machine."""


def announcement(**changes: Any) -> Announcement:
    """Return the announcement of a node that there is not."""
    fields = {
        "node_id": 1,
        "epoch": 1,
        "name": "n",
        "host": "there",
        "pid": 1,
        "key_prefix": "kv:t",
        "data_path": "",
        "head_path": "",
        "control_path": "",
        "size_bytes": 4 << 20,
        "inline_bytes": 1000,
    }
    return Announcement(**{**fields, **changes})


class NodeProcess:
    """`kvstore node` with its own run directory and key prefix."""

    def __init__(
        self,
        redis: RedisServer,
        *,
        size: int = SIZE_BYTES,
        key_prefix: str | None = None,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        run_dir: Path | None = None,
        name: str = "node",
    ) -> None:
        """`key_prefix` is one of its own unless given: nodes with the same one share blocks.
        Nodes of one `run_dir` are on one host; without one, each is on its own."""
        self.redis = redis
        self._of_its_own = run_dir is None
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="kvn-"))
        self.name = name
        self.key_prefix = key_prefix or f"kv:{self.run_dir.name}"
        self.directory = NodeDir(self.run_dir, name)
        self._options = ("--size", str(size), *options)
        self.environment = {**os.environ, **(environment or {})}
        self.start()

    @property
    def client_options(self) -> dict[str, object]:
        return {
            "url": self.redis.url,
            "run_dir": self.run_dir,
            "key_prefix": self.key_prefix,
            "limits": PATIENT,
        }

    @property
    def engine_settings(self) -> dict[str, object]:
        """Return the same place as an engine's settings name it: plain data, patient as above."""
        return {
            "url": self.redis.url,
            "run_dir": str(self.run_dir),
            "key_prefix": self.key_prefix,
            "lookup_timeout_s": 5.0,
        }

    def start(self, *options: str) -> None:
        """Start the process. `options` are of this start alone; the last of its name counts."""
        self.process = WarmProcess(
            command,
            *("node", "--url", self.redis.url, "--run-dir", str(self.run_dir)),
            *("--name", self.name, "--key-prefix", self.key_prefix, *self._options, *options),
            environment=self.environment,
        )
        wait_until(self._ready, "the node is ready")

    def _ready(self) -> bool:
        assert self.process.poll() is None, "the node ended at once"
        word = self.directory.announcement()
        return word is not None and word.pid == self.process.pid and self.directory.socket.exists()

    def segment_files(self) -> list[Path]:
        word = self.directory.announcement()
        return [] if word is None else [Path(word.data_path), Path(word.head_path)]

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def forget(self) -> None:
        """Remove what waits for the next start of a node that is dead."""
        sweep(self.run_dir, kept=True)

    def close(self) -> None:
        """End it as a user would; whatever it left is for the test to find."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(20)
        self.forget()
        if self._of_its_own:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def node_stats(client: Client) -> dict[str, int | float]:
    """Return the counters of the node on this host, which may be slow to answer."""
    counters: dict[str, int | float] = {}

    def answered() -> bool:
        counters.update(client.stats()["node"])
        return bool(counters)

    wait_until(answered, "the node answers")
    return counters


def in_loop(node: Node, call: Callable[..., object], *args: object) -> None:
    """Have the thread of `node` call that, between two events."""
    loop = node._loop
    assert loop is not None
    loop.call_soon_threadsafe(call, *args)


class NodeThread:
    """A memory node in a thread of this process, with its own run directory and key prefix."""

    def __init__(self, redis: RedisServer, *, limits: Limits = PATIENT, **settings: Any) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvp-"))
        key_prefix = f"kv:{self.run_dir.name}"
        self.client_options: dict[str, Any] = {
            "url": redis.url,
            "run_dir": self.run_dir,
            "key_prefix": key_prefix,
            "limits": PATIENT,
        }
        self._index = open_guarded(
            redis.url, key_prefix=key_prefix, run_dir=self.run_dir, limits=PATIENT
        )
        config = NodeConfig(run_dir=self.run_dir, key_prefix=key_prefix, limits=limits, **settings)
        self.node = Node(config, self._index.index).start()

    def __enter__(self) -> NodeThread:
        return self

    def stop(self) -> None:
        """End it; its run directory stays. Safe to call twice."""
        self.node.stop()

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._index.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
