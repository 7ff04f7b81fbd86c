"""A client of a node that really keeps blocks on disks, over restarts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disk_blocks import found, random_payload
from redis_servers import wait_until
from stores import NodeThread

from kvstore.client.session import BlockSession
from kvstore.node.config import DiskConfig
from kvstore.types import Key, Tier

if TYPE_CHECKING:
    from redis_servers import RedisServer

KIB, MIB = 1 << 10, 1 << 20
SIZE_BYTES = 50 * KIB + 1
COUNT = 80
"""Blocks that are saved: about twice what the memory holds."""


def save(session: BlockSession, keys: list[Key]) -> None:
    for key in keys:
        (slot,) = session.reserve([key], SIZE_BYTES, 7)
        slot.buffer[:] = random_payload(key, SIZE_BYTES)  # type: ignore[union-attr]
        assert all(session.commit([slot]))  # type: ignore[list-item]


def test_what_is_evicted_comes_from_disk_also_after_a_restart_that_lost_all_memory(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    settings: dict[str, Any] = {
        "size_bytes": 3 * MIB,
        "disks": [DiskConfig(folder, 16 * MIB) for folder in folders],
        "disk_write": "eviction",
    }
    keys = [os.urandom(32) for _ in range(COUNT)]
    with NodeThread(redis_server, **settings) as node:
        session = BlockSession(**node.client_options)
        for key in keys:
            save(session, [key])
            time.sleep(0.01)  # so that most are written before they are evicted
        on_disk: set[Key] = set()

        def written() -> bool:
            on_disk.update(
                key for key, at in found(session, keys, SIZE_BYTES).items() if at is Tier.DISK
            )
            return len(on_disk) > COUNT // 4

        wait_until(written, "what was evicted is on the disks", 20)
        assert Tier.HOST in found(session, keys, SIZE_BYTES).values()
        assert session.remote.counts["disk_hits"] >= len(on_disk)
        session.close()
    with NodeThread(redis_server, **settings) as node:
        session = BlockSession(**node.client_options)
        wait_until(
            lambda: on_disk <= found(session, keys, SIZE_BYTES).keys(), "the disks are adopted", 20
        )
        assert set(found(session, keys, SIZE_BYTES).values()) == {Tier.DISK}
        session.close()
