"""A node is killed and started again: its blocks are hits, and nobody's slot is touched."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client, Namespace, PutStatus
from kvstore.errors import NodeUnavailableError
from kvstore.spi import BlockSession

NS = Namespace.named("default")
SOON_S = 20.0


def content(key: str, size: int = 50_000) -> bytes:
    return (key.encode() * (size // len(key) + 1))[:size]


def restarted(node: NodeProcess) -> None:
    # A start that the index never heard of leaves nothing that the next one could believe.
    wait_until(lambda: node.directory.kept_resets().get("incarnation"), "it is announced", SOON_S)
    node.kill()
    node.start()


def stats(node: NodeProcess) -> dict:
    with Client(**node.client_options) as client:
        return node_stats(client)


def fill(client: Client, names) -> None:
    for name in names:
        assert client.put(name, content(name))


def test_a_killed_node_goes_on_with_every_block_it_had(node):
    names = [f"k{i}" for i in range(200)]
    with Client(**node.client_options) as client:
        fill(client, names)
        restarted(node)
        with Client(**node.client_options) as other:
            for reader in (client, other):  # one that knew the former start, and one that did not
                wait_until(
                    lambda reader=reader: (
                        reader.get_many(names) == [content(name) for name in names]
                    ),
                    "every block is a hit",
                    SOON_S,
                )
        wait_until(lambda: client.put("k0", b"x").status is PutStatus.DIFFERS, "puts", SOON_S)
        assert node_stats(client)["recovered"] == len(names)


def test_a_node_that_signs_signs_what_it_publishes_anew(redis_server):
    key = "thirty-two random characters.."
    environment = {"KVSTORE_SIGNING_KEY": key}
    with NodeProcess(redis_server, environment=environment) as node:
        with Client(**node.client_options, signing_key=key) as writer:
            fill(writer, ("a", "b"))
            before = writer.session.index.lookup([NS.value_key("a")])
        restarted(node)
        with Client(**node.client_options, signing_key=key) as reader:
            asks = reader.session.index.lookup
            wait_until(lambda: asks([NS.value_key("a")]) not in ([None], before), "published")
            assert {len(record) for record in asks([NS.value_key(name) for name in "ab"])} == {60}
            assert reader.get_many(["a", "b"]) == [content("a"), content("b")]
            assert reader.stats()["missed"] == {}


def test_the_index_names_the_new_start_and_a_damaged_header_is_a_miss(node):
    admin = node.redis.admin()
    with Client(**node.client_options) as client:
        fill(client, ("stays",))
        (name,) = admin.keys(f"{node.key_prefix}:{{*")
        before = admin.get(name)
        fill(client, ("goes",))
        node.signal(signal.SIGSTOP)
        with node.segment_files()[1].open("r+b") as head:
            at = head.read().index(NS.value_key("goes"))
            head.seek(at + 40)
            head.write(b"\xff")
        restarted(node)
        wait_until(lambda: client.get("stays") == content("stays"), "what is whole", SOON_S)
        assert client.get("goes") is None
        assert node_stats(client)["recovery_dropped"] == 1
    after = admin.get(name)
    assert after[8:40] == before[8:40]
    assert int.from_bytes(after[4:8], "little") > int.from_bytes(before[4:8], "little")  # epoch


@pytest.mark.parametrize("options", [("--size", str(32 * MIB))])
def test_with_another_shape_it_starts_empty_and_frees_the_old_memory(node, options):
    with Client(**node.client_options) as client:
        fill(client, ("k",))
        files = node.segment_files()
        node.kill()
        node.start(*options)
        assert not any(path.exists() for path in files)
        wait_until(lambda: client.put("k", b"new"), "the new node is found", SOON_S)
        assert client.get("k") == b"new"
        assert node_stats(client)["recovered"] == 0


WRITER = """
import sys
from pathlib import Path
from kvstore import Limits, Namespace
from kvstore.spi import BlockSession
session = BlockSession(sys.argv[1], run_dir=Path(sys.argv[2]), key_prefix=sys.argv[3],
                       limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0))
ns = Namespace.named("default")
granted = session.reserve([ns.value_key(f"w{i}") for i in range(4)], 50_000, ns.id)
print(len(granted), flush=True)
for line in sys.stdin:
    for reservation in granted:
        reservation.buffer[:] = b"late" * 12_500
    print("written", flush=True)
"""


def start_writer(node: NodeProcess) -> subprocess.Popen:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, node.redis.url, str(node.run_dir), node.key_prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline() == "4\n"
    return writer


def test_a_writer_that_lived_through_it_writes_into_nobody_elses_slot():
    """Rule 5 over a restart: its slots are given to nobody until its lease is free."""
    names = [f"x{i}" for i in range(200)]  # more than fit
    with RedisServer() as redis, NodeProcess(redis, size=4 * MIB) as node:
        writer = start_writer(node)
        try:
            restarted(node)
            assert stats(node)["quarantined"] == 4
            with Client(**node.client_options) as client:
                fill(client, names)
                writer.stdin.write("\n")
                writer.stdin.flush()
                assert writer.stdout.readline() == "written\n"
                there = [name for name in names if client.get(name) is not None]
                assert there
                assert all(client.get(name) == content(name) for name in there)
                assert client.get("w0") is None
                assert node_stats(client)["quarantined"] == 4
        finally:
            writer.kill()
            writer.wait()
        wait_until(lambda: stats(node)["quarantined"] == 0, "its slots are free", SOON_S)
        assert stats(node)["reserved"] == 0


def test_a_reservation_of_the_former_start_keeps_its_slot_until_it_is_given_back(node):
    options = {k: v for k, v in node.client_options.items() if k != "url"}
    with closing(BlockSession(node.redis.url, **options)) as session:
        keys = [NS.value_key(f"r{i}") for i in range(3)]
        one, two, three = session.reserve(keys, 50_000, NS.id)
        restarted(node)
        session.abort(session.reserve([NS.value_key("other")], 1000, NS.id))
        with pytest.raises(NodeUnavailableError, match="gone"):
            session.commit([one])
        assert stats(node)["quarantined"] == 3
        two.buffer[:4] = b"mine"
        session.abort([two])
        assert stats(node)["quarantined"] == 3
        session.abort([three])
        wait_until(lambda: stats(node)["quarantined"] == 0, "all are given back", SOON_S)


def test_a_pinned_view_keeps_its_bytes_over_a_restart_and_under_pressure():
    with RedisServer() as redis, NodeProcess(redis, size=4 * MIB) as node:
        client, other = Client(**node.client_options), Client(**node.client_options)
        with client, other:
            fill(client, ("pinned",))
            with client.pin("pinned") as pinned:
                restarted(node)
                wait_until(lambda: other.put("x", b"1"), "the new start is found", SOON_S)
                fill(other, [f"x{i}" for i in range(200)])
                assert pinned.buffer == content("pinned")
                assert other.get("pinned") == content("pinned")
                assert client.put("y", b"1")  # it knows of the new start, and keeps the old lease
                fill(other, [f"y{i}" for i in range(200)])
                assert pinned.buffer == content("pinned")
                assert node_stats(other)["quarantined"] == 1
            wait_until(lambda: stats(node)["quarantined"] == 0, "the pin is over", SOON_S)


def test_an_engine_that_dies_leaves_what_it_saved(node):
    saver = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import os, signal, sys\n"
            "from pathlib import Path\n"
            "from kvstore import Client, Limits\n"
            "client = Client(sys.argv[1], run_dir=Path(sys.argv[2]), key_prefix=sys.argv[3],\n"
            "    limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0))\n"
            "assert all(client.put_many({f'k{i}': b'%d' % i * 40_000 for i in range(50)}))\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n",
            *(node.redis.url, str(node.run_dir), node.key_prefix),
        ]
    )
    assert saver.wait(60) == -signal.SIGKILL
    with Client(**node.client_options) as client:
        for i in range(50):
            assert client.get(f"k{i}") == b"%d" % i * 40_000


def test_a_stop_frees_the_memory_and_with_keep_it_waits_for_the_next_start(node):
    with Client(**node.client_options) as client:
        fill(client, ("k",))
    files = node.segment_files()
    node.process.terminate()
    assert node.process.wait(20) == 0
    assert not any(path.exists() for path in files)
    node.start("--keep")
    with Client(**node.client_options) as client:
        fill(client, ("k",))
    files = node.segment_files()
    node.process.terminate()
    assert node.process.wait(20) == 0
    assert all(path.exists() for path in files)
    node.start()
    with Client(**node.client_options) as client:
        wait_until(lambda: client.get("k") == content("k"), "the planned restart is warm", SOON_S)


def test_clean_frees_what_dead_nodes_left(node):
    files = node.segment_files()
    node.kill()
    assert all(path.exists() for path in files)
    command = [sys.executable, "-m", "kvstore.cli", "node", "--clean", "--run-dir", node.run_dir]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert told.returncode == 0, told.stderr
    assert "node" in told.stdout
    assert not any(path.exists() for path in files)
