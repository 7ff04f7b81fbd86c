"""Whatever a node answers, a client's call returns or raises one of our errors, in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_parts import remote_nodes
from seeds import fuzz

from kvstore import KVStoreError, Namespace
from kvstore.client.base import MissQuery, Reservation
from kvstore.client.explanation import Missing
from kvstore.client.missing.explain import Explainer
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.readability import Readability
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.nodes.saving.writer import Writer
from kvstore.index.memory import MemoryIndex
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_requests import Wants
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.spi import NodeUnavailableError
from kvstore.system.filelock import try_lock

KEYS = [bytes([i]) * 32 for i in range(2)]
NAMESPACE = Namespace.named("n")
TIMEOUT_S = 5.0
SEGMENT_BYTES = 2 * 65536


class BrokenNode:
    """Greets as a node does, then answers with `body`, or says `raw` instead."""

    def __init__(self, run_dir: Path) -> None:
        self.body: object = None
        self.raw: bytes | None = None
        self.good: object = True
        self.directory = NodeDir(run_dir, "node")
        self.directory.leases.mkdir(parents=True)
        assert try_lock(self.directory.lock) is not None
        self.segment = OwnedShm(run_dir / "s", Superblock(7, 3, 0, SEGMENT_BYTES))
        self.announcement = Announcement(
            node_id=7, epoch=3, name="node", host="here", pid=1, key_prefix="kv:a",
            data_path=str(self.segment.data_path), head_path=str(self.segment.head_path),
            control_path=str(self.directory.socket), size_bytes=SEGMENT_BYTES, inline_bytes=64,
        )  # fmt: skip
        self.directory.announcement_path.write_bytes(self.announcement.pack())
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory.socket))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        unpacker = msgpack.Unpacker()
        with connection:
            connection.settimeout(30)
            try:
                while data := connection.recv(65536):
                    unpacker.feed(data)
                    for op, request, *_ in unpacker:
                        if op == Op.HELLO:
                            connection.sendall(control.packed([request, True, [7, 3]]))
                        elif request and self.raw is not None:
                            connection.sendall(self.raw)
                            return
                        elif request:
                            connection.sendall(control.packed([request, self.good, self.body]))
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()
        self.segment.close()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenNode]:
    node = BrokenNode(tmp_path_factory.mktemp("broken"))
    yield node
    node.close()


numbers = st.one_of(st.integers(-2, 70_000), st.integers(-(1 << 63), (1 << 64) - 1))
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=5), st.binary(max_size=50)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)
bodies = st.one_of(
    plain,
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=2),  # grants
    st.lists(numbers, min_size=1, max_size=2),
    st.lists(st.binary(min_size=40, max_size=64), min_size=1, max_size=2),  # records
    st.tuples(
        st.lists(st.tuples(st.integers(-1, 10), st.floats()), min_size=1, max_size=1),
        st.one_of(st.none(), st.floats(), plain),
        st.lists(st.tuples(numbers, numbers, st.binary(max_size=20)), max_size=2),
    ),
    st.tuples(st.tuples(st.tuples(plain, plain)), plain, plain),
)
raws = st.one_of(
    st.none(), st.none(), st.none(), st.binary(max_size=60), st.just(b"\x91" * 5000),
    plain.map(lambda message: control.packed(message)),  # type: ignore[arg-type]
)  # fmt: skip


def calls(writer: Writer, explainer: Explainer) -> dict[str, Callable[[], object]]:
    wants = Wants(KEYS, 100)
    link = writer.link()
    announcement = link.announcement
    mine = [
        Reservation(
            KEYS[0],
            memoryview(bytearray(1)),
            link,
            announcement.node_id,
            announcement.epoch,
            1,
            1,
        )
    ]
    question = MissQuery(0, KEYS[0], NAMESPACE, lambda _: KEYS[1])
    return {
        "reserve": lambda: link.reserve_later(wants, NAMESPACE.id, Grants())(),
        "commit": lambda: link.commit_later(mine)(),
        "abort": lambda: link.abort(mine),
        "pin": lambda: writer.pin(KEYS[0], Grants()),
        "pin_many": lambda: writer.pin_many(KEYS, Grants()),
        "unpin": lambda: writer.unpin_many([(KEYS[0], bytes(44))]),
        "drop": lambda: writer.drop(KEYS),
        "clear": lambda: writer.clear(1),
        "stats": writer.stats,
        "listing": lambda: writer.listing(b"", 10),
        "why": lambda: explainer.why(question),
    }


NAMES = ("reserve", "commit", "abort", "pin", "pin_many", "unpin", "drop", "clear", "stats")
NAMES += ("listing", "why", "why", "why")


@fuzz(250)
@given(name=st.sampled_from(NAMES), body=bodies, raw=raws, good=st.one_of(st.just(True), plain))
def test_any_answer_is_a_value_or_one_of_our_errors(
    broken: BrokenNode, name: str, body: object, raw: bytes | None, good: object
) -> None:
    broken.body, broken.raw, broken.good = body, raw, good
    index = MemoryIndex()
    index.announce(7, broken.announcement.pack(), 60)
    run_dir = broken.directory.path.parent.parent
    nodes = NodeDirectory(run_dir, index, "kv:a")
    writer = Writer(nodes, name=None, timeout_s=TIMEOUT_S, checksums=False)
    remote = remote_nodes(index, TIMEOUT_S, (), run_dir, "kv:a")
    explainer = Explainer(index, Readability(remote.directory, remote, verifies=False), TIMEOUT_S)
    try:
        made = calls(writer, explainer)
        assert set(made) == set(NAMES)
        answer = made[name]()
    except KVStoreError:
        assert name != "why"
        return
    finally:
        writer.close()
        explainer.close()
        nodes.close()
    if name == "why":
        assert isinstance(answer, Missing)
        str(answer)
    elif name == "reserve":
        assert isinstance(answer, list)
        for reservation in answer:
            if isinstance(reservation, Reservation):
                assert len(reservation.buffer) == 100


@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize(("short", "granted"), [(0, True), (1, False), (1 << 40, False)])
def test_a_slot_that_reaches_out_of_the_segment_is_no_slot(
    broken: BrokenNode, short: int, granted: bool, populated: bool
) -> None:
    """By `short` bytes."""
    offset = SEGMENT_BYTES - 100 + short
    broken.body, broken.raw, broken.good = [[1, 1, offset]], None, True
    index = MemoryIndex()
    index.announce(7, broken.announcement.pack(), 60)
    nodes = NodeDirectory(broken.directory.path.parent.parent, index, "kv:a")
    writer = Writer(nodes, name=None, timeout_s=TIMEOUT_S, checksums=False)
    wants = Wants(KEYS[:1], 100)
    link = writer.link()
    shm = link.memory.shm
    assert isinstance(shm, AttachedShm)
    shm.is_populated = populated
    try:
        if granted:
            (reservation,) = link.reserve_later(wants, NAMESPACE.id, Grants())()
            assert isinstance(reservation, Reservation)
            assert len(reservation.buffer) == 100
        else:
            with pytest.raises(NodeUnavailableError):
                link.reserve_later(wants, NAMESPACE.id, Grants())()
    finally:
        broken.body = True
        writer.close()
        nodes.close()
