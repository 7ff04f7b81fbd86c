"""What lies on the disks of a node is found and read by clients on other hosts."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis_servers import wait_until
from stores import NodeProcess, NodeThread
from two_hosts import SECURITY, listening_node

from kvstore import Client, Limits, MissReason
from kvstore.cli.checks import reach
from kvstore.cli.checks.base import Context, Level
from kvstore.client.base import BlockRef
from kvstore.client.session import BlockSession
from kvstore.node.config import DiskConfig
from kvstore.record import unpack_record
from kvstore.segment.disk import attached
from kvstore.segment.disk.attached import AttachedDisks, DiskFile
from kvstore.types import Key, Location, Tier

if TYPE_CHECKING:
    from redis_servers import RedisServer

KIB, MIB = 1 << 10, 1 << 20
SIZE_BYTES = 50 * KIB + 1
COUNT = 80
"""Blocks that are saved: more than the memory holds."""


def payload_of(key: Key) -> bytes:
    return random.Random(key).randbytes(SIZE_BYTES)


def session_of(options: dict[str, Any], run_dir: Path | None = None, **more: Any) -> BlockSession:
    """On the node's host; with a `run_dir` of its own, on another."""
    options = {**options, "security": SECURITY, **more}
    return BlockSession(**{**options, "run_dir": run_dir or options["run_dir"]})


def save(session: BlockSession, keys: list[Key]) -> None:
    for key in keys:
        (slot,) = session.reserve([key], SIZE_BYTES, 7)
        slot.buffer[:] = payload_of(key)  # type: ignore[union-attr]
        assert all(session.commit([slot]))  # type: ignore[list-item]


def stats(session: BlockSession) -> dict[str, int | float]:
    return session.writer.stats()


def filled(session: BlockSession, count: int = COUNT) -> list[Key]:
    """Save blocks, no faster than they are written to the disk."""
    keys = [os.urandom(32) for _ in range(count)]
    for i in range(0, count, 8):
        before = stats(session)["disk_blocks"]
        save(session, keys[i : i + 8])
        many = min(before + 8, count)
        wait_until(lambda: stats(session)["disk_blocks"] >= many, "they are written")  # noqa: B023
    return keys


def places(session: BlockSession, keys: list[Key]) -> dict[Key, Location]:
    """Where the index says that each of `keys` is."""
    found = [one for one in session.lookup(keys) if one is not None]
    return {one.key: unpack_record(one.key, one.record) for one in found}  # type: ignore[misc]


def on_disk(session: BlockSession, keys: list[Key]) -> list[BlockRef]:
    found = [one for one in session.lookup(keys) if one is not None]
    return [one for one in found if unpack_record(one.key, one.record).segment]  # type: ignore[union-attr]


def read(session: BlockSession, found: list[BlockRef]) -> list[bool]:
    """Which of them are read; those that are have the right bytes."""
    staging = memoryview(bytearray(SIZE_BYTES * len(found)))
    views = list(session.views(found, staging))
    for one, view in zip(found, views, strict=True):
        assert view is None or bytes(view.buffer) == payload_of(one.key)
    return [view is not None for view in views]


Settings = dict[str, Any]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "disk").mkdir()
    return {
        "size_bytes": 3 * MIB,
        "disks": [DiskConfig(tmp_path / "disk", 16 * MIB)],
        "disk_write": "through",
        "listen": ("127.0.0.1", 0),
        "security": SECURITY,
    }


@pytest.fixture
def node(redis_server: RedisServer, settings: Settings) -> Iterator[NodeThread]:
    with NodeThread(redis_server, **settings) as node:
        yield node


@pytest.fixture
def near(node: NodeThread) -> Iterator[BlockSession]:
    session = session_of(node.client_options)
    yield session
    session.close()


@pytest.fixture
def far(node: NodeThread, tmp_path: Path) -> Iterator[BlockSession]:
    session = session_of(node.client_options, tmp_path / "far")
    yield session
    session.close()


@pytest.mark.parametrize("signing", [{}, {"KVSTORE_SIGNING_KEY": "a key that signs records"}])
def test_all_is_found_there_after_a_kill_and_after_the_index_was_emptied(
    redis_server: RedisServer, tmp_path: Path, signing: dict[str, str], monkeypatch: Any
) -> None:
    for name, value in signing.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "disk").mkdir()
    disk = (
        "--disk",
        str(tmp_path / "disk"),
        "--disk-size",
        "16MiB",
        "--disk-force",
        "--disk-write",
        "through",
    )
    with listening_node(redis_server, *disk, size=3 * MIB) as node:
        near = session_of(node.client_options)
        keys = filled(near)
        far = session_of(node.client_options, tmp_path / "far")
        all_there(far, keys)
        refs = on_disk(far, keys)
        assert len(refs) > COUNT // 4
        assert set(far.tiers(refs)) == {Tier.OTHER_HOST}
        assert all(read(far, refs))

        redis_server.admin().flushall()
        all_there(far, keys)

        near.close()
        lose_memory(node)
        node.start()
        all_there(far, keys)
        assert len(on_disk(far, keys)) == COUNT, "memory was lost"
        far.close()


def test_places_and_misses_add_up_to_the_blocks_that_were_asked_for(
    redis_server: RedisServer,
    node: NodeThread,
    settings: Settings,
    near: BlockSession,
    far: BlockSession,
    tmp_path: Path,
) -> None:
    keys = filled(near)
    wait_until(lambda: len(places(far, keys)) == COUNT, "records")
    asked = [*keys, *(os.urandom(32) for _ in range(7))]
    for session, tiers in ((near, {Tier.HOST, Tier.DISK}), (far, {Tier.OTHER_HOST})):
        found = [one for one in session.lookup(asked) if one is not None]
        each = Counter(session.tiers(found))
        assert set(each) == tiers
        assert each.total() + 7 == len(asked)
        run = session.match(asked)
        assert (len(run), run.short) == (COUNT, MissReason.ABSENT)
        damaged = on_disk(session, keys)[0]
        at = unpack_record(damaged.key, damaged.record)
        with (settings["disks"][0].directory / "kvstore.disk").open("r+b") as file:
            file.seek(at.slot * 4096)  # type: ignore[union-attr]
            file.write(b"?" * 100)
        arrived = sum(read(session, found))
        counts, viewed = session.remote.counts, session.viewed["hits"]
        hits = sum(n for name, n in counts.items() if name.endswith("_hits")) + viewed
        other = sum(n for name, n in counts.items() if name.endswith(("_misses", "_failed")))
        assert (hits, other) == (arrived, len(found) - arrived)
        assert other >= 1


def test_it_is_explained_that_a_block_is_on_a_disk(
    node: NodeThread, near: BlockSession, tmp_path: Path
) -> None:
    options = {**node.client_options, "security": SECURITY, "block_tokens": 16}
    with Client(**options) as here, Client(**{**options, "run_dir": tmp_path / "far"}) as there:
        tokens = list(range(64))
        here.put_blocks(tokens, [os.urandom(SIZE_BYTES) for _ in range(4)])
        here.put("name", os.urandom(SIZE_BYTES))
        wait_until(lambda: stats(near)["disk_blocks"] == 5, "they are on the disk")
        assert here.explain(tokens).disk_blocks == 0, "they are in memory too"
        filled(near)
        for client in (here, there):
            wait_until(lambda: client.explain(tokens).disk_blocks == 4, "4 blocks on disk")  # noqa: B023
            assert "64 of 64 tokens hit, 4 blocks of them on disks" in str(client.explain(tokens))
            assert str(client.explain_key("name")) == "name: hit, on a disk"


class Elsewhere(AttachedDisks):
    """The disks as a container has them that mounts another directory there."""

    def __init__(self, word: Any, *how: Any, **more: Any) -> None:
        disks = {number: f"{said}.elsewhere" for number, said in word.disks.items()}
        super().__init__(replace(word, disks=disks), *how, **more)


@pytest.mark.parametrize("there", ["nothing", "another file"])
def test_what_this_process_cannot_open_comes_by_the_nodes_stream(
    settings: Settings,
    node: NodeThread,
    near: BlockSession,
    monkeypatch: pytest.MonkeyPatch,
    there: str,
) -> None:
    keys = filled(near)
    if there == "another file":
        (settings["disks"][0].directory / "kvstore.disk.elsewhere").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(attached, "AttachedDisks", Elsewhere)  # the node has imported its own
    session = session_of(node.client_options)
    all_there(session, keys)
    wait_until(lambda: len(on_disk(session, keys)) > COUNT // 5, "records")
    refs = on_disk(session, keys)
    for _ in range(2):
        assert all(read(session, refs)), "also where it is only seen when it is opened"
    assert session.remote.counts["disk_hits"] == 0
    assert session.remote.counts["stream_hits"] >= 2 * len(refs)
    reach = [one.disks for one in session.reach(time.monotonic() + 10)]
    assert reach == [None]
    session.close()


def test_where_there_is_no_stream_either_it_is_said_why_and_what_to_do(
    redis_server: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {name: one for name, one in settings.items() if name not in ("listen", "security")}
    with NodeThread(redis_server, **alone) as node:
        near = session_of(node.client_options)
        monkeypatch.setattr(attached, "AttachedDisks", Elsewhere)
        options = {**node.client_options, "block_tokens": 16}
        with Client(**options) as client:
            tokens = list(range(64))
            client.put_blocks(tokens, [os.urandom(SIZE_BYTES) for _ in range(4)])
            filled(near)

            def why() -> str:
                missing = client.explain(tokens).first_missing
                assert missing is not None
                return str(missing)

            wait_until(lambda: why().startswith("unreadable-disk: "), "its record is in the index")
            assert "kvstore.disk.elsewhere" in why()
            assert "--listen" in why()
            health = client.health()
            assert health, "the rest of it works"
            assert "unreadable-disk: " in str(health)
            context = Context(redis_server.url, node.node.config.key_prefix, node.run_dir)
            (found,) = reach.look(context)
            assert found.level is Level.WARN
            assert "mount" in found.do
        near.close()


def lose_memory(node: NodeProcess) -> None:
    """Kill it as a reboot does."""
    files = node.segment_files()
    node.signal(signal.SIGKILL)
    node.process.wait(10)
    for path in files:
        path.unlink(missing_ok=True)
    node.redis.admin().flushall()


def all_there(session: BlockSession, keys: list[Key]) -> None:
    def there() -> bool:
        found = [one for one in session.lookup(keys) if one is not None]
        return len(found) == len(keys) and all(read(session, found))

    wait_until(there, "all blocks are read", 20)


@pytest.mark.parametrize("how", ["dropped", "cleared", "written over"])
def test_what_left_the_disk_is_a_miss_and_its_record_goes(
    node: NodeThread, near: BlockSession, far: BlockSession, how: str
) -> None:
    keys = filled(near)
    wait_until(lambda: len(on_disk(far, keys)) > COUNT // 5, "records")
    gone = on_disk(far, keys)[:3]
    names = [one.key for one in gone]
    where = list(places(far, names).items())
    assert far.remote.there(where) == [True] * 3
    if how == "dropped":
        near.drop(names)
    elif how == "cleared":
        near.writer.clear(7)
    else:
        for _ in range(6):  # more than the disk holds
            save(near, [os.urandom(32) for _ in range(COUNT)])
            time.sleep(0.3)
        wait_until(lambda: not places(far, names), "their region is begun anew")
    assert far.remote.there(where) == [False] * 3
    assert read(far, gone) == [False] * 3
    wait_until(lambda: not places(far, names), "no record of them")


def test_flipped_bits_are_a_miss_and_the_node_takes_the_block_out(
    settings: Settings, node: NodeThread, near: BlockSession, far: BlockSession
) -> None:
    keys = filled(near)
    wait_until(lambda: len(on_disk(far, keys)) > COUNT // 5, "records")
    bad, good = on_disk(far, keys)[:2]
    at = unpack_record(bad.key, bad.record)
    assert at is not None
    with (settings["disks"][0].directory / "kvstore.disk").open("r+b") as file:
        file.seek(at.slot * 4096 + 77)
        file.write(bytes([payload_of(bad.key)[77] ^ 1]))
    assert read(far, [bad, good]) == [False, True]
    wait_until(lambda: not places(far, [bad.key]), "no record of it")


def test_a_stalled_disk_fails_in_time_and_memory_is_served_meanwhile(
    node: NodeThread, near: BlockSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = filled(near)
    quick = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=2.0)
    far = session_of(node.client_options, tmp_path / "far", limits=quick)
    wait_until(lambda: len(on_disk(far, keys)) > COUNT // 5, "records")
    refs = on_disk(far, keys)
    near_refs = [one for one in far.lookup(keys) if one is not None and one not in refs]
    going, real = threading.Event(), DiskFile.read

    def stalled(self: DiskFile, offset: int, into: memoryview) -> None:
        going.wait(60)
        real(self, offset, into)

    monkeypatch.setattr(DiskFile, "read", stalled)
    slow: list[tuple[list[bool], float]] = []

    def read_all() -> None:
        began = time.monotonic()
        slow.append((read(far, refs[:4]), time.monotonic() - began))

    thread = threading.Thread(target=read_all)
    thread.start()
    assert all(read(far, near_refs)), "memory of the same node"
    thread.join(30)
    going.set()
    ((found, took_s),) = slow
    assert found == [False] * 4
    assert took_s < 5.0
    assert far.remote.counts["stream_failed"] == 4
    assert all(read(far, near_refs)), "the node is not left alone for its disk"
    far.close()
