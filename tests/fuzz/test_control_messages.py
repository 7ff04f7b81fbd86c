"""Whatever a client says to a node, it is an event or a refusal, and the node goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import fuzz

from kvstore.core.events import Stat
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.errors import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.node import Node, NodeConfig
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_events import Hello, decode

MIB = 1 << 20
KEYS = [bytes([i]) * 32 for i in range(6)]
NAMESPACE = Namespace.named("n")

integers = st.one_of(st.integers(0, 5), st.integers(-(1 << 63), (1 << 64) - 1))
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        integers,
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=70),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)
keys = st.lists(st.sampled_from(KEYS), max_size=4).map(b"".join)
slots = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=4).map(
    lambda pairs: [list(pair) for pair in pairs]
)


@st.composite
def reserves(draw: st.DrawFn) -> list[object]:
    wanted = draw(st.lists(st.sampled_from(KEYS), max_size=4))
    sizes = [draw(st.sampled_from([1, 4, 5000, MIB, MIB + 1])) for _ in wanted]
    values = [bytes(n) if n < 6000 and draw(st.booleans()) else None for n in sizes]
    return [Op.RESERVE, 1, 7, b"".join(wanted), sizes, 1, 0, values, draw(st.integers(0, 9))]


sensible = st.one_of(
    reserves(),
    st.tuples(st.sampled_from([Op.ABORT, Op.UNPIN]), st.just(2), slots).map(list),
    slots.map(lambda pairs: [Op.COMMIT, 3, [[*pair, 9] for pair in pairs]]),
    st.tuples(
        st.sampled_from([Op.PIN, Op.TOUCH, Op.DROP, Op.EXPLAIN, Op.SUSPECT]), st.just(4), keys
    ).map(list),
    st.sampled_from([[Op.CLEAR, 5, 7], [Op.STAT, 6], [Op.LIST, 7, b"", 3]]),
    st.just([Op.NAMESPACE, 0, NAMESPACE.id, NAMESPACE.canonical()]),
    st.just([Op.REPORT, 0, ["asked_tokens", "missed_tokens:evicted"], [7, 3]]),
)


@st.composite
def mangled(draw: st.DrawFn) -> object:
    """A message as it should be, but for one part."""
    message = list(draw(sensible))
    place = draw(st.integers(0, len(message)))
    if place == len(message):
        return [*message, draw(plain)]
    message[place] = draw(plain)
    return message


hostile = st.one_of(
    plain,
    mangled(),
    st.tuples(st.integers(0, 19), integers, plain, plain).map(list),
    st.tuples(st.integers(0, 19), integers, plain).map(list),
)


def over_the_wire(message: object) -> object:
    """As it arrives: numbers for names, lists for tuples."""
    return msgpack.unpackb(msgpack.packb(message), strict_map_key=False)


@fuzz(100)
@given(message=sensible)
def test_what_these_tests_call_sensible_is_taken(message: object) -> None:
    decode(1, over_the_wire(message))


@fuzz(400)
@given(message=hostile.map(over_the_wire))
def test_any_message_is_an_event_or_a_usage_error(message: object) -> None:
    for read in (lambda: decode(1, message), lambda: list(Hello(message).claims(3))):
        try:
            read()
        except UsageError:
            continue


def capacity_is_whole(core: NodeCore) -> None:
    """No slot is twice in a list, and none that is held can be taken (rules 2 and 5)."""
    held = [slot for session in core.sessions() for slot in session.reserved.values()]
    assert len({slot.slot_id for slot in held}) == len(held)
    for slot in held:
        assert slot.state is SlotState.RESERVED
    ids = [slot.slot_id for slot in core.blocks.by_key.values()]
    assert len(set(ids)) == len(ids)
    (told,) = core.handle(Stat(1, 1), 0.0).replies
    assert told.body["capacity_bytes"] == 2 * MIB
    assert told.body["reserved"] == len(held)


@fuzz(150)
@given(
    messages=st.lists(
        st.tuples(st.integers(1, 3), st.one_of(sensible, sensible, hostile).map(over_the_wire)),
        max_size=25,
    )
)
def test_any_sequence_of_messages_leaves_the_core_whole(
    messages: list[tuple[int, object]],
) -> None:
    limits = Limits(pins_per_client=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.core.blocks.GONE_KEYS_MAX", 4)
        patch.setattr("kvstore.core.node.NAMESPACES_MAX", 2)
        patch.setattr("kvstore.core.node.RESERVATIONS_MAX", 3)
        core = NodeCore(node_id=1, epoch=1, size_bytes=2 * MIB, limits=limits)
        for now, (session, message) in enumerate(messages):
            try:
                event = decode(session, message)
            except UsageError:
                continue
            core.handle(event, float(now))
            capacity_is_whole(core)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    config = NodeConfig(run_dir=tmp_path_factory.mktemp("fuzz"), size_bytes=2 * MIB)
    with Node(config, MemoryIndex()) as node:
        yield node


def connected(node: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(node.dir.socket))
    return connection


streams = st.one_of(
    st.binary(max_size=200),
    st.lists(hostile, max_size=4).map(lambda items: b"".join(map(control.packed, items))),  # type: ignore[arg-type]
    st.sampled_from(
        [
            b"\xdd\xff\xff\xff\xff",  # an array of 4 G
            b"\xc6\xff\xff\xff\xff",  # 4 GiB of binary
            b"\x91" * 5000,  # nested 5,000 deep
            b"\xd6\xff\x00\x00\x00\x00",  # a time stamp
            b"\xc9\x00\x00\x00\x01\x05x",  # an extension
        ]
    ),
)


@fuzz(60)
@given(said=streams, lease=st.booleans())
def test_any_bytes_leave_the_node_serving(node: Node, said: bytes, lease: bool) -> None:
    """Before and after a right HELLO; then the next client is answered as if nothing was."""
    from kvstore.client.nodes.lease import Lease

    for bytes_ in (said, None):
        held = Lease(node.dir.leases)
        with connected(node) as connection:
            if lease or bytes_ is None:
                hello = [Op.HELLO, 1, control.PROTOCOL_VERSION, held.client_id, [], []]
                connection.sendall(msgpack.packb(hello))
            connection.sendall(bytes_ if bytes_ is not None else msgpack.packb([Op.STAT, 2]))
            if bytes_ is None:
                unpacker = msgpack.Unpacker()
                answers: list[list[object]] = []
                while len(answers) < 2:
                    data = connection.recv(65536)
                    assert data, "the node hung up on a client that did nothing wrong"
                    unpacker.feed(data)
                    answers += list(unpacker)
                assert [answer[:2] for answer in answers] == [[1, True], [2, True]]
            else:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        held.release()
