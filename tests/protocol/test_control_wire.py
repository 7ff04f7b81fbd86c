"""Whatever comes over the wire becomes an event or a `UsageError` that names the field."""

import contextlib
import json
from collections import deque

import msgpack
import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import events
from kvstore.errors import UsageError
from kvstore.keys import Namespace
from kvstore.limits import (
    BATCH_KEYS_MAX,
    HELD_MAX,
    LIST_ROWS_MAX,
    MESSAGE_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    NAMESPACE_FIELDS_MAX,
    RESET_NAMESPACES_MAX,
    Limits,
)
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_events import Hello, decode

KEYS = [bytes([i]) * 32 for i in range(3)]
RAW = b"".join(KEYS)
SPACE = Namespace({"model": "m", "layers": 3, "scale": 0.5, "draft": None, "tied": True})
MANY_FIELDS = json.dumps({str(i): i for i in range(NAMESPACE_FIELDS_MAX + 1)}).encode()

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def read_hello(message):
    hello = Hello(message)
    deque(hello.claims(100), maxlen=0)
    return hello


def decoded(message):
    """What a node makes of `message` once it has crossed the wire."""
    return decode(1, msgpack.unpackb(control.packed(message)))


@given(st.sampled_from(list(Op)), st.lists(anything, max_size=8))
def test_any_arguments_of_any_op_are_an_event_or_a_usage_error(op, args):
    with contextlib.suppress(UsageError):
        decode(1, [int(op), 5, *args])


@given(anything)
def test_any_first_message_is_a_hello_or_a_usage_error(message):
    with contextlib.suppress(UsageError):
        read_hello(message)


def test_a_reserve_survives_the_wire():
    message = [Op.RESERVE, 9, 4, RAW, [1, 2, 3], 0, 0, [b"a", None, b"abc"], 0]
    event = decode(7, msgpack.unpackb(control.packed(message)))
    assert event == events.Reserve(
        7, 9, KEYS, [1, 2, 3], 4, [0, 0, 0], [0, 0, 0], [b"a", None, b"abc"], [0, 0, 0]
    )


def test_a_question_and_an_introduction_survive_the_wire():
    assert decoded([Op.EXPLAIN, 9, RAW]) == events.Explain(1, 9, KEYS)
    event = decoded([Op.NAMESPACE, 0, SPACE.id, SPACE.canonical()])
    assert event == events.Introduce(1, SPACE)
    assert event.namespace.fields == SPACE.fields


@given(
    st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=5
    )
)
def test_any_namespace_is_told_as_it_is(fields):
    namespace = Namespace(fields)
    event = decoded([Op.NAMESPACE, 0, namespace.id, namespace.canonical()])
    assert event.namespace == namespace


def test_one_integer_stands_for_all_entries():
    event = decoded([Op.RESERVE, 1, 0, RAW, 4096, 2, 0, None, 0])
    assert event.sizes == [4096] * 3
    assert event.kinds == [2] * 3
    assert event.values == [None] * 3


@each(
    ("message", "field"),
    [
        ([Op.RESERVE, 1, 0, RAW + b"x", 1, 0, 0, None, 0], "keys"),
        ([Op.RESERVE, 1, 0, b"k" * 32 * (BATCH_KEYS_MAX + 1), 1, 0, 0, None, 0], "keys"),
        ([Op.RESERVE, 1, 0, RAW, [1, 2], 0, 0, None, 0], "size_bytes"),
        ([Op.RESERVE, 1, 0, RAW, -1, 0, 0, None, 0], "size_bytes"),
        ([Op.RESERVE, 1, 0, RAW, True, 0, 0, None, 0], "size_bytes"),
        ([Op.RESERVE, 1, 0, RAW, 1, 77, 0, None, 0], "kind"),
        ([Op.RESERVE, 1, 0, RAW, 1, 0, 256, None, 0], "meta_length"),
        ([Op.RESERVE, 1, 0, RAW, 2, 0, 0, [b"a", b"b", b"c"], 0], "values"),
        ([Op.RESERVE, 1, 1 << 32, RAW, 1, 0, 0, None, 0], "namespace_id"),
        ([Op.COMMIT, 1, [[1, 2]]], "items"),
        ([Op.COMMIT, 1, [[1, 2, -3]]], "items"),
        ([Op.COMMIT, 1, [[1, 2, 3], [1, 2, True]]], "items"),
        ([Op.COMMIT, 1, [[1, 2, 3], "abc"]], "items"),
        ([Op.RESERVE, 1, 0, RAW, [1, 2, True], 0, 0, None, 0], "size_bytes"),
        ([Op.COMMIT, 1, [[1, 2, 3]] * (BATCH_KEYS_MAX + 1)], "items"),
        ([Op.ABORT, 1, [[1, 2]] * (BATCH_KEYS_MAX + 1)], "items"),
        ([Op.UNPIN, 1, [[1, 2]] * (BATCH_KEYS_MAX + 1)], "items"),
        ([Op.PIN, 1, b"k" * 32 * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.TOUCH, 0, b"k" * 32 * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.REPORT, 0, ["a"] * 65, 0], "names"),
        ([Op.REPORT, 0, ["a\n"], [1]], "names"),
        ([Op.REPORT, 0, ["a" * 33], [1]], "names"),
        ([Op.REPORT, 0, ["a"], [-1]], "counts"),
        ([Op.REPORT, 0, ["a"], [1, 2]], "counts"),
        ([Op.DROP, 1, b"k" * 32 * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.SUSPECT, 0, b"k" * 32 * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.NAMES, 0, b"k" * 32 * (BATCH_KEYS_MAX + 1), [b"a"] * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.RESET, 1, 0, [1] * (RESET_NAMESPACES_MAX + 1)], "namespace_ids"),
        ([Op.LIST, 1, b"", LIST_ROWS_MAX + 1], "at_most"),
        ([Op.LIST, 1, b"k", 1], "after"),
        ([Op.EXPLAIN, 1, RAW + b"x"], "keys"),
        ([Op.NAMES, 0, RAW, [b"a"]], "names"),
        ([Op.NAMES, 0, RAW, [b"a", b"b", b""]], "names"),
        ([Op.NAMES, 0, RAW, [b"a", b"b", "c"]], "names"),
        ([Op.NAMES, 0, RAW, [b"a", b"b", b"c" * 257]], "names"),
        ([Op.EXPLAIN, 1, b"k" * 32 * (BATCH_KEYS_MAX + 1)], "keys"),
        ([Op.EXPLAIN, 1], "message"),
        ([Op.NAMESPACE, 0, SPACE.id, "text"], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b" " * (NAMESPACE_BYTES_MAX + 1)], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b"no JSON"], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b"\xff"], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b"[" * NAMESPACE_BYTES_MAX], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b"9" * NAMESPACE_BYTES_MAX], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b"[1]"], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, b'{"a": [1]}'], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id, MANY_FIELDS], "fields"),
        ([Op.NAMESPACE, 0, SPACE.id + 1, SPACE.canonical()], "namespace_id"),
        ([Op.NAMESPACE, 0, None, SPACE.canonical()], "namespace_id"),
        ([Op.STAT, 1, 5], "message"),
        ([Op.STAT, -1], "request"),
        ([99, 1], "op"),
        ([[], 1], "op"),
        ("x", "message"),
        (None, "message"),
    ],
)
def test_a_wrong_message_is_refused_by_the_name_of_its_field(message, field):
    with pytest.raises(UsageError, match=f"^{field}="):
        decoded(message)


def test_of_many_entries_the_wrong_one_is_named():
    with pytest.raises(UsageError, match=r"^items=\[4, 5, -6\]"):
        decoded([Op.COMMIT, 1, [[1, 2, 3], [4, 5, -6], [7, 8, 9]]])
    with pytest.raises(UsageError, match=r"^size_bytes=-2"):
        decoded([Op.RESERVE, 1, 0, RAW, [1, -2, 3], 0, 0, None, 0])


@each("client_id", ["", "../../etc/passwd", "g" * 32, "a" * 31, 5, None])
def test_a_client_id_that_could_be_a_path_is_refused(client_id):
    with pytest.raises(UsageError, match=r"^client_id="):
        read_hello([Op.HELLO, 1, control.PROTOCOL_VERSION, client_id, [], []])


def test_another_protocol_version_is_refused_with_ours():
    with pytest.raises(UsageError, match=f"version {control.PROTOCOL_VERSION}"):
        read_hello([Op.HELLO, 1, 99, "a" * 32, [], []])


def test_a_client_can_say_all_that_it_may_hold():
    most = Limits(pins_per_client=HELD_MAX)
    reserved = [[i, 1 << 40] for i in range(HELD_MAX)]
    pinned = [[i, 1 << 40, 3] for i in range(most.pins_per_client)]
    message = [Op.HELLO, 1, control.PROTOCOL_VERSION, "a" * 32, reserved, pinned]
    assert len(control.packed(message)) < MESSAGE_BYTES_MAX
    said = read_hello(message)
    assert (len(said.reserved), len(said.pinned)) == (HELD_MAX, HELD_MAX)


@each("reserved", [0, 1, 3, 4])
@each("pinned", [0, 1, 3, 4])
def test_what_is_held_is_read_in_parts_and_the_last_is_the_end(reserved, pinned):
    rows = [[i, 10 + i] for i in range(reserved)]
    pins = [[i, 5, 1 + i] for i in range(pinned)]
    said = Hello([Op.HELLO, 1, control.PROTOCOL_VERSION, "a" * 32, rows, pins])
    assert (said.reserved, said.pinned) == ({}, {})
    seen = []
    for count in said.claims(3):
        assert count == 3
        seen.append(len(said.reserved) + len(said.pinned))
    parts = (-(-reserved // 3)) + (-(-pinned // 3))
    assert len(seen) == max(parts - 1, 0)
    assert (said.reserved, said.pinned) == (
        {i: 10 + i for i in range(reserved)},
        {i: 1 + i for i in range(pinned)},
    )


def test_a_message_over_the_limit_is_never_buffered():
    unpacker = control.unpacker()
    unpacker.feed(b"\xc6" + (MESSAGE_BYTES_MAX * 2).to_bytes(4, "big"))
    unpacker.feed(bytes(MESSAGE_BYTES_MAX // 2))
    with pytest.raises(msgpack.BufferFull):
        unpacker.feed(bytes(MESSAGE_BYTES_MAX))


@given(st.binary(max_size=300))
def test_any_bytes_split_into_messages_or_a_framing_error(data):
    unpacker = control.unpacker()
    unpacker.feed(data)
    try:
        for message in unpacker:
            with contextlib.suppress(UsageError):
                decode(1, message)
    except (msgpack.UnpackException, ValueError):
        pass
