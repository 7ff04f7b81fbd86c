"""Finds the memory node of this host or starts one, for an engine that is about to start."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

from kvstore.cli.fleet import STOP_TIMEOUT_S, Child, node_command, node_environment
from kvstore.cli.output import human_bytes
from kvstore.cli.store import LocalNode, local_nodes
from kvstore.client.nodes.saving.embedded_node import embedded_name
from kvstore.errors import KVStoreError, NodeUnavailableError
from kvstore.index.redis.identity import identity_of
from kvstore.index.redis.url import parse_url
from kvstore.nodedir import NodeDir, sweep
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import counters
from kvstore.system.filelock import FileLock, is_locked
from kvstore.transport.registry import CUDA_IPC

REDIS_WAIT_S = 30.0
"""How long an engine's start waits for a Redis that the node cannot use. A node without one serves
its own host, and comes to the others by itself."""
OTHER_START_WAIT_S = 2 * REDIS_WAIT_S
"""How long another `kvstore run` of this host that starts a node is waited for. One that hangs
longer is passed: the node's own lock keeps two of one name apart."""
GONE_S = 10.0
"""A node that was found and is away for longer is gone: whoever runs it would have restarted it."""
LEAVE_S = 3.0
"""For clients that have just ended, before they count as others: above node/idle_shutdown.py's."""
LOOK_EVERY_S = 1.0
POLL_S = 0.05
STDERR = 2


class HostNode:
    """Holds a node of this host as an engine does. One that was started here ends with its last
    client: with this process, or with the last engine of another that uses it."""

    def __init__(
        self,
        url: str,
        key_prefix: str,
        run_dir: Path,
        options: Sequence[str],
        env: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`options` and `env` are for a node that is started; `say` is told what happens."""
        self._run_dir, self._key_prefix = run_dir, key_prefix
        self._index = identity_of(parse_url(url))
        self.name = embedded_name(key_prefix).replace("embedded", "run")
        # With this process until it is held, from then on with its last client.
        command = [*node_command(options, run_dir), "--end-with-parent", str(os.getpid())]
        command += ["--end-with-last-client", "--name", self.name]
        # Who reads our standard error until its end does not wait for a node that stays.
        reads, self._stderr = os.pipe()
        Thread(target=_copy_to_stderr, args=(reads,), daemon=True).start()
        self._child = Child(self.name, command, node_environment(env), self._stderr)
        self._is_ours = False
        self._say = say
        self._held = ExitStack()
        self._holds = (0, 0)
        """Node id and epoch."""
        self._look_at = self._seen_at = time.monotonic()

    def open(self, stopped: Callable[[], bool], check: Callable[[], object]) -> None:
        """Return when a node is ready, or serves this host and has not reached its Redis for
        `REDIS_WAIT_S`; also when `stopped`. `check` raises where none can be started.

        Raises `NodeUnavailableError` and `DeadlineError` when it does not come up.
        """
        # Of two that start together, one starts a node.
        alone = FileLock(self._run_dir, os.O_RDONLY)
        give_up_at = time.monotonic() + OTHER_START_WAIT_S
        try:
            while not alone.take() and not stopped() and time.monotonic() < give_up_at:
                time.sleep(POLL_S)
            found = self._living()
            if not found and not stopped():
                check()
                self._child.start()
                self._is_ours = True
            for node in found[:1]:
                size = human_bytes(node.announcement.size_bytes)
                self._say(f"node {node.announcement.name}: found, {size}")
            name = found[0].announcement.name if found else self.name
            self._wait_ready(NodeDir(self._run_dir, name), stopped)
            self._hold()
        finally:
            alone.release()

    def _living(self) -> list[LocalNode]:
        """Return the nodes of this host that an engine of this Redis can save to: neither another
        user's nor those of VRAM alone."""
        return [
            node
            for node in local_nodes(self._run_dir, self._key_prefix)
            if node.announcement.index == self._index != ""
            and CUDA_IPC not in node.announcement.transports
            and node.directory.is_ours()
        ]

    def _wait_ready(self, directory: NodeDir, stopped: Callable[[], bool]) -> None:
        give_up_at = math.inf

        def over() -> bool:
            nonlocal give_up_at
            if give_up_at == math.inf and self._living():  # its memory is there
                give_up_at = time.monotonic() + REDIS_WAIT_S
            return stopped() or time.monotonic() > give_up_at

        if self._is_ours and (line := self._child.wait_ready(over, directory, self._say)):
            self._say(line)
        while not over() and directory.why_not_ready():
            time.sleep(POLL_S)
        if (why := directory.why_not_ready()) and not stopped():
            self._say(f"node {directory.name} is not ready, and the engine starts anyway: {why}")

    def _hold(self) -> None:
        """Be a client of a node of this host, of its present start."""
        for node in self._living()[:1]:
            self._seen_at = time.monotonic()
            start = node.announcement.node_id, node.announcement.epoch
            if start == self._holds:
                return
            self._held.close()
            with suppress(KVStoreError):
                channel = self._held.enter_context(node.asked())
                channel.request(Op.STAT, accept=counters)
                self._holds = start

    def tend(self) -> None:
        """Keep a node on this host. It raises nothing: an engine goes on without one."""
        try:
            if self._is_ours:
                self._child.tend(self._say)
        except NodeUnavailableError as e:
            self._say(f"{e}: the engine goes on without it")
            self._is_ours, self._seen_at = False, math.inf
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._hold()
        if not self._is_ours and now - self._seen_at > GONE_S:
            self._say("no node is left on this host: starting one")
            self._is_ours = True
            with suppress(OSError):
                self._child.start()

    def close(self) -> None:
        """Let go of the node. One that was started here ends, unless others use it."""
        os.close(self._stderr)
        self._held.close()
        process = self._child.process
        if process is None:
            return
        if not self._holds[1]:
            process.terminate()
        directory, since = NodeDir(self._run_dir, self.name), time.monotonic()
        while process.poll() is None:
            waited_s = time.monotonic() - since
            if waited_s > STOP_TIMEOUT_S or (waited_s > LEAVE_S and _used(directory)):
                self._say(f"node {self.name} stays: others use it")
                return
            time.sleep(POLL_S)
        sweep(self._run_dir, kept=True, names={self.name})


def _copy_to_stderr(fd: int) -> None:
    with open(fd, "rb") as lines, suppress(OSError, ValueError):
        for line in lines:
            os.write(STDERR, line)


def _used(directory: NodeDir) -> bool:
    """Return whether a client of the node lives."""
    try:
        return any(map(is_locked, directory.leases.iterdir()))
    except OSError:
        return False
