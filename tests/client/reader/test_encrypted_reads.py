"""Clients of a node whose disks are encrypted: with its keys they read them, without they do not,
and say why."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_blocks import found, random_payload
from redis_servers import wait_until
from stores import NodeThread
from two_hosts import SECURITY

from kvstore import Client, MissReason
from kvstore.client.session import BlockSession
from kvstore.errors import UsageError
from kvstore.node.config import DiskConfig
from kvstore.record import unpack_record
from kvstore.secret import disk_keys
from kvstore.segment.disk import seal
from kvstore.types import Key, Tier

if TYPE_CHECKING:
    from redis_servers import RedisServer

MIB = 1 << 20
SIZE_BYTES = MIB + 777
COUNT = 6
TOKENS = list(range(16))
FILE = "KVSTORE_DISK_KEYS_FILE"
Settings = dict[str, Any]


def key_file(path: Path, *seeds: int) -> Path:
    path.write_text("\n".join(random.Random(seed).randbytes(32).hex() for seed in seeds) + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = key_file(tmp_path / "keys", 1)
    monkeypatch.setenv(FILE, str(path))
    return path


@pytest.fixture
def settings(tmp_path: Path, ours: Path) -> Settings:
    (tmp_path / "disk").mkdir()
    return {
        "size_bytes": 8 * MIB,
        "disks": [DiskConfig(tmp_path / "disk", 64 * MIB)],
        "disk_write": "through",
        "disk_keys": disk_keys(),
        "listen": ("127.0.0.1", 0),
        "security": SECURITY,
    }


@pytest.fixture
def keys(redis_server: RedisServer, settings: Settings) -> list[Key]:
    """Those of blocks that a former start has written to the disk."""
    keys = [os.urandom(32) for _ in range(COUNT)]
    with NodeThread(redis_server, **settings) as node:
        session = session_of(node)
        for number, key in enumerate(keys, 1):
            (slot,) = session.reserve([key], SIZE_BYTES, 7)
            slot.buffer[:] = random_payload(key, SIZE_BYTES)  # type: ignore[union-attr]
            assert all(session.commit([slot]))  # type: ignore[list-item]
            at_least = number
            wait_until(lambda: session.writer.stats()["disk_blocks"] >= at_least, "it is written")  # noqa: B023
        session.close()
        with client_of(node) as client:
            client.put_blocks(TOKENS, [bytes(MIB)])
        wait_until(lambda: stats(node)["disk_blocks"] == COUNT + 1, "it is written")
    return keys


@pytest.fixture
def node(redis_server: RedisServer, settings: Settings, keys: list[Key]) -> Iterator[NodeThread]:
    with NodeThread(redis_server, **settings) as node:
        wait_until(lambda: stats(node)["disk_blocks"] == COUNT + 1, "it is adopted", 20)
        wait_until(lambda: not stats(node)["disk_adopting"], "all is", 20)
        yield node


def session_of(node: NodeThread, run_dir: Path | None = None) -> BlockSession:
    """On the node's host; with a `run_dir` of its own, on another."""
    options = {**node.client_options, "security": SECURITY}
    return BlockSession(**{**options, "run_dir": run_dir or options["run_dir"]})


def client_of(node: NodeThread) -> Client:
    return Client(**node.client_options, security=SECURITY, block_tokens=16)


def stats(node: NodeThread) -> Any:
    with closing(session_of(node)) as session:
        return session.writer.stats()


def test_who_has_the_keys_reads_encrypted_blocks_of_his_host_and_others_by_stream(
    node: NodeThread, keys: list[Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = session_of(node)
    assert found(here, keys, SIZE_BYTES) == dict.fromkeys(keys, Tier.DISK)
    assert here.remote.counts["disk_hits"] == COUNT
    here.close()
    # Of another host the node decrypts them: that has no keys.
    monkeypatch.delenv(FILE)
    there = session_of(node, tmp_path / "elsewhere")
    wait_until(lambda: len(found(there, keys, SIZE_BYTES)) == COUNT, "they are announced", 20)
    assert set(found(there, keys, SIZE_BYTES).values()) == {Tier.OTHER_HOST}
    assert there.remote.counts["stream_hits"] >= COUNT
    there.close()


@pytest.mark.parametrize("how", ["none", "others", "readable by all", "gone"])
def test_who_lacks_the_keys_finds_nothing_on_disk_and_says_why(
    node: NodeThread,
    keys: list[Key],
    ours: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if how == "none":
        monkeypatch.delenv(FILE)
    elif how == "others":
        key_file(ours, 2)
    elif how == "readable by all":
        ours.chmod(0o644)
    else:
        ours.unlink()
    why = {"none": "lacks keys", "others": "lacks keys", "gone": "cannot be read"}
    with caplog.at_level(logging.WARNING, "kvstore.client"):
        session = session_of(node)
        assert found(session, keys, SIZE_BYTES) == {}
        assert set(session.reader.miss_reasons) <= {"unreadable-disk", "absent"}
        session.close()
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "are encrypted, and" in text
    assert why.get(how, "others may read") in text
    with client_of(node) as client:

        def is_said() -> bool:
            missing = client.explain(TOKENS).first_missing
            assert missing is not None
            is_known = missing.reason is MissReason.UNREADABLE_DISK
            assert not is_known or "encrypted, and " in missing.detail
            return is_known

        wait_until(is_said, "its record is in the index", 20)


def test_a_changed_block_is_a_miss_and_none_of_it_gets_to_the_caller(
    node: NodeThread, keys: list[Key], settings: Settings
) -> None:
    session = session_of(node)
    (ref,) = session.lookup(keys[:1])
    at = unpack_record(ref.key, ref.record)  # type: ignore[union-attr]
    with (settings["disks"][0].directory / "kvstore.disk").open("r+b", buffering=0) as file:
        file.seek(at.slot * 4096 + MIB + 5)  # type: ignore[union-attr]
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    staging = bytearray(b"\xee" * SIZE_BYTES)
    (view,) = session.views([ref], memoryview(staging))  # type: ignore[list-item]
    assert view is None
    assert staging == b"\xee" * SIZE_BYTES
    session.close()


def test_a_region_that_is_begun_anew_meanwhile_costs_a_miss_and_not_the_disk(
    node: NodeThread, keys: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(node)
    refs = [one for one in session.lookup(keys[:1]) if one is not None]
    with monkeypatch.context() as patch:
        patch.setattr(seal, "lap_in", lambda *page: None)
        assert [*session.views(refs, memoryview(bytearray(SIZE_BYTES)))] == [None]
    assert found(session, keys, SIZE_BYTES) == dict.fromkeys(keys, Tier.DISK)
    session.close()


def test_the_disk_has_no_byte_of_what_was_saved(keys: list[Key], settings: Settings) -> None:
    raw = (settings["disks"][0].directory / "kvstore.disk").read_bytes()
    for key in keys:
        payload = random_payload(key, SIZE_BYTES)
        assert all(payload[at : at + 16] not in raw for at in range(0, SIZE_BYTES, 100_000))
        assert key in raw


def test_a_rotated_key_reads_the_old_and_a_node_without_keys_does_not_start(
    redis_server: RedisServer, keys: list[Key], settings: Settings, ours: Path
) -> None:
    key_file(ours, 2, 1)
    with NodeThread(redis_server, **{**settings, "disk_keys": disk_keys()}) as node:
        session = session_of(node)
        wait_until(lambda: len(found(session, keys, SIZE_BYTES)) == COUNT, "it is adopted", 20)
        session.close()
    with (
        pytest.raises(UsageError, match=r"disk_keys_file.*which is encrypted"),
        NodeThread(redis_server, **{**settings, "disk_keys": {}}),
    ):
        pass


def test_nothing_is_encrypted_and_nothing_imported_where_no_keys_are_named(
    redis_server: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FILE)
    assert disk_keys() == {}
    for name in ("cryptography", "cryptography.hazmat.primitives.ciphers"):
        monkeypatch.setitem(sys.modules, name, None)
    plain = {**settings, "disk_keys": {}, "listen": None}
    with NodeThread(redis_server, **plain) as node, Client(**node.client_options) as client:
        client.put("name", b"v" * MIB)
        wait_until(lambda: stats(node)["disk_blocks"] == 1, "it is written", 20)
    raw = (settings["disks"][0].directory / "kvstore.disk").read_bytes()
    assert b"v" * MIB in raw
