"""Saving to a real node in this process, over an index in memory."""

import threading
import time

import numpy as np
import pytest
from batch_readers import READERS, CopiesBy, reader_of
from reader_parts import readable

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving import savers
from kvstore.client.nodes.saving.host_writer import HostWriter
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.payloads.tensors import encode
from kvstore.client.reader import Reader
from kvstore.client.values import put_pipeline
from kvstore.errors import DeadlineError, NodeUnavailableError, UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node.config import NodeConfig
from kvstore.node.daemon import Node
from kvstore.protocol.control import Op
from kvstore.protocol.control_requests import Wants
from kvstore.segment import batch_read
from kvstore.types import NO_SPACE, Kind, PutStatus

MIB = 1 << 20
NODE_BYTES = 32 * MIB
NAMESPACE = 5


@pytest.fixture
def index():
    return MemoryIndex()


@pytest.fixture
def node(tmp_path, index):
    config = NodeConfig(run_dir=tmp_path, size_bytes=NODE_BYTES)
    with Node(config, index) as node:
        yield node


@pytest.fixture
def nodes(tmp_path, index, node):
    nodes = NodeDirectory(tmp_path, index, "kv:default")
    deadline = time.monotonic() + 5
    while nodes.writable(None) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    yield nodes
    nodes.close()


@pytest.fixture
def writer(nodes):
    writer = HostWriter(nodes, name=None, timeout_s=2.0, checksums=False, start_node=None)
    yield writer
    writer.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def want(number: int, size_bytes: int = 40_000) -> Wants:
    return Wants([key(number)], size_bytes, Kind.BYTES)


def save(writer, values):
    keys = [key(i) for i in range(len(values))]
    return put_pipeline.save(writer, NAMESPACE, keys, [encode(v) for v in values], checksums=False)


@pytest.mark.parametrize("name", READERS)
def test_a_batch_of_any_sizes_is_stored_whole_and_in_order(writer, nodes, index, monkeypatch, name):
    monkeypatch.setattr(batch_read, "READER", reader_of(name))
    sizes = [MIB, 1, 40_000, 0, 3 * MIB, 32 << 10, 5000, 2 * MIB, MIB] * 2
    values = [bytes([i]) * size for i, size in enumerate(sizes)]
    assert all(r.status is PutStatus.STORED for r in save(writer, values))
    places = Reader(index, readable(nodes)).search([key(i) for i in range(len(values))])
    assert [bytes(place.data) for place in places] == values


@pytest.mark.parametrize("name", READERS)
def test_a_batch_of_arrays_is_stored_with_their_descriptions(
    writer, nodes, index, monkeypatch, name
):
    monkeypatch.setattr(batch_read, "READER", reader_of(name))
    arrays = [np.full(12_345 + i, i, np.int32) for i in range(30)]
    assert all(save(writer, arrays))
    places = Reader(index, readable(nodes)).search([key(i) for i in range(len(arrays))])
    for place, array in zip(places, arrays, strict=True):
        data, meta, _ = encode(array)
        assert bytes(place.data) + bytes(place.meta) == bytes(data) + meta


def test_a_save_that_is_wanted_no_more_stops_between_two_copies(writer, monkeypatch):
    monkeypatch.setattr(put_pipeline, "COPY_BYTES", 2 * MIB)
    copied = []
    monkeypatch.setattr(batch_read, "READER", CopiesBy(lambda *_: copied.append(None)))
    values = [bytes([i]) * MIB for i in range(8)]
    with pytest.raises(put_pipeline.StoppedError):
        put_pipeline.unless(lambda: len(copied) > 1, lambda: save(writer, values))
    assert len(copied) == 2, "of one call"
    assert writer.stats()["reserved"] == 0


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ([np.ones(64 << 10, np.uint8)], [Op.RESERVE]),
        ([np.ones((64 << 10) + 1, np.uint8)], [Op.RESERVE, Op.COMMIT]),
        ([bytes(33 << 10), bytes(33 << 10)], [Op.RESERVE, Op.COMMIT]),
        ([bytes(32 << 10), bytes(32 << 10)], [Op.RESERVE]),
    ],
    ids=["64 KiB alone", "more alone", "33 KiB beside another", "32 KiB beside another"],
)
def test_a_value_saved_alone_travels_in_the_request_when_twice_as_large(
    writer, nodes, index, monkeypatch, values, asked
):
    link = writer.link()
    posted, post = [], link.control.post
    monkeypatch.setattr(
        link.control, "post", lambda op, *args, **more: posted.append(op) or post(op, *args, **more)
    )
    assert [r.status for r in save(writer, values)] == [PutStatus.STORED] * len(values)
    assert posted == asked
    places = Reader(index, readable(nodes)).search([key(i) for i in range(len(values))])
    assert [bytes(place.data[: len(v)]) for place, v in zip(places, values, strict=True)] == [
        bytes(v) for v in values
    ]


@pytest.mark.parametrize(("size_bytes", "reserved"), [(MIB, 3), (2 * MIB, 1)])
def test_a_large_batch_reserves_no_more_than_a_window_at_a_time(
    writer, monkeypatch, size_bytes, reserved
):
    """A part is asked for beside the one before where both fit, as soon as it may be."""
    monkeypatch.setattr(put_pipeline, "WINDOW_BYTES", 3 * MIB)
    monkeypatch.setattr(put_pipeline, "PART_BYTES_MIN", 1 * MIB)
    link, counts = writer.link(), [0]
    reserve_later, commit_later = link.reserve_later, link.commit_later

    def reserving(wants, *args):
        counts.append(counts[-1] + len(wants))
        return reserve_later(wants, *args)

    def committing(slots):
        counts.append(counts[-1] - len(slots))
        return commit_later(slots)

    monkeypatch.setattr(link, "reserve_later", reserving)
    monkeypatch.setattr(link, "commit_later", committing)
    assert all(save(writer, [bytes([i]) * size_bytes for i in range(6)]))
    assert (max(counts), counts[-1]) == (reserved, 0)


def test_one_value_that_cannot_be_stored_does_not_spoil_the_others(writer):
    results = save(writer, [b"a" * MIB, b"b" * (NODE_BYTES + 1), b"c" * MIB, b"d" * MIB])
    assert [r.status for r in results] == [
        PutStatus.STORED,
        PutStatus.REJECTED,
        PutStatus.STORED,
        PutStatus.STORED,
    ]


def test_nothing_stays_reserved_when_a_copy_fails_half_way(writer, monkeypatch):
    monkeypatch.setattr(put_pipeline, "PART_BYTES_MIN", 1 * MIB)
    copied = []

    def failing(destination, source):
        copied.append(source)
        if len(copied) == 3:
            raise KeyboardInterrupt
        destination[:] = source

    monkeypatch.setattr(batch_read, "READER", CopiesBy(failing))
    with pytest.raises(KeyboardInterrupt):
        save(writer, [bytes([i]) * MIB for i in range(8)])
    assert writer.stats()["reserved"] == 0


def test_a_node_that_goes_away_meanwhile_rejects_what_is_left(writer, node, monkeypatch):
    monkeypatch.setattr(put_pipeline, "PART_BYTES_MIN", 1 * MIB)
    stopped = []

    def stopping(destination, source):
        destination[:] = source
        if not stopped:
            stopped.append(node.stop())

    monkeypatch.setattr(batch_read, "READER", CopiesBy(stopping))
    results = save(writer, [bytes([i]) * MIB for i in range(8)])
    assert {r.status for r in results} == {PutStatus.REJECTED}


def test_slots_are_held_before_any_other_thread_can_reconnect(writer, monkeypatch):
    """Or the node would free them at that HELLO while their writer still writes (rule 5)."""
    connects_again_behind_an_answer(writer, monkeypatch)
    (reservation,) = writer.reserve(want(1), NAMESPACE)
    reservation.buffer[:] = bytes(40_000)
    assert savers.commit([reservation], 10.0, time.monotonic)[0].status is PutStatus.STORED


def test_pins_are_held_before_any_other_thread_can_reconnect(writer, monkeypatch):
    assert all(save(writer, [b"v"]))
    connects_again_behind_an_answer(writer, monkeypatch)
    pin = writer.pin(key(0), Grants())
    assert pin is not None
    assert writer.stats()["pinned"] == 1


def connects_again_behind_an_answer(writer, monkeypatch):
    """As another thread's request does, right when the next answer was read."""
    control = writer.link().control
    collect = control.collect

    def interrupted(ticket):
        answer = collect(ticket)
        monkeypatch.setattr(control, "collect", collect)
        control.doubt()
        control.request(Op.UNPIN, [])
        return answer

    monkeypatch.setattr(control, "collect", interrupted)


def test_what_could_not_be_said_on_a_busy_channel_is_said_by_the_next_connection(writer):
    """Found by the simulation: the slot was nobody's until the client's end."""
    granted = writer.reserve(want(1), NAMESPACE)

    def amid(body):
        with pytest.raises(DeadlineError, match="busy"):
            savers.commit(granted, 10.0, time.monotonic)

    writer.link().control.request(Op.STAT, accept=amid)
    assert writer.stats()["reserved"] == 0


def test_a_channel_that_another_thread_gave_up_is_a_peers_fault(writer):
    """Found by the simulation: a put raised that the client "must be open"."""
    channel = writer.link().control
    channel.close()
    with pytest.raises(NodeUnavailableError):
        channel.request(Op.STAT)


def test_answers_reach_whoever_asked_in_any_order(writer):
    control = writer.link().control
    tickets = [control.post(Op.LIST, b"", 1) for _ in range(20)]
    numbers = control.post(Op.STAT)
    assert control.collect(numbers)["blocks"] == 0
    assert [control.collect(t) for t in reversed(tickets)] == [[]] * 20


def test_a_refused_request_leaves_the_others_alone(writer):
    control = writer.link().control
    good, bad, good_too = (
        control.post(op, *args) for op, *args in [(Op.STAT,), (Op.LIST, b"", 1 << 20), (Op.STAT,)]
    )
    with pytest.raises(UsageError):
        control.collect(bad)
    assert control.collect(good)["blocks"] == control.collect(good_too)["blocks"] == 0


def test_what_was_on_its_way_fails_with_its_connection(writer):
    control = writer.link().control
    ticket = control.post(Op.STAT)
    control.restate()
    with pytest.raises(NodeUnavailableError):
        control.collect(ticket)
    assert control.request(Op.STAT)["blocks"] == 0


def test_an_answer_nobody_waited_for_leaves_nothing_reserved(writer):
    """Its grants are told to nobody, so the next connection says that they are not held."""
    writer.stats()  # the first answer of a node is waited for longer
    granted = Grants()
    later = writer.link().reserve_later(want(1), NAMESPACE, granted)
    control = writer.link().control
    done = threading.Event()

    def give_up():
        later.args[1].give_up_at = time.monotonic() + 0.05
        with pytest.raises(DeadlineError):
            later()
        done.set()

    with control._lock:
        threading.Thread(target=give_up).start()
        assert done.wait(5)
    assert writer.stats()["reserved"] == 0


def test_slots_granted_before_a_request_that_fails_are_given_back(writer, monkeypatch):
    """The next part of a window is asked for before what was granted is written."""
    one = writer.link()
    reserve_later = one.reserve_later
    asked = []

    def only_once(wants, namespace_id, granted):
        asked.append(wants)
        if len(asked) > 1:
            raise DeadlineError("late")
        return reserve_later(wants, namespace_id, granted)

    monkeypatch.setattr(one, "reserve_later", only_once)
    payloads = [encode(bytes(4 * MIB)) for _ in range(2)]
    results = put_pipeline.save(writer, NAMESPACE, [key(1), key(2)], payloads, checksums=False)
    assert [bool(result) for result in results] == [False, False]
    assert len(asked) == 2
    assert writer.stats()["reserved"] == 0
    assert not writer.link().held


def test_what_failed_is_told_though_the_node_takes_further_values(writer, monkeypatch):
    """It was slow once; what found no room before is asked for again."""
    one = writer.link()
    reserve_later = one.reserve_later
    asked = []

    def late():
        raise DeadlineError("it was late")

    def full_then_late(wants, namespace_id, granted):
        asked.append(len(wants))
        if len(asked) == 1:
            return lambda: [NO_SPACE] * len(wants)
        return late if len(asked) == 2 else reserve_later(wants, namespace_id, granted)

    monkeypatch.setattr(one, "reserve_later", full_then_late)
    results = save(writer, [bytes(4 * MIB) for _ in range(2)])
    assert asked == [1, 1, 1]
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.REJECTED]
    assert results[1].reason == "it was late"


def test_of_a_run_that_took_several_requests_the_end_is_evicted_before_the_head(node, writer):
    run = [key(i) for i in range(12)]
    payloads = [encode(bytes([i]) * MIB) for i in range(12)]
    assert all(put_pipeline.save(writer, NAMESPACE, run, payloads, checksums=False))
    for other in range(100, 140):
        payload = encode(bytes([other]) * MIB)
        assert all(put_pipeline.save(writer, NAMESPACE, [key(other)], [payload], checksums=False))
        left = [k for k in run if k in node.core.blocks.by_key]
        if len(left) < len(run):
            assert left == run[: len(left)]
            if len(left) <= 4:
                return
    raise AssertionError("nothing was evicted")
