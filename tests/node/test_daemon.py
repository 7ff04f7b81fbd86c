"""The daemon: sockets, sessions, heartbeat, refill. `Node` runs in a thread of this process."""

import dataclasses
import errno
import socket
import threading
import time

import msgpack
import pytest
from open_files import open_files
from redis_servers import wait_until
from stores import announcement

from kvstore.client.nodes.lease import Lease
from kvstore.errors import DeadlineError, IndexUnavailableError, UsageError
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.node import Node, NodeConfig, daemon
from kvstore.node.publishing.heartbeat import Heartbeat
from kvstore.node.vram import VramNode
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.testing.cuda import ModelCuda

KEYS = Namespace.named("test").block_keys(range(64), 1)
MIB = 1 << 20


class Index(MemoryIndex):
    """The model, with a switch."""

    unavailable = False

    def publish(self, records):
        if self.unavailable:
            raise IndexUnavailableError("switched off")
        return super().publish(records)

    def incarnation(self):
        if self.unavailable:
            raise IndexUnavailableError("switched off")
        return super().incarnation()


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def node(tmp_path, index):
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index) as node:
        yield node


class Talker:
    """A client that says exactly what the test wants it to say."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lease = Lease(node.dir.leases)
        self.last_request = 100
        """Tests may number requests up to here by hand, on the first connection."""
        self.connect(request=1)

    def number(self):
        self.last_request += 1
        return self.last_request

    def connect(self, held=(), request=None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(str(self.node.dir.socket))
        self.unpacker = msgpack.Unpacker()
        request = request or self.number()
        self.last_request = max(self.last_request, request)
        hello = [Op.HELLO, request, control.PROTOCOL_VERSION, self.lease.client_id, list(held), []]
        self.hello = self.ask(*hello)

    def ask(self, *message):
        self.socket.sendall(msgpack.packb(list(message)))
        return self.answer()

    def answer(self):
        while True:
            for answer in self.unpacker:
                return answer
            data = self.socket.recv(65536)
            if not data:
                return None
            self.unpacker.feed(data)

    def put(self, key, value=b"v"):
        return self.ask(Op.RESERVE, self.number(), 0, key, len(value), 0, 0, [value], 0)

    def reserve(self, keys, size=1000):
        return self.ask(Op.RESERVE, self.number(), 0, b"".join(keys), size, 0, 0, None, 0)

    def stat(self):
        return self.ask(Op.STAT, self.number())[2]


@pytest.fixture
def talker(node):
    talker = Talker(node)
    yield talker
    talker.socket.close()
    talker.lease.release()


def test_hello_says_which_start_of_which_node_answers(node, talker):
    word = node.announcement
    assert talker.hello == [1, True, [word.node_id, word.epoch]]


def test_a_put_that_says_stored_is_in_the_index(talker, index):
    assert talker.put(KEYS[0]) == [talker.last_request, True, [0]]
    assert index.lookup([KEYS[0]]) != [None]


def test_the_node_announces_itself_and_takes_it_back_at_the_end(tmp_path, index):
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=MIB), index) as node:
        wait_until(index.nodes, "the announcement")
        ((node_id, raw),) = index.nodes().items()
        word = Announcement.unpack(raw)
        assert word.free_bytes > 0
        assert dataclasses.replace(word, free_bytes=0, counts={}) == node.announcement
        assert node_id == node.announcement.node_id
    assert index.nodes() == {}


def test_at_the_end_its_records_are_taken_out_of_the_index(tmp_path, index):
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=MIB), index) as node:
        talker = Talker(node)
        for key in KEYS:
            talker.put(key)
        assert len(index) == len(KEYS)
    assert len(index) == 0
    assert not list((tmp_path / "nodes").iterdir())


def test_an_emptied_index_is_refilled_within_seconds(talker, index):
    for key in KEYS:
        talker.put(key)
    wait_until(index.nodes, "the first heartbeat")
    index.lose_everything()
    wait_until(lambda: len(index) == len(KEYS), "the refill", 5)


def test_an_index_that_is_away_delays_no_put_and_learns_of_it_later(talker, index):
    index.unavailable = True
    started = time.monotonic()
    assert talker.put(KEYS[0]) == [talker.last_request, True, [0]]
    assert time.monotonic() - started < 1
    assert len(index) == 0
    index.unavailable = False
    wait_until(lambda: len(index) == 1, "the publication", 5)


@pytest.mark.parametrize("name", ["announce", "publish", "incarnation"])
def test_an_error_that_nobody_foresaw_ends_nothing(tmp_path, index, monkeypatch, name):
    def broken(*_):
        monkeypatch.undo()
        raise KeyError(name)

    monkeypatch.setattr(index, name, broken)
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), GuardedIndex(index)) as node:
        assert Talker(node).put(KEYS[0])[2] == [0]
        wait_until(lambda: index.match([KEYS[0]]), "it is published")
        wait_until(lambda: index.node(node.core.node_id), "it is announced")


def test_an_index_that_lost_keys_before_it_was_first_reached_is_refilled(index):
    """It may have taken publications between a heartbeat that failed and the next."""
    word = announcement()
    told = []
    heartbeat = Heartbeat(index, word, lambda: told.append("lost"), lambda: 0)
    index.unavailable = True
    heartbeat.beat()
    index.unavailable = False
    heartbeat.beat()
    assert told == ["lost"]
    heartbeat.beat()
    assert told == ["lost"]


@pytest.mark.parametrize(
    "message",
    [
        [99, 5],
        [Op.RESERVE, 5],
        [Op.RESERVE, 5, 0, b"short", 1, 0, 0, None, 0],
        [Op.COMMIT, 5, "items"],
    ],
)
def test_a_wrong_request_is_refused_with_its_reason_and_the_connection_goes_on(talker, message):
    number, good, reason = talker.ask(*message)
    assert (number, good) == (5, False)
    assert "=" in reason
    assert talker.put(KEYS[0])[1]


def test_bytes_that_are_no_messages_end_the_connection_and_nothing_else(node, talker):
    broken = Talker(node)
    broken.socket.sendall(b"\xc1" * 100)
    assert broken.answer() is None
    assert talker.put(KEYS[0])[1]


def test_a_first_message_that_is_no_hello_ends_the_connection(node):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(node.dir.socket))
        stranger.sendall(msgpack.packb([Op.STAT, 1]))
        assert b"HELLO" in stranger.recv(1000)
        assert stranger.recv(1000) == b""


def test_a_client_whose_lease_is_not_locked_is_refused(node):
    (node.dir.leases / ("a" * 32)).touch()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(node.dir.socket))
        stranger.sendall(msgpack.packb([Op.HELLO, 1, control.PROTOCOL_VERSION, "a" * 32, [], []]))
        assert b"lease" in stranger.recv(1000)


def test_a_lost_connection_leaves_reservations_and_their_end_is_the_end_of_the_process(
    node, talker
):
    other = Talker(node)
    other.reserve(KEYS[:2])
    other.socket.close()
    time.sleep(0.4)
    assert talker.stat()["reserved"] == 2
    other.lease.release()  # what the end of its process does
    wait_until(lambda: talker.stat()["reserved"] == 0, "the reservations end", 5)


def test_a_client_that_is_back_keeps_what_it_says_it_holds(node, talker):
    other = Talker(node)
    grants = other.reserve(KEYS[:2])[2]
    other.socket.close()
    other.connect(held=[grants[0][:2]])
    assert talker.stat()["reserved"] == 1
    slot, generation, _ = grants[0]
    assert other.ask(Op.COMMIT, 500, [[slot, generation, 0]]) == [500, True, [0]]


def test_a_request_that_comes_twice_is_carried_out_once(talker):
    """Seed 83 of the simulation: the second slot was nobody's."""
    reserve = [Op.RESERVE, 7, 0, KEYS[0], 1000, 0, 0, None, 0]
    slot, generation, _ = talker.ask(*reserve)[2][0]
    talker.ask(Op.ABORT, 8, [[slot, generation]])
    talker.socket.sendall(msgpack.packb(reserve))
    assert talker.stat()["reserved"] == 0


def test_a_hello_that_was_overtaken_by_a_later_one_changes_nothing(node, talker):
    """What it says is held is out of date: the slots would be freed while they are written."""
    other = Talker(node)
    other.socket.close()
    other.connect(request=200)
    assert other.reserve(KEYS[:1])[1]
    other.connect(request=150)
    assert other.hello[1] is False
    assert talker.stat()["reserved"] == 1


def test_words_of_an_older_connection_are_not_listened_to(node, talker):
    other = Talker(node)
    old = other.socket
    other.connect()
    old.sendall(msgpack.packb([Op.RESERVE, 9, 0, KEYS[0], 1000, 0, 0, None, 0]))
    assert old.recv(1000) == b""
    assert talker.stat()["reserved"] == 0


def test_goodbye_gives_everything_back(node, talker):
    other = Talker(node)
    other.reserve(KEYS[:2])
    other.socket.sendall(msgpack.packb([Op.BYE, 0]))
    wait_until(lambda: talker.stat()["reserved"] == 0, "the slots are free")


def test_one_client_too_many_is_refused_with_the_limit(tmp_path, index):
    limits = Limits(clients=2)
    config = NodeConfig(run_dir=tmp_path, size_bytes=MIB, limits=limits)
    with Node(config, index) as node:
        first, second = Talker(node), Talker(node)
        third = Talker(node)
        assert third.hello[1] is False
        assert "at most 2" in third.hello[2]
        assert first.put(KEYS[0])[1]
        assert second.put(KEYS[1])[1]


def test_requests_of_many_clients_are_published_together(node, index, monkeypatch):
    calls = []
    real = index.publish
    monkeypatch.setattr(
        index, "publish", lambda records: (calls.append(len(records)), real(records))[1]
    )
    talkers = [Talker(node) for _ in range(20)]
    for i, talker in enumerate(talkers):
        message = [Op.RESERVE, 2, 0, KEYS[i], 1, 0, 0, [b"v"], 0]
        talker.socket.sendall(msgpack.packb(message))
    assert all(talker.answer() == [2, True, [0]] for talker in talkers)
    assert sum(calls) == 20
    assert max(calls) > 1


def test_epochs_grow_with_every_start(tmp_path, index):
    epochs = []
    for _ in range(3):
        with Node(NodeConfig(run_dir=tmp_path, size_bytes=MIB), index) as node:
            epochs.append(node.announcement.epoch)
    assert epochs[0] < epochs[1] < epochs[2]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"policy": "belady"}, "policy"),
        ({"size_bytes": 100}, "size_bytes"),
        ({"size_bytes": 1 << 60}, "size_bytes"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_leaves_nothing(tmp_path, index, options, field):
    with pytest.raises(UsageError, match=rf"^{field}="):
        Node(NodeConfig(run_dir=tmp_path, **{"size_bytes": MIB, **options}), index).start()
    assert not NodeDir(tmp_path, "node").path.exists()


def test_records_that_the_index_lost_without_a_word_are_published_again(talker, index):
    for key in KEYS:
        talker.put(key)
    lost = [*KEYS[:20], *KEYS[40:]]
    index.remove(list(map(KeyRecord, lost, index.lookup(lost))))
    assert len(index) == 20
    wait_until(lambda: len(index) == len(KEYS), "the repair", 10)
    assert talker.stat()["repaired"] == len(lost)


def test_an_emptied_index_is_noticed_before_the_next_heartbeat(tmp_path, index, monkeypatch):
    monkeypatch.setattr("kvstore.node.publishing.heartbeat.HEARTBEAT_S", 3600.0)
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=MIB), index) as node:
        talker = Talker(node)
        for key in KEYS:
            talker.put(key)
        index.lose_everything()
        wait_until(lambda: len(index) == len(KEYS), "the refill", 10)
        wait_until(index.nodes, "the announcement", 10)


def test_a_block_dropped_while_the_index_is_away_does_not_end_the_looks_for_lost_ones(
    node, talker, index
):
    talker.put(KEYS[0])
    index.unavailable = True
    talker.put(KEYS[1])
    talker.ask(Op.DROP, talker.number(), KEYS[1])
    wait_until(lambda: not node.publisher._flush_due, "nothing is left to publish", 10)
    index.unavailable = False
    index.remove([KeyRecord(KEYS[0], *index.lookup(KEYS[:1]))])
    wait_until(lambda: index.lookup(KEYS[:1]) != [None], "the repair", 10)


def test_while_an_emptied_index_is_refilled_requests_are_answered(node, index, talker, monkeypatch):
    """A refill goes batch by batch; what is asked in between, puts too, does not wait."""
    monkeypatch.setattr("kvstore.node.publishing.publisher.PUBLISH_BATCH", 1)
    for key in KEYS[:-1]:
        talker.put(key)
    wait_until(index.nodes, "the first heartbeat")
    left = []
    real = index.publish

    def slow(records):
        time.sleep(0.02)
        left.append(node.core.blocks.outbox.publications_pending)
        return real(records)

    monkeypatch.setattr(index, "publish", slow)
    index.lose_everything()
    wait_until(lambda: left, "the refill begins", 5)
    assert talker.put(KEYS[-1]) == [talker.last_request, True, [0]]
    assert talker.stat()["unpublished"] > 0
    assert index.lookup([KEYS[-1]]) != [None]
    wait_until(lambda: len(index) == len(KEYS), "the refill", 10)


def test_a_node_that_takes_too_long_to_start_ends_by_itself(tmp_path, index, monkeypatch):
    """Nobody has it who could stop it, and its name is taken as long as it lives."""
    config = NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB)
    create, begun, go_on = Node._create, threading.Event(), threading.Event()

    def slow(node):
        begun.set()
        assert go_on.wait(10)
        create(node)

    monkeypatch.setattr(daemon, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(daemon, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Node, "_create", slow)
    late = Node(config, index)
    with pytest.raises(DeadlineError, match="did not start"):
        late.start()
    assert begun.is_set()
    go_on.set()
    thread = late._thread
    thread.join(10)
    assert not thread.is_alive()
    assert not late.dir.path.exists()
    monkeypatch.undo()
    Node(config, index).start().stop()


def test_a_node_that_cannot_share_its_memory_keeps_none_of_it(tmp_path, index, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "not this user's")

    monkeypatch.setattr(Node, "_share_files", refused)
    before = open_files()
    node = Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index)
    with pytest.raises(UsageError, match="cannot be used"):
        node.start()
    assert open_files() == before, "else whoever looks for memory of the dead takes it for alive"
    assert not node.dir.path.exists()


@pytest.mark.parametrize(
    ("file", "named"), [("/dev/shm/kvstore-1.head", "shm_dir='/dev/shm'"), (None, "run_dir=")]
)
def test_the_directory_that_may_not_be_written_is_named(tmp_path, index, monkeypatch, file, named):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied", file)

    monkeypatch.setattr(Node, "_share_files", refused)
    with pytest.raises(UsageError, match=f"^{named}.*: cannot be used"):
        Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index).start()


def test_a_node_in_vram_that_cannot_hand_it_over_keeps_no_files(tmp_path, index, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "not this user's")

    monkeypatch.setattr(VramNode, "_listen", refused)
    before = open_files()
    device = ModelCuda(tmp_path)
    node = VramNode(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index, device)
    with pytest.raises(UsageError, match="cannot be used"):
        node.start()
    node.free()
    assert open_files() == before
