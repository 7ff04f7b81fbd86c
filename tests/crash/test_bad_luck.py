"""What goes wrong in life: each is a clear error or a miss, never wrong bytes, never a hang."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from clocks import died_ago
from each_input import each
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, node_stats
from warm_processes import WarmProcess, program

from kvstore import Client, Limits, PutStatus, UsageError
from kvstore.errors import NoSpaceError
from kvstore.index.memory import MemoryIndex
from kvstore.limits import RESTART_WITHIN_S, SEGMENT_BYTES_MAX
from kvstore.node import Node, NodeConfig
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES
from kvstore.spi import NodeUnavailableError
from kvstore.testing.stopping import stop

HANG_S = 5.0
"""Anything slower than this counts as a hang."""


@pytest.fixture(autouse=True)
def no_hang_and_nothing_left_in_shm():
    before, started = set(Path("/dev/shm").iterdir()), time.monotonic()
    yield
    left = {p for p in Path("/dev/shm").iterdir() if p.name.startswith("kvstore-")} - before
    # Other tests' nodes may have come meanwhile; ours carry this process's run directories.
    assert not [p for p in left if p in MINE], left
    assert time.monotonic() - started < 60


MINE: set[Path] = set()


def watched(node: NodeProcess) -> NodeProcess:
    MINE.update(node.segment_files())
    return node


def fresh(node, **options):
    return Client(**{**node.client_options, **options})


def quickly(call, at_most_s=HANG_S):
    started = time.monotonic()
    result = call()
    assert time.monotonic() - started < at_most_s
    return result


# --- Redis -----------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "redis:/x", "://", "x"])
def test_a_wrong_url_is_refused_by_name(tmp_path, url):
    with pytest.raises(UsageError, match="url"):
        Client(url, run_dir=tmp_path / "run")


def test_a_redis_that_is_down_at_start_means_misses_and_says_why_nothing_is_saved(tmp_path):
    with Client("redis://127.0.0.1:1", run_dir=tmp_path / "run") as client:
        assert quickly(lambda: client.get("k")) is None
        assert quickly(lambda: client.match_prefix(range(1000))).blocks == 0
        result = quickly(lambda: client.put("k", b"v"))
        assert result.status is PutStatus.REJECTED
        assert "node" in result.reason
        assert client.stats()["client"]["index_failures"] > 0


def test_a_wrong_password_means_misses_and_the_log_says_so(redis_server, tmp_path, caplog):
    with RedisServer("--requirepass", "right") as locked:
        url = f"unix://:hunter2@{locked.socket}"
        with Client(url, run_dir=tmp_path / "run") as client:
            assert client.get("k") is None
            assert "password" in caplog.text.lower() or "auth" in caplog.text.lower()
            assert "hunter2" not in caplog.text


def test_redis_killed_in_use_costs_hits_nothing_and_comes_back_by_itself():
    with RedisServer() as redis, watched(NodeProcess(redis)) as node, fresh(node) as client:
        client.put("before", b"1" * 1000)
        assert client.get("before") == b"1" * 1000
        redis.kill()
        assert quickly(lambda: client.get("before")) == b"1" * 1000
        assert quickly(lambda: client.get("unknown")) is None
        assert quickly(lambda: client.put("during", b"2" * 1000)).status is PutStatus.STORED
        redis.start()
        with fresh(node) as other:
            wait_until(lambda: other.get("during") == b"2" * 1000, "the node tells the new Redis")
            wait_until(lambda: other.get("before") == b"1" * 1000, "what was there before, too")


def test_an_emptied_redis_is_refilled_by_the_node(node, client):
    values = {f"k{i}": os.urandom(2000) for i in range(300)}
    client.put_many(values)
    admin = node.redis.admin()
    admin.flushall()
    with fresh(node) as other:
        wait_until(lambda: other.get_many(list(values)) == [*values.values()], "the refill", 10)


def test_a_stopped_redis_is_a_deadline_and_then_an_immediate_miss():
    with (
        RedisServer() as redis,
        watched(NodeProcess(redis)) as node,
        fresh(node, limits=Limits()) as client,
    ):
        client.put("k", b"1")
        client.get("absent")  # the first contact has a deadline of its own
        redis.signal(signal.SIGSTOP)
        for _ in range(4):
            quickly(lambda: client.get("x"), 0.5)
        started = time.monotonic()
        for i in range(100):
            assert client.get(f"x{i}") is None
        assert (time.monotonic() - started) / 100 < 0.01
        redis.signal(signal.SIGCONT)
        with fresh(node) as other:
            wait_until(lambda: other.get("k") == b"1", "Redis is asked again")


@pytest.mark.parametrize("signing_key", [None, "thirty-two random characters.."])
def test_a_corrupted_record_in_redis_is_never_read_through(redis_server, signing_key):
    """With a signing key nothing else says where the block is, so that it is a miss; without one
    a client looks around on its own host, and finds the block whatever the record says."""
    value = b"1" * 1000
    expected = value if signing_key is None else None
    environment = {} if signing_key is None else {"KVSTORE_SIGNING_KEY": signing_key}
    options = {"signing_key": signing_key}
    with watched(NodeProcess(redis_server, environment=environment)) as node:
        with fresh(node, **options) as client:
            client.put("k", value)
        admin = redis_server.admin()
        (key,) = [k for k in admin.keys(f"{node.key_prefix}:{{*") if b"{" in k]
        record = admin.get(key)
        flipped = record[:20] + bytes([record[20] ^ 1]) + record[21:]
        for damaged in (b"", b"x", record[:-1], flipped, record + b"x"):
            admin.set(key, damaged)
            with fresh(node, **options) as other:
                assert other.get("k") == expected
                assert other.get_many(["k", "j"]) == [expected, None]
        admin.delete(key)
        admin.lpush(key, "a list")
        with fresh(node, **options) as other:
            assert other.get("k") == expected
            assert other.match_prefix(range(1000)).blocks == 0


# --- memory ------------------------------------------------------------------


def header_place(node, key: str, client: Client) -> int:
    """Where in the header file the slot of `key` is."""
    raw_key = client.namespace.value_key(key)
    raw = node.segment_files()[1].read_bytes()
    at = raw.index(raw_key, SUPERBLOCK_BYTES)
    return at - (at - SUPERBLOCK_BYTES) % HEADER_BYTES


@each("offset", [0, 1, 8, 40, 44, 45, 60])
@each("seen", [False, True])
def test_a_corrupted_header_is_a_miss(node, client, offset, seen):
    key = f"{offset}, seen: {seen}"
    client.put(key, b"1" * 100_000)
    with fresh(node) as other:
        if seen:
            assert other.get(key) == b"1" * 100_000
        with node.segment_files()[1].open("r+b") as head:
            head.seek(header_place(node, key, client) + offset)
            byte = head.read(1)[0]
            head.seek(-1, os.SEEK_CUR)
            head.write(bytes([byte ^ 0xFF]))
        assert other.get(key) is None


@pytest.mark.parametrize("seen", [False, True])
def test_flipped_payload_bytes_are_a_miss_with_verify_always(node, seen):
    with fresh(node, verify="always") as client:
        values = {"small": b"1" * 1000, "large": b"2" * 100_000}
        for name, value in values.items():
            client.put(name, value)
            if seen:
                assert client.get(name) == value
        data = node.segment_files()[0]
        raw = data.read_bytes()
        with data.open("r+b") as file:
            for value in values.values():
                file.seek(raw.index(value) + len(value) // 2)
                file.write(b"\0")
        assert client.get("small") is None
        assert client.get("large") is None
        assert not client.pin("large")


def test_a_full_shm_is_refused_with_figures_and_leaves_nothing(tmp_path):
    config = NodeConfig(run_dir=tmp_path, size_bytes=SEGMENT_BYTES_MAX)
    with pytest.raises(NoSpaceError, match=r"\d+ bytes asked for, \d+ free"):
        Node(config, MemoryIndex()).start()
    assert list((tmp_path / "nodes").iterdir()) == []


def test_a_second_node_of_the_same_name_is_refused(tmp_path):
    config = NodeConfig(run_dir=tmp_path, size_bytes=MIB)
    with Node(config, MemoryIndex()), pytest.raises(UsageError, match=r"^name="):
        Node(config, MemoryIndex()).start()


# --- processes -----------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from kvstore import Limits, Namespace
from kvstore.spi import BlockSession
session = BlockSession(sys.argv[1], run_dir=Path(sys.argv[2]), key_prefix=sys.argv[3],
                       limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0))
ns = Namespace.named("default")
keys = [ns.value_key(f"w{i}") for i in range(4)]
granted = session.reserve(keys, 1000, ns.id)
for reservation in granted:
    reservation.buffer[:500] = b"h" * 500
print("ready", flush=True)
time.sleep(60)
"""


def start(source: str, node: NodeProcess, *more: str) -> WarmProcess:
    """A client's program; its first line of output says that it is at work."""
    where = (node.redis.url, str(node.run_dir), node.key_prefix)
    started = WarmProcess(program, source, *where, *more, stdout=subprocess.PIPE)
    assert started.stdout.readline() == "ready\n"
    return started


def test_a_writer_killed_between_reserve_and_commit_publishes_nothing_and_leaks_nothing(
    node, client
):
    writer = start(WRITER, node)
    assert node_stats(client)["reserved"] == 4
    assert client.put("w0", b"x").status is PutStatus.IN_PROGRESS
    writer.kill()
    writer.wait()
    wait_until(lambda: node_stats(client)["reserved"] == 0, "the node takes its slots back", 5)
    assert client.get("w0") is None
    assert client.put("w0", b"x").status is PutStatus.STORED
    assert list(node.directory.leases.iterdir()) != []  # ours; the dead one's is gone
    assert len(list(node.directory.leases.iterdir())) == 1


def test_a_stopped_writer_keeps_its_slots(node, client):
    """Rule 5: it may wake up and write at any time."""
    writer = start(WRITER, node)
    try:
        stop(writer.pid)
        time.sleep(1.0)
        client.put_many((f"x{i}", os.urandom(1000)) for i in range(500))
        assert node_stats(client)["reserved"] == 4
    finally:
        writer.kill()
        writer.wait()


def test_a_node_killed_means_misses_and_the_next_one_serves(redis_server):
    with watched(NodeProcess(redis_server)) as node, fresh(node) as client:
        client.put_many({f"k{i}": os.urandom(50_000) for i in range(50)})
        node.kill()
        result = quickly(lambda: client.put("new", b"1"))
        assert result.status is PutStatus.REJECTED
        wait_until(lambda: quickly(lambda: client.get("k1")) is None, "its blocks are misses", 5)
        assert client.match_prefix(range(10_000)).blocks == 0
        with pytest.raises(NodeUnavailableError):
            client.delete("k1")
        assert client.stats()["node"] == {}
        node.forget()
        node.start()
        watched(node)
        wait_until(lambda: client.put("k1", b"again"), "the new node is found", 5)
        assert client.get("k1") == b"again"


def test_what_a_killed_node_left_in_shm_waits_for_its_next_start_and_is_then_removed(redis_server):
    with watched(NodeProcess(redis_server)) as node:
        with fresh(node) as client:
            client.put("k", b"1")
            files = node.segment_files()
            node.kill()
            wait_until(lambda: client.get("k") is None, "its blocks are misses", 5)
        assert all(path.exists() for path in files)
        died_ago(RESTART_WITHIN_S + 60, keep=node.directory.keep)
        fresh(node).close()
        assert not any(path.exists() for path in files)


def test_a_stopped_node_costs_a_put_one_deadline_and_gets_nothing(redis_server):
    limits = Limits(request_timeout_s=0.5, redis_timeout_s=5.0)
    with watched(NodeProcess(redis_server)) as node, fresh(node, limits=limits) as client:
        client.put("k", b"1" * 100_000)
        node.signal(signal.SIGSTOP)
        assert quickly(lambda: client.put("x", b"1"), 1.5).status is PutStatus.REJECTED
        assert quickly(lambda: client.put("x", b"1"), 0.3).status is PutStatus.REJECTED
        assert quickly(lambda: client.get("k"), 0.3) == b"1" * 100_000
        node.signal(signal.SIGCONT)
        wait_until(lambda: client.put("x", b"1"), "the node is asked again", 5)


LOOP = """
import os, random, sys
from hashlib import blake2b
from pathlib import Path
from kvstore import Client, Limits
rng = random.Random(int(sys.argv[4]))
def content(key, size):
    unit = blake2b(key.encode(), digest_size=32).digest()
    return (unit * (size // 32 + 1))[:size]
client = Client(sys.argv[1], run_dir=Path(sys.argv[2]), key_prefix=sys.argv[3],
                limits=Limits(request_timeout_s=1.0, redis_timeout_s=1.0))
print("ready", flush=True)
hits = 0
while True:
    key = f"k{rng.randrange(60)}"
    size = 1000 + int(key[1:]) * 20000
    if rng.random() < 0.5:
        client.put(key, content(key, size))
    else:
        got = client.get(key)
        if got is not None:
            if got != content(key, size):
                print("WRONG BYTES", key, flush=True)
                os._exit(3)
            hits += 1
            if hits % 50 == 0:
                print("hits", hits, flush=True)
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_processes_killed_in_the_middle_of_puts_and_gets_never_give_wrong_bytes(seed):
    """Clients and node die at random times; the survivors' bytes are checked all along."""
    import random

    rng = random.Random(seed)
    with RedisServer() as redis, watched(NodeProcess(redis, size=24 * MIB)) as node:
        loops = [start(LOOP, node, str(seed * 100 + i)) for i in range(3)]
        survivor = loops[0]
        try:
            for round_ in range(8):
                time.sleep(rng.uniform(0.05, 0.4))
                if rng.random() < 0.3:
                    node.kill()
                    node.start()
                    watched(node)
                else:
                    victim = rng.randrange(1, 3)
                    loops[victim].kill()
                    loops[victim].wait()
                    assert loops[victim].returncode == -signal.SIGKILL, f"seed {seed}"
                    loops[victim] = start(LOOP, node, str(seed * 100 + 10 + round_))
            assert survivor.poll() is None, f"seed {seed}"
            assert survivor.stdout.readline().startswith("hits"), f"seed {seed}"
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        for loop in loops:
            assert "WRONG" not in (loop.stdout.read() or ""), f"seed {seed}"
        with fresh(node) as client:
            wait_until(lambda: node_stats(client)["reserved"] == 0, "dead writers' slots", 5)
