"""What a node does for clients on other hosts, one request at a time, whatever they or the node's
other clients do meanwhile."""

import os
import time
from typing import Any

import pytest
from contract.transport import MIB, SECURITY, Place, far, fresh_key, reads

from kvstore.errors import NodeUnavailableError
from kvstore.limits import STREAM_BATCH_BYTES_MAX
from kvstore.node.stream.service import CHECKSUM_WRONG, SNAPSHOT_BYTES
from kvstore.protocol import stream as sw
from kvstore.protocol import stream_reply as sr
from kvstore.protocol.stream import SaveOffer, pack_put, pack_read
from kvstore.protocol.stream_reply import ReadReply
from kvstore.protocol.stream_seal import PLAIN, PLAIN_SEALS
from kvstore.segment.locate import locate
from kvstore.transport.base import Read
from kvstore.transport.stream import requests
from kvstore.transport.stream.requests import SavePayload
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import EXISTS, STORED, Kind


def service_of(place: Any) -> Any:
    return place.node._stream._service


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path, lambda place: StreamTransport(SECURITY))
    yield place
    place.close()


class Meddling:
    """A channel that asks for one block, and has something done when part of it has been sent."""

    seals = PLAIN_SEALS

    def __init__(self, block, meddle):
        self._request = pack_read([block], 10.0)[1]
        self._meddle = meddle
        self.sent = b""

    def receive_rest(self, kind, size_bytes, deadline):
        return self._request

    def send(self, buffers, deadline):
        self.sent += b"".join(buffers)
        if self._meddle is not None:
            self._meddle()
            self._meddle = None


def answered(place, block, meddle):
    """What the reader is told of the block in the end."""
    channel = Meddling(block, meddle)
    service = service_of(place)
    service.answer(channel, (sw.Frame.READ, 0), "there")
    reply = ReadReply([block[1].length])
    reply.heads(channel.sent[: sr.heads_bytes(1)], PLAIN)
    reply.tails(channel.sent[-sr.tails_bytes(1) :], PLAIN)
    (told,) = reply.replies
    return told


def test_a_block_that_goes_while_it_is_sent_is_called_off(place):
    block = place.save(os.urandom(2 * MIB))
    assert answered(place, block, None).good
    assert not answered(place, block, lambda: place.writer.drop([block[0]])).good


def test_a_small_block_is_called_off_too_when_it_goes_while_it_is_copied(place, monkeypatch):
    block = place.save(os.urandom(SNAPSHOT_BYTES))
    shm = service_of(place)._segment
    real, looks = shm.header, []

    def header(slot_id):
        looks.append(slot_id)
        image = real(slot_id)
        return image if len(looks) == 1 else bytes([image[0] ^ 1]) + image[1:]

    monkeypatch.setattr(type(shm), "header", lambda self, slot_id: header(slot_id))
    told = answered(place, block, None)
    monkeypatch.undo()
    assert len(looks) >= 2
    assert not told.good


def test_what_was_remembered_of_a_slots_former_block_is_not_said_of_the_next(place):
    """A block without a checksum of its writer's has the one of when it was first served."""
    key, first = place.save(os.urandom(MIB))
    assert reads(place.read((key, first))[0]) == [Read.HIT]
    place.writer.drop([key])
    payload = os.urandom(MIB)
    _, second = place.save(payload, key=key)
    assert second.slot == first.slot
    assert second.generation != first.generation
    outcomes, got = place.read((key, second))
    assert (reads(outcomes), got) == ([Read.HIT], [payload])


def put(place, values, wrong=()):
    """(keys, what became of them) of one save, some of it with the checksum of other bytes."""
    transport = StreamTransport(SECURITY)
    payloads = [SavePayload(fresh_key(), (memoryview(v),), Kind.BLOCK, 0) for v in values]
    lies = iter([i in wrong for i in range(len(values))])

    class Lying(requests.Digests):
        def value(self):
            return super().value() ^ next(lies)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests, "Digests", Lying)
        answers = requests.put(transport, place.word, payloads, (7, b""), far())
    transport.close()
    return [payload.key for payload in payloads], answers


@pytest.mark.parametrize("wrong", [(0,), (1,), (3,), (0, 3), (0, 1, 2, 3), ()])
def test_exactly_what_arrived_with_its_checksum_is_sealed_and_the_rest_is_named(place, wrong):
    values = [os.urandom(100_000) for _ in range(4)]
    keys, answers = put(place, values, wrong)
    assert answers == [CHECKSUM_WRONG if i in wrong else STORED for i in range(4)]
    records = place.index.lookup(keys)
    assert [record is None for record in records] == [i in wrong for i in range(4)]
    right = [i for i in range(4) if i not in wrong]
    outcomes, got = place.read(*[(keys[i], place.location(keys[i])) for i in right])
    assert reads(outcomes) == [Read.HIT] * len(right)
    assert got == [values[i] for i in right]
    assert place.writer.stats()["reserved"] == 0


def test_what_is_there_already_is_not_taken_and_the_answers_stay_in_order(place):
    transport = StreamTransport(SECURITY)
    there, _ = place.save(b"1" * 1000)
    keys = [fresh_key(), there, fresh_key()]
    payloads = [SavePayload(key, (memoryview(b"2" * 1000),), Kind.BLOCK, 0) for key in keys]
    answers = requests.put(transport, place.word, payloads, (7, b""), far())
    transport.close()
    assert answers == [STORED, EXISTS, STORED]
    _, got = place.read((there, place.location(there)))
    assert got == [b"1" * 1000]


def test_a_save_that_breaks_off_leaves_its_slots_free(place):
    transport = StreamTransport(SECURITY)
    channel = transport.pool(place.word).take(far())
    offers = [SaveOffer(fresh_key(), MIB, 0, 0, 1) for _ in range(3)]
    channel.send_frame(pack_put(offers, 7, b"", 10.0), far())
    channel.receive_rest(*channel.receive_head(far()), far())
    assert place.writer.stats()["reserved"] == 3
    channel.close()
    give_up_at = far()
    while place.writer.stats()["reserved"] and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert place.writer.stats()["reserved"] == 0
    transport.close()


HALF = STREAM_BATCH_BYTES_MAX // 2 + 1


@pytest.mark.parametrize("what", ["read", "put"])
def test_a_request_for_more_bytes_than_its_limit_ends_the_connection(place, what):
    key, location = place.save(b"1" * 1000)
    asked = [(key, location._replace(length=HALF))] * 2
    offers = [SaveOffer(fresh_key(), HALF, 0, 0, 1) for _ in range(2)]
    message = pack_read(asked, 5.0) if what == "read" else pack_put(offers, 7, b"", 5.0)
    transport = StreamTransport(SECURITY)
    channel = transport.pool(place.word).take(far())
    channel.send_frame(message, far())
    with pytest.raises(NodeUnavailableError):
        channel.receive_bytes(1, far())
    transport.close()


def test_the_checksum_of_a_torn_copy_is_not_remembered_as_the_blocks(place, monkeypatch):
    """The block changes while it is copied: what was summed up then is the checksum of no block."""
    payload = os.urandom(SNAPSHOT_BYTES)
    key, location = place.save(payload)
    shm = service_of(place)._segment
    spot = locate(shm, key, location)
    (memory,) = shm.payloads([(spot.offset, 1)])
    real, looks = shm.header, []

    def header(slot_id):
        looks.append(slot_id)
        return real(slot_id) if len(looks) == 1 else bytes(len(spot.image))

    with monkeypatch.context() as patch:
        patch.setattr(type(shm), "header", lambda self, slot_id: header(slot_id))
        memory[0] ^= 1
        assert not answered(place, (key, location), None).good
        memory[0] ^= 1
    outcomes, got = place.read((key, location))
    assert (reads(outcomes), got) == ([Read.HIT], [payload])
