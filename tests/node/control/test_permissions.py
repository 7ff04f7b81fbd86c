"""A node is its user's alone, or a group may ask how it is: tried by processes of other users."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from other_users import ALICE, BOB, READERS, needs_root, run_as
from redis_servers import RedisServer, free_port, wait_until
from stores import MIB, PATIENT, node_stats

from kvstore import Client, UsageError
from kvstore.index.open import open_guarded
from kvstore.node import Node, NodeConfig
from kvstore.node.control.clients import UNHEARD_READERS_MAX
from kvstore.node.control.permissions import group_id
from kvstore.rundir import run_dir as checked_run_dir

PREFIX = "kv:shared"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


def url_of(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


@contextmanager
def a_node(server: RedisServer, group: int | None, *, keep: bool = False) -> Iterator[Node]:
    run_dir = Path(tempfile.mkdtemp(prefix="kvn-"))
    config = NodeConfig(
        run_dir=run_dir,
        key_prefix=PREFIX,
        size_bytes=4 * MIB,
        group=group,
        keep=keep,
        limits=PATIENT,
    )
    opened = open_guarded(url_of(server), key_prefix=PREFIX, run_dir=run_dir, limits=PATIENT)
    try:
        with Node(config, opened.index) as node:
            yield node
    finally:
        opened.close()
        shutil.rmtree(run_dir, ignore_errors=True)


def client_of(server: RedisServer, node: Node) -> Client:
    return Client(url_of(server), key_prefix=PREFIX, run_dir=node.config.run_dir, limits=PATIENT)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def modes(node: Node) -> dict[str, int]:
    word = node.announcement
    assert word is not None
    return {
        "run_dir": mode(node.config.run_dir),
        "directory": mode(node.dir.path),
        "leases": mode(node.dir.leases),
        "lock": mode(node.dir.lock),
        "socket": mode(node.dir.socket),
        "data": mode(word.data_path),
        "head": mode(word.head_path),
    }


def test_a_node_is_its_users_alone_unless_it_is_told_otherwise(server: RedisServer) -> None:
    with a_node(server, None) as node:
        found = modes(node)
        assert {name: m for name, m in found.items() if m & 0o077} == {}


@needs_root
def test_with_a_group_nothing_becomes_writable_and_nothing_is_for_everybody(
    server: RedisServer,
) -> None:
    with a_node(server, READERS) as node:
        found = modes(node)
        assert found == {
            "run_dir": 0o710,
            "directory": 0o750,
            "leases": 0o700,
            "lock": 0o640,
            "socket": 0o660,
            "data": 0o600,
            "head": 0o600,
        }


READ = """
url, run_dir, prefix = args
with Client(url, key_prefix=prefix, run_dir=run_dir, limits=PATIENT) as client:
    directory = NodeDir(Path(run_dir), "node")
    word = directory.announcement()
    key = client.namespace.value_key("k")
    channel = ControlChannel(directory, (word.node_id, word.epoch), 10.0, lambda: ((), ()))
    asks = {
        "RESERVE": (1, bytes(32), 4, 1, 0, [b"four"], 0),
        "COMMIT": ([(0, 1, 0)],), "ABORT": ([(0, 1)],), "PIN": (key,), "UNPIN": ([(0, 1)],),
        "DROP": (key,), "CLEAR": (client.namespace.id,),
        "STAT": (), "LIST": (b"", 10), "EXPLAIN": (key,),
    }
    print(json.dumps({
        "get": repr(client.get("k")),
        "put": str(client.put("mine", b"x" * 100_000)),
        "put small": str(client.put("mine", b"x")),
        "delete": raised(lambda: client.delete("k")),
        "pin": raised(lambda: client.pin("k")),
        "explain": str(client.explain_key("absent")),
        "open": raised(lambda: os.open(word.data_path, os.O_RDONLY)),
        "open header": raised(lambda: os.open(word.head_path, os.O_RDONLY)),
        "cut": raised(lambda: os.truncate(word.data_path, 0)),
        "cut header": raised(lambda: os.truncate(word.head_path, 0)),
        "lease": raised(lambda: os.open(directory.leases / "x", os.O_CREAT | os.O_RDWR)),
        "unlink": raised(lambda: os.unlink(directory.socket)),
        "swept": sweep(Path(run_dir)),
        "asked": {
            name: raised(lambda: channel.request(Op[name], *words)) for name, words in asks.items()
        },
    }))
"""


@needs_root
def test_a_member_of_the_group_asks_how_the_node_is_and_does_nothing_else(
    server: RedisServer,
) -> None:
    with a_node(server, READERS) as node, client_of(server, node) as owner:
        assert owner.put("k", b"value")
        where = (url_of(server), str(node.config.run_dir), PREFIX)
        did = run_as(ALICE, READ, *where, groups=[READERS])
        assert did["get"] == "None"
        for name in ("put", "put small", "delete", "pin"):
            assert "other-user" in did[name], name
        assert "never-stored" in did["explain"]
        for name in ("open", "open header", "cut", "cut header", "lease", "unlink"):
            assert did[name].startswith("PermissionError"), name
        assert did["swept"] == []
        allowed = {name for name, said in did["asked"].items() if "may only read" not in said}
        assert allowed == {"STAT", "LIST", "EXPLAIN"}
        # What it asked for has changed nothing.
        assert owner.get("k") == b"value"
        assert node_stats(owner)["reserved"] == node_stats(owner)["pinned"] == 0


PUT = """
url, run_dir, prefix, mine = args
with Client(url, key_prefix=prefix, run_dir=run_dir, limits=PATIENT) as client:
    puts = [str(client.put("mine", b"x" * size).status) for size in (1, 100_000)]
    print(json.dumps({"got": repr(client.get("k")), "puts": puts, "bytes": set_in(mine)}))
"""


@needs_root
def test_an_owner_cannot_make_a_member_write_into_the_members_own_files(
    server: RedisServer,
) -> None:
    """node.json says where the segment is, and whoever owns the directory writes node.json."""
    with (
        a_node(server, READERS) as node,
        client_of(server, node) as owner,
        # Another pytest that starts closes the directory above `tmp_path` to other users.
        tempfile.TemporaryDirectory() as folder,
    ):
        assert owner.put("k", b"value")
        word = node.announcement
        assert word is not None
        Path(folder).chmod(0o777)
        mine = Path(folder, "mine.data")
        mine.write_bytes(bytes(word.size_bytes))
        os.chown(mine, ALICE, ALICE)
        node.dir.announce(replace(word, data_path=str(mine)))
        counts = "def set_in(name): return sum(map(bool, Path(name).read_bytes()))\n"
        where = (url_of(server), str(node.config.run_dir), PREFIX, str(mine))
        did = run_as(ALICE, counts + PUT, *where, groups=[READERS])
        node.dir.announce(word)
    assert did["bytes"] == 0
    assert did["puts"] == ["rejected", "rejected"]
    assert did["got"] == "None"


@needs_root
def test_a_warm_start_closes_to_the_group_what_another_release_has_left_open_to_it(
    server: RedisServer,
) -> None:
    with a_node(server, READERS, keep=True) as node:
        with client_of(server, node) as owner:
            assert owner.put("k", b"value")
        before, word = modes(node), node.announcement
        assert word is not None
        node.stop()
        for path in (word.data_path, word.head_path):
            os.chown(path, -1, READERS)
            Path(path).chmod(0o640)
        with Node(node.config, node.index) as again:
            assert again.stats()["recovered"] == 1
            assert modes(again) == before
            where = (url_of(server), str(node.config.run_dir), PREFIX)
            did = run_as(ALICE, READ, *where, groups=[READERS])
            assert "may only read" in did["asked"]["PIN"]
        with Node(replace(node.config, group=None, keep=False), node.index) as alone:
            assert alone.stats()["recovered"] == 1
            assert {name: m for name, m in modes(alone).items() if m & 0o077} == {
                "run_dir": 0o710  # it may be other nodes' too
            }


@needs_root
def test_readers_sessions_end_with_their_connections(server: RedisServer) -> None:
    with a_node(server, READERS) as node:
        where = (url_of(server), str(node.config.run_dir), PREFIX)
        with client_of(server, node) as owner:
            assert owner.put("k", b"value")
            run_as(ALICE, READ, *where, groups=[READERS])
        wait_until(lambda: len(node.sessions) == 0, "no session is left")


SAY_NOTHING = """
import select, time
path, count = args
silent = []
for _ in range(count):
    one = socket.socket(socket.AF_UNIX)
    one.connect(path)
    silent.append(one)
time.sleep(0.5)
hung_up = [one for one in silent if select.select([one], [], [], 0)[0]]
print(json.dumps(count - len(hung_up)))
"""


@needs_root
def test_a_member_that_says_nothing_keeps_few_connections(server: RedisServer) -> None:
    with a_node(server, READERS) as node:
        kept = run_as(ALICE, SAY_NOTHING, str(node.dir.socket), 60, groups=[READERS])
        assert 0 < kept <= UNHEARD_READERS_MAX
        where = (url_of(server), str(node.config.run_dir), PREFIX)
        with client_of(server, node) as owner:
            assert owner.put("k", b"value")
            did = run_as(ALICE, READ, *where, groups=[READERS])
            assert "'capacity_bytes'" in did["asked"]["STAT"]


SAY_MUCH = """
import struct
one = socket.socket(socket.AF_UNIX)
one.connect(args[0])
row = b"\\xdd" + struct.pack(">I", 1 << 16) + b"\\x90" * (1 << 16)
message = b"\\x93\\x0e\\x00\\xdd" + struct.pack(">I", args[1]) + row * args[1]
sent = 0
try:
    while sent < len(message):
        sent += one.send(message[sent : sent + (1 << 16)])
except (BrokenPipeError, ConnectionResetError):
    pass
print(json.dumps(sent))
"""
ROWS = 100


@needs_root
def test_a_member_that_says_lists_without_end_is_hung_up_on_before_they_are_made(
    server: RedisServer,
) -> None:
    """6.5 million of them kept the node's thread for 1.7 s, as often as anybody liked."""
    with a_node(server, READERS) as node:
        sent = run_as(ALICE, SAY_MUCH, str(node.dir.socket), ROWS, groups=[READERS])
        assert sent < ROWS << 15, "half of it"


LOOK = """
url, run_dir, prefix, *paths = args
print(json.dumps([
    raised(lambda: Client(url, key_prefix=prefix, run_dir=run_dir)),
    *[raised(lambda: os.open(path, os.O_RDONLY)) for path in paths],
    raised(lambda: socket.socket(socket.AF_UNIX).connect(paths[-1])),
]))
"""


@needs_root
@pytest.mark.parametrize("group", [None, READERS])
def test_who_is_not_in_the_group_reaches_nothing(server: RedisServer, group: int | None) -> None:
    with a_node(server, group) as node:
        word = node.announcement
        assert word is not None
        paths = [word.data_path, word.head_path, str(node.dir.announcement_path)]
        paths += [str(node.dir.lock), str(node.dir.socket)]
        refused, *opened = run_as(
            BOB, LOOK, url_of(server), str(node.config.run_dir), PREFIX, *paths
        )
        assert "must belong to user" in refused
        assert [said for said in opened if not said.startswith("PermissionError")] == []


SAY_HELLO = """
from kvstore.client.nodes.lease import Lease
directory = NodeDir(Path(args[0]), "node")
word = directory.announcement()
channel = ControlChannel(directory, (word.node_id, word.epoch), 10.0, lambda: ((), ()))
print(json.dumps(raised(lambda: channel.request(Op.STAT))))
"""


@needs_root
def test_a_stranger_is_refused_by_the_kernels_word_when_files_are_open(server: RedisServer) -> None:
    """Somebody ran `chmod -R a+rwX`: SO_PEERCRED still says who is at the other end."""
    with a_node(server, None) as node:
        for path in (node.config.run_dir, *node.config.run_dir.rglob("*")):
            path.chmod(0o777)
        said = run_as(BOB, SAY_HELLO, str(node.config.run_dir))
        assert "this node is its own user's alone" in said


@needs_root
def test_a_run_directory_is_shared_with_one_group(server: RedisServer) -> None:
    with a_node(server, READERS) as node:
        config = NodeConfig(
            run_dir=node.config.run_dir, name="other", size_bytes=MIB, group=READERS + 1
        )
        with pytest.raises(UsageError, match="group="):
            Node(config, node.index).start()


def test_a_group_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="no such group"):
        group_id("no-such-group")


def test_another_users_directory_must_be_named_and_open_to_our_group(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    assert checked_run_dir(shared) == shared
    shared.chmod(0o710)
    assert checked_run_dir(shared) == shared
    for wrong in (0o750, 0o770, 0o711, 0o730):
        shared.chmod(wrong)
        with pytest.raises(UsageError, match="mode"):
            checked_run_dir(shared)
