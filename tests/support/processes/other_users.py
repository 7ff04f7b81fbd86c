"""Processes of other users of this machine, for tests of who may do what. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from redis_servers import wait_until

from kvstore.nodedir import NodeDir

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start processes of other users"
)
ALICE, BOB, READERS = 20_001, 20_002, 20_010
"""Two users, whose own groups have the same numbers, and a group."""
TIMEOUT_S = 60.0

# Everything is imported before the user changes: it may not be able to read the checkout.
_PRELUDE = """
import json, os, socket, sys
from pathlib import Path
import hiredis, msgpack, redis, tenacity, xxhash
import kvstore.node.metrics, prometheus_client
import kvstore.cli.commands.node, kvstore.cli.options, kvstore.cli.output, kvstore.cli.store
from kvstore import *
import kvstore.client.nodes.saving.embedded_node, kvstore.client.missing.explain
import kvstore.client.reset_everywhere, kvstore.index.embedded_redis.server, kvstore.segment.scan
import kvstore.index.redis.cluster, kvstore.transport.nixl.transport, tomllib
from kvstore.cli import main
from kvstore.client.nodes.control import ControlChannel
from kvstore.protocol.control import Op
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index
from kvstore.nodedir import NodeDir, sweep
from importlib import metadata
version = metadata.version("redis")
metadata.version = lambda name: version  # redis-py asks for its own at every connect
try:
    open_index("redis://127.0.0.1:1").ping()  # imports what a connection needs
except KVStoreError:
    pass
uid, groups, args = json.loads(sys.argv[1])
os.setgroups(groups)
os.setgid(uid)
os.setuid(uid)
os.umask(0o077)
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
def raised(call):
    try:
        return repr(call())
    except Exception as e:
        return f"{type(e).__name__}: {e}"
"""


def command_as(uid: int, code: str, args: Sequence[Any], groups: Sequence[int] = ()) -> list[str]:
    """The command that runs `code` as that user; it finds `args` under that name."""
    told = json.dumps([uid, list(groups), list(args)])
    return [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), told]


def run_as(uid: int, code: str, *args: Any, groups: Sequence[int] = ()) -> Any:
    """Return what `code` prints as JSON, run as that user; it finds `args` under that name."""
    ran = subprocess.run(
        command_as(uid, code, args, groups), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


class ProcessOf:
    """A process of that user which runs `code` and answers: each line that it prints is JSON."""

    def __init__(self, uid: int, code: str, *args: Any, groups: Sequence[int] = ()) -> None:
        command = command_as(uid, code, args, groups)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str = "") -> Any:
        """What it answers to a line; None when it has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(line, file=self.process.stdin, flush=True)
        return self.heard()

    def heard(self) -> Any:
        """The next line that it prints; None when it has ended."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        return json.loads(said) if said else None

    def __enter__(self) -> ProcessOf:
        return self

    def __exit__(self, *exc: object) -> None:
        with self.process:
            self.process.kill()


class NodeOf:
    """`kvstore node` as that user; ends with the `with`."""

    def __init__(
        self, uid: int, run_dir: os.PathLike[str], *options: str, groups: Sequence[int] = ()
    ) -> None:
        os.chown(run_dir, uid, uid)
        words = ["node", "--run-dir", str(run_dir), *options, "--end-with-parent", str(os.getpid())]
        self.process = subprocess.Popen(
            command_as(uid, "sys.exit(main(args))", words, groups), stdout=subprocess.DEVNULL
        )
        self.directory = NodeDir(run_dir, "node")
        wait_until(self._ready, "the node is ready", TIMEOUT_S)

    def _ready(self) -> bool:
        assert self.process.poll() is None, "the node ended at once"
        return self.directory.alive() and self.directory.socket.exists()

    def __enter__(self) -> NodeOf:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(20)
