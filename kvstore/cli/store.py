"""Finds the store that runs already: commands that only look never start one."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kvstore.cli.output import human_bytes
from kvstore.client.client import Client
from kvstore.client.health import DISK_CLOSED
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.readability import Reach
from kvstore.client.session import BlockSession
from kvstore.core.report import TOLD_OF_DISKS
from kvstore.errors import NodeUnavailableError
from kvstore.index.embedded_redis import supervisor
from kvstore.index.open import URL_VARIABLE
from kvstore.limits import PATIENT_TIMEOUT_S, Limits
from kvstore.nodedir import Announcement, NodeDir, announced, node_dirs
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import counters
from kvstore.system.on_failure import on_failure

LIMITS = Limits(redis_timeout_s=PATIENT_TIMEOUT_S, publish_timeout_s=2.0, request_timeout_s=5.0)
"""A person waits longer than an engine, and wants an answer rather than a miss."""


def embedded_url(run_dir: Path) -> str | None:
    """Return the URL of the embedded Redis of `run_dir`, None when none runs."""
    path = run_dir / "redis" / supervisor.SOCKET
    return f"unix://{quote(str(path))}" if supervisor.answers(path) else None


def store_url(args: argparse.Namespace, run_dir: Path) -> str:
    """Return the URL of Redis. Raises `NodeUnavailableError` when none is named and none runs."""
    url = args.url or os.environ.get(URL_VARIABLE) or embedded_url(run_dir)
    if not url:
        raise NodeUnavailableError(
            "no store runs here: start one with `kvstore up`, "
            f"or name its Redis with --url or {URL_VARIABLE}"
        )
    return url


def open_client(args: argparse.Namespace, run_dir: Path, *, node: str | None = None) -> Client:
    """Return a client of the running store. Raises `IndexUnavailableError` when Redis does not
    answer."""
    client = Client(
        store_url(args, run_dir),
        namespace=args.namespace,
        key_prefix=args.key_prefix,
        node=node,
        run_dir=run_dir,
        limits=LIMITS,
    )
    with on_failure(client.close):
        client.session.index.ping()
    return client


def reach(url: str, key_prefix: str, run_dir: Path, timeout_s: float) -> list[Reach]:
    """Return every node that is announced, and why a client here cannot read it, within
    `timeout_s`; each is tried."""
    with closing(
        BlockSession(url, key_prefix=key_prefix, run_dir=run_dir, limits=LIMITS)
    ) as session:
        return session.reach(time.monotonic() + timeout_s)


class LocalNode(NamedTuple):
    """Asks a node that lives on this host."""

    announcement: Announcement
    directory: NodeDir

    def asked(self) -> closing[ControlChannel]:
        """Return a context with the node's control channel, which is closed at its end."""
        node = (self.announcement.node_id, self.announcement.epoch)
        timeout_s = LIMITS.request_timeout_s
        return closing(ControlChannel(self.directory, node, timeout_s, lambda: ((), ())))

    def stats(self) -> dict[str, int | float]:
        """Return what the node counts. Raises `NodeUnavailableError` or `DeadlineError`."""
        with self.asked() as channel:
            return dict(channel.request(Op.STAT, accept=counters))


def local_nodes(run_dir: Path, key_prefix: str | None) -> list[LocalNode]:
    """Return the living nodes of this host, in name order; all of them when `key_prefix` is
    None."""
    found = announced(node_dirs(run_dir), key_prefix)
    return [LocalNode(word, directory) for word, directory in found if directory.alive()]


def on_disks(stats: Mapping[str, float] | None) -> str:
    """Return what a node has on disks, empty when it has none."""
    if not stats or "disk_bytes" not in stats:
        return ""
    used, size = (human_bytes(stats[name]) for name in TOLD_OF_DISKS)
    text = f"{used} of {size} on disk"
    if "disk_blocks" in stats:  # of this host
        text += (
            f", {stats['disk_blocks']} blocks, {human_bytes(stats['disk_written_bytes'])} written"
        )
        skipped = {name.removeprefix("disk_skipped_"): count for name, count in stats.items()
                   if name.startswith("disk_skipped_") and count}  # fmt: skip
        if skipped:
            text += ", evicted unwritten: " + ", ".join(f"{n} {why}" for why, n in skipped.items())
    if stats.get("disk_adopting"):
        text += ", not all of it known yet after the start"
    return f"{text}; {DISK_CLOSED % stats['disk_closed']}" if stats.get("disk_closed") else text
