"""A node that lies, hangs or dies, played by this process.

For the reader a failed block or a miss, by its deadline.
"""

import dataclasses
import os
import re
import socket
import threading
import time

import pytest
import xxhash
from contract.transport import SECURITY, Place, far, reads
from each_input import each

from kvstore.errors import PeerError
from kvstore.protocol import stream_handshake as sh
from kvstore.protocol import stream_reply as sr
from kvstore.protocol.stream_handshake import NodeHandshake
from kvstore.protocol.stream_reply import Head, Sent, Tail
from kvstore.transport.base import Read, Wanted
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import NAME, StreamTransport
from kvstore.types import Location

NODE_ID, EPOCH = 77, 5
DEADLINE_S = 0.5
PAYLOAD = bytes(range(256)) * 2000
LENGTH = len(PAYLOAD)
GOOD = xxhash.xxh3_64_intdigest(PAYLOAD)


class Liar:
    """A stream server that shakes hands like a node, then does what `answer` says."""

    def __init__(self, answer, *, secret=SECURITY.secret, node=(NODE_ID, EPOCH), hello=None):
        self._answer = answer
        self._secret = secret
        self._node = node
        self._hello = hello
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.open = []
        self.channels = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        channel = Channel(connection)
        self.channels.append(channel)
        try:
            if self._hello is not None:
                channel.send([self._hello], far())
                return
            shake = NodeHandshake(self._secret, os.urandom(32), self._node)
            hello = shake.answer(channel.receive_bytes(sh.CLIENT_HELLO_BYTES, far()))
            channel.send([hello], far())
            _, verdict = shake.judge(channel.receive_bytes(sh.PROOF_BYTES, far()))
            channel.send([bytes([sh.ACCEPTED]) + verdict[1:]], far())
            channel.seals = shake.seals()
            while True:
                channel.receive_rest(*channel.receive_head(far()), far())
                self._answer(channel)
        except PeerError:
            pass

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.open:
            connection.close()


@pytest.fixture(scope="module")
def word(tmp_path_factory):
    """An announcement of a real node, to change."""
    place = Place(tmp_path_factory.mktemp("run"), lambda place: StreamTransport(SECURITY))
    place.close()
    return dataclasses.replace(place.word, node_id=NODE_ID, epoch=EPOCH)


def read_from(word, answer, *, checksum=0, count=1, deadline_s=DEADLINE_S, **options):
    """Outcomes of reading `count` blocks from a liar, and how long it took."""
    liar = Liar(answer, **options)
    transport = StreamTransport(SECURITY)
    location = Location(NODE_ID, EPOCH, 0, 1, 1, 3, len(PAYLOAD), checksum)
    wanted = [
        Wanted(bytes([i]) * 32, location, (memoryview(bytearray(len(PAYLOAD))),))
        for i in range(count)
    ]
    node = dataclasses.replace(word, transports={NAME: liar.address})
    began = time.monotonic()
    try:
        outcomes = transport.read(node, wanted, began + deadline_s)
        return list(outcomes), time.monotonic() - began
    finally:
        transport.close()
        liar.close()


def heads(count=1, follows=Sent.GOOD):
    """What a liar says, once it knows the seal of its connection."""
    return lambda seal: sr.pack_heads([Head(follows)] * count, seal)


def tails(*verdicts, checksum=None):
    said = [Tail(v, GOOD if checksum is None else checksum) for v in verdicts]
    return lambda seal: sr.pack_tails(said, seal)


def cut(part, until):
    return lambda seal: part(seal)[:until]


def send(channel, *parts):
    """Parts that are bytes go by the seal as payload."""
    seal = channel.seals.sent
    for part in parts:
        if isinstance(part, bytes):
            seal.update(part)
        channel.send([part if isinstance(part, bytes) else part(seal)], far())


def say(*parts):
    return lambda channel: send(channel, *parts)


def hang_up_after(*parts):
    def answer(channel):
        send(channel, *parts)
        channel.break_off()

    return answer


BEGIN, END = heads(), tails(Sent.GOOD)
FLIPPED = PAYLOAD[:1000] + bytes([PAYLOAD[1000] ^ 1]) + PAYLOAD[1001:]


def test_a_peer_that_tells_the_truth_is_believed(word):
    outcomes, _ = read_from(word, say(BEGIN, PAYLOAD, END))
    assert reads(outcomes) == [Read.HIT]


def test_a_flipped_byte_is_a_miss_that_says_so(word):
    (outcome,), _ = read_from(word, say(BEGIN, FLIPPED, END))
    assert outcome.read is Read.MISS
    assert "checksum" in outcome.reason


def test_a_checksum_that_is_not_the_recorded_one_is_a_miss(word):
    lie = tails(Sent.GOOD, checksum=xxhash.xxh3_64_intdigest(FLIPPED))
    (outcome,), _ = read_from(word, say(BEGIN, FLIPPED, lie), checksum=GOOD)
    assert outcome.read is Read.MISS
    assert "checksum" in outcome.reason


def test_a_payload_that_turns_out_torn_is_a_miss_and_the_next_one_a_hit(word):
    answer = say(heads(2), FLIPPED, PAYLOAD, tails(Sent.MISS, Sent.GOOD))
    outcomes, _ = read_from(word, answer, count=2)
    assert reads(outcomes) == [Read.MISS, Read.HIT]


@each(
    "answer",
    [
        say(BEGIN, PAYLOAD + b"x", END),
        hang_up_after(BEGIN, PAYLOAD[:-1], END),
        say(heads(2), PAYLOAD, PAYLOAD, tails(Sent.GOOD, Sent.GOOD)),
        say(heads(0), PAYLOAD, END),
        say(heads(follows=9)),
        say(BEGIN, PAYLOAD, tails(0)),
        say(os.urandom(5000)),
        hang_up_after(),
        hang_up_after(BEGIN),
        hang_up_after(BEGIN, PAYLOAD[:1000]),
        hang_up_after(BEGIN, PAYLOAD),
        hang_up_after(BEGIN, PAYLOAD, cut(END, -1)),
    ],
    ids=range(12),
)
def test_what_breaks_the_rules_or_off_fails(word, answer):
    (outcome,), took_s = read_from(word, answer, deadline_s=20)
    assert outcome.read is Read.FAILED
    assert outcome.reason
    assert took_s < 15, "it ends at once, not at the deadline"


@each(
    "answer",
    [
        say(),
        say(cut(BEGIN, 10)),
        say(BEGIN),
        say(BEGIN, PAYLOAD[:1000]),
        say(BEGIN, PAYLOAD),
    ],
    ids=range(5),
)
def test_a_peer_that_falls_silent_costs_one_deadline(word, answer):
    (outcome,), took_s = read_from(word, answer)
    assert outcome.read is Read.FAILED
    assert DEADLINE_S * 0.9 <= took_s < 10


def test_a_peer_that_trickles_costs_one_deadline(word):
    def trickle(channel):
        send(channel, BEGIN)
        for byte in PAYLOAD:
            channel.send([bytes([byte])], far())
            time.sleep(0.01)

    (outcome,), took_s = read_from(word, trickle)
    assert outcome.read is Read.FAILED
    assert took_s < 10


def test_what_came_whole_before_the_peer_fell_silent_is_a_hit(word):
    whole = sr.GROUP_BYTES // LENGTH
    answer = say(heads(whole + 1), PAYLOAD * whole, tails(*[Sent.GOOD] * whole), PAYLOAD[:10])
    outcomes, _ = read_from(word, answer, count=whole + 1)
    assert reads(outcomes) == [Read.HIT] * whole + [Read.FAILED]


def test_what_is_not_there_is_a_miss_also_when_the_peer_falls_silent_then(word):
    outcomes, _ = read_from(
        word,
        say(lambda seal: sr.pack_heads([Head(Sent.GOOD), Head(Sent.MISS)], seal)),
        count=2,
    )
    assert reads(outcomes) == [Read.FAILED, Read.MISS]


@each(
    ("options", "reason"),
    [
        ({"secret": b"another secret, as long"}, "does not know the secret"),
        ({"secret": None}, "secret"),
        ({"node": (NODE_ID + 1, EPOCH)}, "another node"),
        ({"node": (NODE_ID, EPOCH + 1)}, "another start"),
        ({"hello": b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)}, "not a kvstore"),
        ({"hello": b"?"}, "timed out"),
    ],
    ids=range(6),
)
def test_a_peer_that_is_not_the_node_is_refused(word, options, reason):
    (outcome,), _ = read_from(word, say(BEGIN, PAYLOAD, END), deadline_s=2, **options)
    assert outcome.read is Read.FAILED
    assert re.search(reason, outcome.reason), outcome.reason


def test_more_blocks_than_were_asked_for_end_the_connection(word):
    def answer(channel):
        send(channel, BEGIN, PAYLOAD)
        # In one call: nothing between them, so the next request finds them there.
        channel.send([END(channel.seals.sent), PAYLOAD], far())

    liar = Liar(answer)
    transport = StreamTransport(SECURITY)
    location = Location(NODE_ID, EPOCH, 0, 1, 1, 3, len(PAYLOAD), 0)
    node = dataclasses.replace(word, transports={NAME: liar.address})
    for _ in range(3):
        into = memoryview(bytearray(len(PAYLOAD)))
        wanted = [Wanted(bytes(32), location, (into,))]
        (outcome,) = transport.read(node, wanted, far())
        assert outcome.read is not Read.HIT or bytes(into) == PAYLOAD
    assert len(liar.open) == 3, "a connection out of step is not used again"
    transport.close()
    liar.close()


def test_nobody_listening_fails_at_once(word):
    liar = Liar(say())
    liar.close()
    transport = StreamTransport(SECURITY)
    node = dataclasses.replace(word, transports={NAME: liar.address})
    location = Location(NODE_ID, EPOCH, 0, 1, 1, 3, 1, 0)
    wanted = [Wanted(bytes(32), location, (memoryview(bytearray(1)),))]
    (outcome,) = transport.read(node, wanted, far())
    assert outcome.read is Read.FAILED


@each("address", ["", "tcp://", "tcp://host", "pigeon://h:1", "tls://h:1", "[::"])
def test_an_address_that_is_none_fails(word, address):
    transport = StreamTransport(SECURITY)
    node = dataclasses.replace(word, transports={NAME: address})
    assert not transport.usable(node)
    location = Location(NODE_ID, EPOCH, 0, 1, 1, 3, 1, 0)
    wanted = [Wanted(bytes(32), location, (memoryview(bytearray(1)),))]
    (outcome,) = transport.read(node, wanted, far())
    assert outcome.read is Read.FAILED


def test_connections_that_were_lost_in_silence_cost_one_deadline_and_not_one_each(word):
    """As when a firewall has forgotten them while they were idle."""
    lost = []

    def answer(channel):
        if channel not in lost:
            send(channel, BEGIN, PAYLOAD, END)

    liar = Liar(answer)
    transport = StreamTransport(SECURITY)
    node = dataclasses.replace(word, transports={NAME: liar.address})
    location = Location(NODE_ID, EPOCH, 0, 1, 1, 3, LENGTH, 0)

    def read(deadline_s=20.0):
        wanted = [Wanted(bytes(32), location, (memoryview(bytearray(LENGTH)),))]
        (outcome,) = transport.read(node, wanted, time.monotonic() + deadline_s)
        return outcome.read

    try:
        pool = transport.pool(node)
        for channel in [pool.take(far()) for _ in range(3)]:
            pool.give(channel, True)
        assert read() is Read.HIT
        lost += liar.channels
        assert read(DEADLINE_S) is Read.FAILED
        assert read() is Read.HIT
    finally:
        transport.close()
        liar.close()
