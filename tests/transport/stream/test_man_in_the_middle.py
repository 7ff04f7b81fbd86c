"""Somebody between a client and a node, without the secret: he relays the handshake and then
changes what he likes, checksums included. He gets misses, failures and hung-up connections, and
nobody gets wrong bytes."""

import contextlib
import dataclasses
import os
import socket
import struct
import threading
import time
from contextlib import closing

import pytest
import xxhash
from contract.transport import SECURITY, Place, far, fresh_key, reads, room
from each_input import each

from kvstore.errors import PeerError
from kvstore.protocol import stream as sw
from kvstore.protocol import stream_handshake as sh
from kvstore.protocol import stream_reply as sr
from kvstore.protocol import stream_seal as ss
from kvstore.protocol.control import Op
from kvstore.protocol.stream_seal import PLAIN, TAG_BYTES, Mac
from kvstore.transport.base import Read, Wanted
from kvstore.transport.stream import requests
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.requests import SavePayload
from kvstore.transport.stream.transport import NAME, StreamTransport
from kvstore.types import STORED, Kind

SIZE = 70_000
NAMESPACE = (7, b"")


class MiddleMan:
    """Relays handshakes, then leaves each connection to `act(front, behind)`: raw channels."""

    def __init__(self, node_at, act):
        self._node_at = node_at
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.relayed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                front, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(front,), daemon=True).start()

    def _serve(self, connection):
        front = Channel(connection)
        behind = Channel(socket.create_connection(self._node_at))
        with contextlib.suppress(PeerError):
            for source, target, size in (
                (front, behind, sh.CLIENT_HELLO_BYTES),
                (behind, front, sh.NODE_HELLO_BYTES),
                (front, behind, sh.PROOF_BYTES),
                (behind, front, sh.VERDICT_BYTES),
            ):
                pass_on(source, target, size)
            self.relayed += 1
            self._act(front, behind)
        front.close()
        behind.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def pass_on(source, target, size):
    raw = source.receive_bytes(size, far())
    target.send([raw], far())
    return raw


def take_frame(source):
    head = source.receive_bytes(sw.FRAME_HEAD_BYTES, far())
    return head + source.receive_bytes(sw.frame_head(head)[1], far())


def take_reply(source, *sizes):
    """The parts of an answer to READ: heads, payloads, tails."""
    sizes = (sr.heads_bytes(len(sizes)), *sizes, sr.tails_bytes(len(sizes)))
    return [source.receive_bytes(size, far()) for size in sizes]


def flipped(raw, at=100):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def as_without_a_key(raw):
    """With the tag that anybody can make."""
    return raw[:-TAG_BYTES] + PLAIN.tag(raw[:-TAG_BYTES])


def with_checksum_of(tails, payload):
    raw = bytearray(tails)
    struct.pack_into("<Q", raw, TAG_BYTES + 4, xxhash.xxh3_64_intdigest(payload))
    return bytes(raw)


@pytest.fixture(params=list(Mac), ids=lambda mac: mac.name.lower())
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(sh, "available", lambda: frozenset({request.param}))
    place = Place(tmp_path, lambda place: StreamTransport(SECURITY))
    yield place
    place.close()


@pytest.fixture
def between(place):
    """Starts a man in the middle; what the node announces for one who believes him."""
    men = []

    def start(act):
        host, port = place.word.transports[NAME].removeprefix("tcp://").split(":")
        men.append(MiddleMan((host, int(port)), act))
        return dataclasses.replace(place.word, transports={NAME: men[-1].address})

    yield start
    for man in men:
        assert man.relayed, "he was between them"
        man.close()


def read_through(word, *blocks):
    """Outcomes, and the bytes."""
    transport = StreamTransport(SECURITY)
    wanted = [Wanted(key, location, (room(location),)) for key, location in blocks]
    try:
        outcomes = transport.read(word, wanted, time.monotonic() + 2)
        return list(outcomes), [bytes(one.into[0]) for one in wanted]
    finally:
        transport.close()


def on_read(change, *sizes):
    """Answers every READ with what `change` makes of the node's answer."""

    def act(front, behind):
        while True:
            behind.send([take_frame(front)], far())
            front.send(change(*take_reply(behind, *sizes)), far())

    return act


def test_one_who_only_relays_is_not_noticed(place, between):
    payload = os.urandom(SIZE)
    word = between(on_read(lambda *parts: list(parts), SIZE))
    outcomes, got = read_through(word, place.save(payload))
    assert (reads(outcomes), got) == ([Read.HIT], [payload])


def rewritten(heads, payload, tails):
    """As it is described in the specification, with everything that anybody can compute."""
    payload = flipped(payload)
    return [heads, payload, as_without_a_key(with_checksum_of(tails, payload))]


def with_plain_tags(heads, payload, tails):
    payload = flipped(payload)
    tails = bytes(TAG_BYTES) + with_checksum_of(tails, payload)[TAG_BYTES:]
    return [heads, payload, as_without_a_key(tails)]


CHANGES = {
    "payload and checksum": rewritten,
    "payload, checksum and its tag": with_plain_tags,
    "payload": lambda heads, payload, tails: [heads, flipped(payload), tails],
    "payload and checksum under the old tags": lambda heads, payload, tails: [
        heads,
        flipped(payload),
        with_checksum_of(tails, flipped(payload)),
    ],
    "kind": lambda heads, payload, tails: [as_without_a_key(flipped(heads, 1)), payload, tails],
    "length of the description": lambda heads, payload, tails: [
        as_without_a_key(flipped(heads, 2)),
        payload,
        tails,
    ],
    "a tail in place of the heads": lambda heads, payload, tails: [tails, payload, heads],
    "a byte left out": lambda heads, payload, tails: [heads, payload[1:], b"\0", tails],
    "the end left out": lambda heads, payload, tails: [heads, payload],
    "nothing but the request": lambda heads, payload, tails: [b""],
}


@each("change", CHANGES.values(), ids=CHANGES)
def test_what_he_changes_on_the_way_to_the_reader_is_no_hit(place, between, change):
    (outcome,), _ = read_through(between(on_read(change, SIZE)), place.save(os.urandom(SIZE)))
    assert outcome.read is not Read.HIT


def test_an_answer_of_before_is_no_answer_now(place, between):
    first, second = (place.save(os.urandom(SIZE)) for _ in range(2))
    seen = []

    def replay(*parts):
        seen.append(parts)
        return list(seen[0])

    word = between(on_read(replay, SIZE))
    transport = StreamTransport(SECURITY)
    outcomes = []
    for key, location in (first, second):
        wanted = [Wanted(key, location, (room(location),))]
        outcomes += transport.read(word, wanted, time.monotonic() + 2)
    transport.close()
    assert len(seen) == 2, "on one connection"
    assert reads(outcomes) == [Read.HIT, Read.FAILED]


def test_an_answer_on_another_connection_is_no_answer_on_this_one(place, between):
    first, second = (place.save(os.urandom(SIZE)) for _ in range(2))
    seen = []

    def replay(*parts):
        seen.append(parts)
        return list(seen[0])

    word = between(on_read(replay, SIZE))
    outcomes = [read_through(word, block)[0][0] for block in (first, second)]
    assert len(seen) == 2
    assert reads(outcomes) == [Read.HIT, Read.FAILED]


def test_payloads_in_another_order_are_no_hits(place, between):
    blocks = [place.save(os.urandom(SIZE)) for _ in range(2)]
    word = between(on_read(lambda heads, a, b, tails: [heads, b, a, tails], SIZE, SIZE))
    outcomes, _ = read_through(word, *blocks)
    assert Read.HIT not in reads(outcomes)


def test_a_request_that_he_changes_ends_the_connection(place, between):
    """Another block of the same length in place of the one that was asked for."""
    wanted, other = (place.save(os.urandom(SIZE)) for _ in range(2))

    def act(front, behind):
        kind = sw.frame_head(take_frame(front)[: sw.FRAME_HEAD_BYTES])[0]
        message = sw.pack_read([other], 2.0)
        assert message[0] is kind
        behind.send([sw.frame(message, PLAIN)], far())
        front.send(take_reply(behind, SIZE), far())

    (outcome,), _ = read_through(between(act), wanted)
    assert outcome.read is Read.FAILED


def test_a_request_sent_back_is_no_answer(place, between):
    def act(front, behind):
        raw = take_frame(front)
        front.send([bytes([sw.Frame.ANSWERS]) + raw[1:]], far())

    with closing(StreamTransport(SECURITY)) as transport, pytest.raises(PeerError):
        requests.ask(transport, between(act), [Op.STAT, 0], time.monotonic() + 2)


def put_through(word, payload):
    """(key, what became of it)"""
    transport = StreamTransport(SECURITY)
    key = fresh_key()
    mine = SavePayload(key, (memoryview(payload),), Kind.BLOCK, 0)
    try:
        (answer,) = requests.put(transport, word, [mine], NAMESPACE, time.monotonic() + 2)
    except PeerError as e:
        return key, str(e)
    finally:
        transport.close()
    return key, answer


def stored(place, key):
    (record,) = place.index.lookup([key])
    return record is not None


def rewritten_offer(raw, payload):
    body = bytearray(raw[sw.FRAME_HEAD_BYTES : -TAG_BYTES])
    struct.pack_into("<Q", body, len(body) - 8, xxhash.xxh3_64_intdigest(payload))
    return sw.frame((sw.Frame.PUT, bytes(body)), PLAIN)


@each("offer_too", [True, False])
@each("tag", [bytes(TAG_BYTES), None], ids=["plain tag", "old tag"])
def test_what_he_changes_on_the_way_to_the_node_is_not_stored(place, between, offer_too, tag):
    payload = os.urandom(SIZE)

    def act(front, behind):
        offer = take_frame(front)
        behind.send(
            [rewritten_offer(offer, flipped(payload)) if offer_too else offer], time.monotonic() + 1
        )
        front.send([take_frame(behind)], far())
        sent = front.receive_bytes(SIZE, far())
        old = front.receive_bytes(TAG_BYTES, far())
        behind.send([flipped(sent), old if tag is None else tag], far())
        front.send([take_frame(behind)], far())

    key, answer = put_through(between(act), payload)
    assert answer != 0
    assert not stored(place, key)


def test_a_payload_with_the_checksum_of_the_right_one_is_not_stored_either(place, monkeypatch):
    """xxh3 has no key: who chooses the bytes can choose the checksum."""
    digest = xxhash.xxh3_64_intdigest(b"")
    monkeypatch.setattr(
        "kvstore.protocol.chunks.Digests.value", lambda self, number=0: digest, raising=True
    )
    payload = os.urandom(SIZE)

    def act(front, behind):
        behind.send([take_frame(front)], far())
        front.send([take_frame(behind)], far())
        behind.send([flipped(front.receive_bytes(SIZE, far()))], far())
        behind.send([front.receive_bytes(TAG_BYTES, far())], far())
        front.send([take_frame(behind)], far())

    host, port = place.word.transports[NAME].removeprefix("tcp://").split(":")
    man = MiddleMan((host, int(port)), act)
    word = dataclasses.replace(place.word, transports={NAME: man.address})
    key, answer = put_through(word, payload)
    man.close()
    assert "checksum" in str(answer)
    assert not stored(place, key)


def test_an_answer_that_he_makes_up_for_the_node_is_not_believed(place, between):
    payload = os.urandom(SIZE)

    def act(front, behind):
        take_frame(front)
        front.send([sw.frame(sw.pack_answers([0]), PLAIN)], far())

    _, answer = put_through(between(act), payload)
    assert answer != 0


def test_an_offer_of_before_is_not_taken_again(place, between):
    payload = os.urandom(SIZE)
    refused = []

    def act(front, behind):
        said = [take_frame(front)]
        behind.send(said[:1], far())
        front.send([take_frame(behind)], far())
        said.append(front.receive_bytes(SIZE + TAG_BYTES, far()))
        behind.send(said[1:], far())
        front.send([take_frame(behind)], far())
        behind.send(said, far())
        with contextlib.suppress(PeerError):
            behind.receive_bytes(1, far())
            refused.append(False)
            return
        refused.append(True)

    key, answer = put_through(between(act), payload)
    assert answer == STORED
    give_up_at = time.monotonic() + 10
    while not refused and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert refused == [True], "the node hangs up on what it has seen before"
    assert stored(place, key)


def test_without_seals_he_would_succeed(place, between, monkeypatch):
    """That these attacks are attacks: what protects is the seal, nothing else."""
    monkeypatch.setattr(sh, "keyed", lambda *_: ss.PLAIN_SEALS)
    payload = os.urandom(SIZE)
    word = between(on_read(with_plain_tags, SIZE))
    outcomes, got = read_through(word, place.save(payload))
    assert (reads(outcomes), got) == ([Read.HIT], [flipped(payload)])


def test_a_payload_with_the_checksum_of_the_right_one_is_no_hit_either(place, between, monkeypatch):
    """xxh3 has no key: who chooses the bytes can choose the checksum."""
    monkeypatch.setattr(
        "kvstore.protocol.chunks.Digests.value", lambda self, number=0: 12345, raising=True
    )
    block = place.save(os.urandom(SIZE))
    word = between(on_read(lambda heads, payload, tails: [heads, flipped(payload), tails], SIZE))
    outcomes, _ = read_through(word, block)
    assert reads(outcomes) == [Read.MISS]
    monkeypatch.undo()
