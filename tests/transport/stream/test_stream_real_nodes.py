"""A real node whose clients lie, or whose network is not kind: both end well.

Such clients are hung up on, and others are served. Nodes that lie are in
test_stream_lying_nodes.py.
"""

import dataclasses
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from contract.transport import SECURITY, Place, far, reads
from each_input import each
from stores import NodeProcess

from kvstore import Client
from kvstore.errors import NodeUnavailableError, PeerError
from kvstore.limits import STREAM_CONNECTIONS_PER_NODE, STREAM_FRAME_BYTES_MAX
from kvstore.protocol import stream as sw
from kvstore.protocol import stream_handshake as sh
from kvstore.protocol.stream import Frame
from kvstore.protocol.stream_reply import heads_bytes, tails_bytes
from kvstore.protocol.stream_seal import TAG_BYTES
from kvstore.record import unpack_record
from kvstore.testing.proxy import FaultyProxy
from kvstore.transport.base import Read, Wanted
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import NAME, StreamTransport
from kvstore.types import Kind

NODE_ID, EPOCH = 77, 5
DEADLINE_S = 0.5
PAYLOAD = bytes(range(256)) * 2000
LENGTH = len(PAYLOAD)
GOOD = xxhash.xxh3_64_intdigest(PAYLOAD)

# --- clients that lie --------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("run"), lambda place: StreamTransport(SECURITY))
    yield place
    place.close()


def connected(place, security=SECURITY):
    transport = StreamTransport(security)
    return transport.pool(place.word).take(far())


def hung_up(channel):
    try:
        while True:
            channel.receive_bytes(1, far())
    except NodeUnavailableError:
        return True


@each(
    "nonsense",
    [
        os.urandom(64),
        sw._FRAME.pack(Frame.READ, STREAM_FRAME_BYTES_MAX + 1),
        sw._FRAME.pack(Frame.READ, TAG_BYTES - 1),
        (Frame.READ, b""),
        (Frame.READ, bytes(4) + bytes(63)),
        (Frame.PUT, bytes(5)),
        (Frame.PUT, struct.pack("<IIH", 1, 1, 60_000)),
        (Frame.CONTROL, b"\xc1"),
        sw.pack_control([8, 1, 0]),  # CLEAR
        sw.pack_control([99, 1]),
        sw.pack_answers([]),
    ],
    ids=range(11),
)
def test_a_client_that_talks_nonsense_is_hung_up_on_and_others_are_served(place, nonsense):
    channel = connected(place)
    if isinstance(nonsense, bytes):
        channel.send([nonsense], far())
    else:
        channel.send_frame(nonsense, far())
    assert hung_up(channel)
    assert reads(place.read(place.save(b"1" * 1000))[0]) == [Read.HIT]


@pytest.mark.parametrize("secret", [None, b"another secret, as long"])
def test_a_client_without_the_secret_gets_nothing(place, secret):
    with pytest.raises(PeerError, match="secret"):
        connected(place, StreamSecurity(secret=secret))


def test_a_replayed_handshake_is_refused(place):
    """Somebody has listened to a client and says the same again."""
    host, port = "127.0.0.1", int(place.word.transports[NAME].rpartition(":")[2])
    shake = sh.ClientHandshake(
        SECURITY.secret, os.urandom(32), (place.word.node_id, place.word.epoch)
    )
    first = Channel(socket.create_connection((host, port)))
    first.send([shake.hello], far())
    proof = shake.prove(first.receive_bytes(sh.NODE_HELLO_BYTES, far()))
    first.send([proof], far())
    shake.check(first.receive_bytes(sh.VERDICT_BYTES, far()))
    again = Channel(socket.create_connection((host, port)))
    again.send([shake.hello, proof], far())
    again.receive_bytes(sh.NODE_HELLO_BYTES, far())
    assert again.receive_bytes(sh.VERDICT_BYTES, far()) == bytes(sh.VERDICT_BYTES)
    assert hung_up(again)


def test_a_client_that_asks_and_goes_away_harms_nobody(place):
    blocks = [place.save(os.urandom(2 << 20)) for _ in range(3)]
    for _ in range(10):
        channel = connected(place)
        channel.send_frame(sw.pack_read([*blocks], 5.0), far())
        channel.receive_bytes(100_000, far())
        channel.close()
    assert reads(place.read(*blocks)[0]) == [Read.HIT] * 3


# --- a network that is not kind ----------------------------------------------------


@pytest.fixture
def wire(place):
    """A proxy before the node, and what the node announces then."""
    host, port = "127.0.0.1", int(place.word.transports[NAME].rpartition(":")[2])
    with FaultyProxy(lambda: socket.create_connection((host, port))) as proxy:
        address = "tcp://{}:{}".format(*proxy.address)
        yield proxy, dataclasses.replace(place.word, transports={NAME: address})


def read_over(wire_word, blocks, deadline_s=20.0):
    """Outcomes and bytes of blocks read over one connection of their own."""
    transport = StreamTransport(SECURITY)
    wanted = [
        Wanted(key, location, (memoryview(bytearray(location.length)),)) for key, location in blocks
    ]
    try:
        outcomes = transport.read(wire_word, wanted, time.monotonic() + deadline_s)
        return list(outcomes), [bytes(one.into[0]) for one in wanted]
    finally:
        transport.close()


@pytest.mark.parametrize("size", [1000, 300_000])
def test_a_byte_flipped_on_the_wire_is_never_a_wrong_hit(place, wire, size):
    """Wherever it is: in the handshake, in a head, in a payload, in a tail."""
    proxy, word = wire
    payloads = [os.urandom(size) for _ in range(3)]
    blocks = [place.save(payload) for payload in payloads]
    outcomes, got = read_over(word, blocks)
    assert reads(outcomes) == [Read.HIT] * 3
    total = sh.NODE_HELLO_BYTES + sh.VERDICT_BYTES + heads_bytes(3) + tails_bytes(3) + 3 * size
    refused = 0
    for at in [*range(0, 150, 7), *range(150, total, total // 25)]:
        left = [at]

        def flip(chunk, left=left):
            if 0 <= left[0] < len(chunk):
                chunk[left[0]] ^= 0x10
            left[0] -= len(chunk)

        proxy.flip = flip
        outcomes, got = read_over(word, blocks, deadline_s=1.0)
        for outcome, bytes_, payload in zip(outcomes, got, payloads, strict=True):
            if outcome.read is Read.HIT:
                seen = (bytes_, outcome.kind, outcome.meta_length)
                assert seen == (payload, Kind.BLOCK, 0), f"byte {at}"
        refused += any(outcome.read is not Read.HIT for outcome in outcomes)
    assert refused > 30, "nearly every byte matters"


def test_a_node_killed_in_mid_read_fails_what_was_not_there_yet(tmp_path, redis_server):
    with NodeProcess(
        redis_server,
        size=96 << 20,
        options=("--listen", "127.0.0.1:0"),
        environment={"KVSTORE_SECRET": SECURITY.secret.decode()},
    ) as process:
        with Client(**process.client_options) as writer:
            values = {f"k{i}": bytes([i]) * (4 << 20) for i in range(16)}
            assert all(writer.put_many(values))
            keys = [writer.namespace.value_key(key) for key in values]
            records = writer.session.index.lookup(keys)
        blocks = [(k, unpack_record(k, r)) for k, r in zip(keys, records, strict=True)]
        transport = StreamTransport(SECURITY)
        wanted = [
            Wanted(key, location, (memoryview(bytearray(location.length)),))
            for key, location in blocks
        ]
        word = process.directory.announcement()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(transport.read, word, wanted, time.monotonic() + 60)
            while not any(wanted[2].into[0][:1]):
                assert not reading.done(), "the read ended before the kill"
            process.kill()
            outcomes = reading.result()
        assert Read.FAILED in reads(list(outcomes))
        for i, (outcome, one) in enumerate(zip(outcomes, wanted, strict=True)):
            assert outcome.read is not Read.HIT or bytes(one.into[0]) == values[f"k{i}"]
        transport.close()


@pytest.mark.parametrize("what", ["send", "receive_some"])
def test_reads_that_are_interrupted_keep_no_connection(place, monkeypatch, what):
    """Ctrl-C in a session that goes on: there are only so many connections to a node."""
    block = place.save(b"1" * 1000)
    assert reads(place.read(block)[0]) == [Read.HIT]

    def interrupted(*_):
        raise KeyboardInterrupt

    for _ in range(STREAM_CONNECTIONS_PER_NODE + 1):
        (pool,) = place.transport._pools.values()
        channel = pool.take(far())
        pool.give(channel, True)
        monkeypatch.setattr(channel, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            place.read(block, timeout_s=1.0)
    assert reads(place.read(block)[0]) == [Read.HIT]
