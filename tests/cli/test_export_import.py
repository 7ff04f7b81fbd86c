"""`kvstore export` and `kvstore import`: blocks of one node's disk on another's, over a real S3
server."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from disk_nodes import DISK_BYTES, KEYS, MIB, NAMESPACE, SIZE_BYTES, DiskNode, config, payload_of
from places import Running, clean_env
from s3_servers import SECRET, Bucket, bucket, s3_server
from stores import PATIENT

from kvstore.cli import EXIT_FAILED, EXIT_USAGE, main, object_store
from kvstore.client.session import BlockSession
from kvstore.node.config import DiskConfig
from kvstore.segment.disk.file import FILE_NAME
from kvstore.types import Key, Kind, Tier

__all__ = ["bucket", "s3_server"]

Output = pytest.CaptureFixture[str]
OTHERS = NAMESPACE.block_keys(range(1000, 3000), 1)
"""Keys of blocks that others do not have."""

COUNT = 90
REGION_BLOCKS = 15
"""Blocks that a region of such a disk has room for."""
NOWHERE = "redis://127.0.0.1:1"
"""No index is there."""


class Host:
    """A directory for a node and its disk."""

    def __init__(self, where: Path, disk_bytes: int = DISK_BYTES) -> None:
        (where / "run").mkdir(mode=0o700, parents=True)
        self.disk = where / "disk0"
        self.config = replace(config(where), disks=[DiskConfig(self.disk, disk_bytes)])

    def exported(self, url: str) -> int:
        return main(["export", url, "--disk", str(self.disk)])

    def import_words(self, url: str) -> list[str]:
        disk = ["--disk", str(self.disk), "--disk-size", str(self.config.disks[0].size_bytes)]
        return ["import", url, *disk, "--disk-force"]

    def imported(self, url: str) -> int:
        return main(self.import_words(url))

    def found(self, keys: list[Key]) -> set[Key]:
        """The blocks that a node started here has on its disk, each with the right bytes."""
        with DiskNode(self.config) as node:
            read = {key: node.read(key) for key in keys}
        assert all(raw in (None, payload_of(key)) for key, raw in read.items())
        return {key for key, raw in read.items() if raw is not None}


class Exported(NamedTuple):
    """What was exported of one host's disk: objects by name, and the keys of their blocks."""

    objects: dict[str, bytes]
    there: set[Key]

    def put_into(self, bucket: Bucket) -> None:
        for name, raw in self.objects.items():
            bucket.put(f"some/where/{name}", raw)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A host whose disk has blocks, and whose node does not run; nothing changes it."""
    host = Host(tmp_path_factory.mktemp("source") / "host")
    with DiskNode(host.config) as node:
        node.fill(KEYS[:COUNT])
    return host


@pytest.fixture(scope="module")
def exported(source: Host) -> Exported:
    there = source.found(KEYS[:COUNT])
    assert len(there) > COUNT // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_SECRET", SECRET)
        where = source.disk.parent / "exported"
        assert source.exported(f"file://{where}") == 0
    return Exported({path.name: path.read_bytes() for path in where.iterdir()}, there)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A new host."""
    return Host(tmp_path / "host")


def by_lap(names: Iterable[str]) -> list[str]:
    """Names of objects, the oldest region first."""
    return sorted(names, key=lambda name: name.rpartition("-")[2])


def test_a_new_host_finds_what_another_one_had_with_the_right_bytes(
    source: Host, exported: Exported, host: Host, bucket: Bucket, capsys: Output
) -> None:
    assert source.exported(bucket.url) == 0
    count = len(exported.objects)
    assert bucket.keys() == sorted(f"some/where/{name}" for name in exported.objects)
    assert f"{count} regions exported, 0 left out" in capsys.readouterr().out
    assert host.imported(bucket.url) == 0
    said = capsys.readouterr().out
    assert f"{len(exported.there)} blocks of {count} regions imported, 0 refused" in said
    assert "0 left out for want of room" in said
    keys = sorted(exported.there)
    with DiskNode(host.config) as node:
        assert node.stats()["disk_adopted"] == len(keys)
        session = BlockSession(NOWHERE, run_dir=host.config.run_dir, limits=PATIENT)
        with closing(session):
            found = session.match(keys)
            assert session.tiers(found) == [Tier.DISK] * len(keys)
            views = session.views(found, memoryview(bytearray(len(keys) * SIZE_BYTES)))
            read = [None if view is None else bytes(view.buffer) for view in views]
            assert read == [payload_of(key) for key in keys]


def test_repeating_either_does_nothing_more(
    source: Host, exported: Exported, host: Host, bucket: Bucket, capsys: Output
) -> None:
    for _ in range(2):
        assert source.exported(bucket.url) == 0
        assert host.imported(bucket.url) == 0
    said = capsys.readouterr().out
    assert "\n0 regions exported, 0 left out" in said
    assert f": 0 blocks of {len(exported.objects)} regions imported" in said
    assert host.found(KEYS) == exported.there


def test_the_region_that_a_running_node_writes_to_is_left_out_until_it_ends(
    source: Host, exported: Exported, bucket: Bucket
) -> None:
    with DiskNode(source.config):
        assert source.exported(bucket.url) == 0
    expected = [f"some/where/{name}" for name in by_lap(exported.objects)]
    assert bucket.keys() == sorted(expected[:-1])
    assert source.exported(bucket.url) == 0
    assert bucket.keys() == sorted(expected)


def test_what_there_is_no_room_for_is_the_oldest_and_nothing_is_written_over(
    exported: Exported, tmp_path: Path, bucket: Bucket, capsys: Output
) -> None:
    exported.put_into(bucket)
    host = Host(tmp_path / "small", 8 * MIB)  # seven regions
    with DiskNode(host.config) as node:
        node.fill(OTHERS[: 5 * REGION_BLOCKS])
    own = host.found(OTHERS)
    assert host.imported(bucket.url) == 0
    said = capsys.readouterr().out
    left = [name for name in by_lap(exported.objects) if f"{name}: " not in said]
    assert 0 < len(left) < len(exported.objects)
    assert left == by_lap(exported.objects)[: len(left)]
    assert f"{len(left)} left out for want of room" in said
    assert host.found(OTHERS) == own
    assert len(exported.there - host.found(KEYS)) == len(left) * REGION_BLOCKS


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut", "unsigned", "renamed"])
def test_an_object_that_is_not_right_is_refused_by_name_and_the_others_go_in(
    how: str, exported: Exported, host: Host, bucket: Bucket, capsys: Output
) -> None:
    bad, other, *_ = by_lap(exported.objects)
    raw = bytearray(exported.objects[bad])
    match how:
        case "flipped":
            raw[len(raw) // 2] ^= 1
        case "cut":
            del raw[-SIZE_BYTES:]
        case "unsigned":
            raw[-32:] = bytes(32)
        case _:
            raw[:] = exported.objects[other]
    exported.put_into(bucket)
    bucket.put(f"some/where/{bad}", bytes(raw))
    assert host.imported(bucket.url) == EXIT_FAILED
    said = capsys.readouterr()
    assert said.err.startswith(f"kvstore: refused: {bad} ")
    assert said.err.count("\n") == 1
    assert "1 refused" in said.out
    found = host.found(KEYS)
    assert found < exported.there
    assert len(exported.there - found) == REGION_BLOCKS


def test_objects_of_another_secret_are_refused_and_none_without_one(
    exported: Exported,
    host: Host,
    bucket: Bucket,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported.put_into(bucket)
    monkeypatch.delenv("KVSTORE_SECRET")
    for done in (host.exported, host.imported):
        assert done(bucket.url) == EXIT_USAGE
        assert "KVSTORE_SECRET='': must be set: objects are signed" in capsys.readouterr().err
    assert not (host.disk / FILE_NAME).exists()
    monkeypatch.setenv("KVSTORE_SECRET", "another one of some words")
    assert host.imported(bucket.url) == EXIT_FAILED
    said = capsys.readouterr().err
    assert said.count("is not signed with this secret") == len(exported.objects)
    assert all(name in said for name in exported.objects)
    assert host.found(KEYS) == set()
    monkeypatch.setenv("KVSTORE_SECRET", f"another one of some words\n{SECRET}")
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == exported.there


def test_a_disk_whose_node_runs_is_not_imported_to(
    host: Host, bucket: Bucket, capsys: Output
) -> None:
    with DiskNode(host.config):
        assert host.imported(bucket.url) == EXIT_USAGE
    assert "is in use by another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x: Generic S3 error"),
        ("file:///nowhere/at/all", "file:///nowhere/at/all: "),
        ("memory:///", "url='memory:///': must be s3://BUCKET/PREFIX"),
        ("nothing", "url='nothing': must be s3://BUCKET/PREFIX"),
    ],
)
def test_a_url_that_leads_nowhere_is_said_in_one_line(
    url: str, text: str, host: Host, bucket: Bucket, capsys: Output
) -> None:
    assert bucket.keys() == []
    assert host.imported(url) in (EXIT_FAILED, EXIT_USAGE)
    said = capsys.readouterr().err
    assert said.startswith(f"kvstore: {text}")
    assert said.count("\n") == 1
    assert not (host.disk / FILE_NAME).exists()


def test_a_store_that_does_not_answer_ends_after_its_retries(
    source: Host, bucket: Bucket, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(object_store, "RETRIES_MAX", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert source.exported(bucket.url) == EXIT_FAILED
        assert 0.5 < time.monotonic() - began < 30
    assert f"kvstore: {bucket.url}: " in capsys.readouterr().err


def test_without_obstore_the_package_is_named(
    host: Host, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert host.exported(bucket.url) == EXIT_USAGE
    assert "needs obstore: pip install 'kvstore-llm[s3]'" in capsys.readouterr().err


# --- what forbids ---------------------------------------------------------------------------------


def test_what_was_reset_on_the_importing_node_is_a_miss_and_what_is_newer_is_not(
    exported: Exported, host: Host, bucket: Bucket, tmp_path: Path
) -> None:
    exported.put_into(bucket)
    with DiskNode(host.config) as node:
        node.reset(1 << 30, NAMESPACE.id)
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == set()
    newer = Host(tmp_path / "newer")
    with DiskNode(newer.config) as node:
        node.reset(1 << 30, NAMESPACE.id)
        node.fill(OTHERS[:50])
        there = {key for key in OTHERS if node.read(key)}
    assert newer.exported(bucket.url) == 0
    assert host.imported(bucket.url) == 0
    assert host.found([*KEYS, *OTHERS]) == there


def test_a_reset_after_the_import_drops_it_and_repeating_that_brings_nothing_back(
    exported: Exported, host: Host, bucket: Bucket
) -> None:
    exported.put_into(bucket)
    assert host.imported(bucket.url) == 0
    with DiskNode(host.config) as node:
        assert any(map(node.on_disk, KEYS))
        node.reset(1 << 30, NAMESPACE.id)
        assert not any(map(node.on_disk, KEYS))
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == set()


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_what_was_deleted_or_cleared_on_the_importing_node_stays_away(
    how: str, exported: Exported, host: Host, bucket: Bucket
) -> None:
    exported.put_into(bucket)
    assert host.imported(bucket.url) == 0
    key = min(exported.there)
    with DiskNode(host.config) as node:
        if how == "drop":
            assert node.drop(key) == [True]
        else:
            node.clear()
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == (exported.there - {key} if how == "drop" else set())


def test_values_that_clients_named_are_not_exported(
    host: Host, bucket: Bucket, tmp_path: Path
) -> None:
    a = Host(tmp_path / "a")
    with DiskNode(a.config) as node:
        for number, key in enumerate(KEYS[:COUNT]):
            node.save(key, kind=Kind.BYTES if number % 2 else Kind.BLOCK)
            node.settle()
        there = {key for key in KEYS[:COUNT] if node.read(key) is not None}
    assert a.exported(bucket.url) == 0
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == there & set(KEYS[:COUNT:2])


# --- while others write, and when it is killed ----------------------------------------------------


@pytest.mark.long
def test_an_export_while_the_node_writes_its_disk_over_has_right_bytes_alone(
    host: Host, bucket: Bucket, tmp_path: Path, capsys: Output
) -> None:
    a, full, ended = Host(tmp_path / "a"), threading.Event(), threading.Event()
    with DiskNode(a.config) as node:

        def write() -> None:
            for key in OTHERS:
                node.fill([key])
                if node.stats()["disk_regions_evicted"]:
                    full.set()
                if ended.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert full.wait(60)
            codes = {a.exported(bucket.url) for _ in range(4)}
            assert writer.is_alive()
        finally:
            ended.set()
            writer.join()
    assert codes <= {0, EXIT_FAILED}
    said = capsys.readouterr().err
    assert all("was written over meanwhile" in line for line in said.splitlines()), said
    assert len(bucket.keys()) > 10
    assert host.imported(bucket.url) == 0
    assert len(host.found(OTHERS)) > 10 * REGION_BLOCKS


def killed(words: list[str], said: str) -> None:
    """Kill a command once it has said something."""
    running = Running(*words, env=clean_env())
    running.wait_for(said)
    assert running.end(signal.SIGKILL) == -signal.SIGKILL


def test_an_import_that_is_killed_has_whole_objects_and_goes_on_when_repeated(
    exported: Exported, host: Host, bucket: Bucket
) -> None:
    exported.put_into(bucket)
    with bucket.server.held(by_lap(exported.objects)[2]):  # it never ends
        killed(host.import_words(bucket.url), by_lap(exported.objects)[1])
    found = host.found(KEYS)
    assert len(found) == 2 * REGION_BLOCKS
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == exported.there


def test_an_export_that_is_killed_has_whole_objects_and_goes_on_when_repeated(
    source: Host, exported: Exported, host: Host, bucket: Bucket
) -> None:
    third = by_lap(exported.objects)[2]
    with bucket.server.held(third):
        killed(["export", bucket.url, "--disk", str(source.disk)], by_lap(exported.objects)[1])
    assert len(bucket.keys()) == 2
    assert source.exported(bucket.url) == 0
    assert host.imported(bucket.url) == 0
    assert host.found(KEYS) == exported.there
