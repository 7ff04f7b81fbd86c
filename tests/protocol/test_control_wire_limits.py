"""Every number and every list of a control message: the largest that is taken, and not one more."""

from collections import deque

import msgpack
import pytest
from each_input import each

from kvstore.core.events import Commit
from kvstore.errors import UsageError
from kvstore.limits import (
    BATCH_KEYS_MAX,
    HELD_MAX,
    LIST_ROWS_MAX,
    META_BYTES_MAX,
    NAME_BYTES_MAX,
    RESET_NAMESPACES_MAX,
    RETAINED_S_MAX,
)
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_events import Hello, decode
from kvstore.types import KEY_BYTES, Kind

KEY = b"k" * KEY_BYTES


def reserve(*, space=0, size=1, kind=0, meta=0, values=None, checksum=0):
    return [Op.RESERVE, 1, space, KEY, size, kind, meta, values, checksum]


def hello(request=1, reserved=(), pinned=()):
    return [Op.HELLO, request, control.PROTOCOL_VERSION, "a" * 32, list(reserved), list(pinned)]


def read(message):
    """As a node reads it."""
    if message[0] != Op.HELLO:
        return decode(1, [int(message[0]), *message[1:]])
    hello = Hello(message)
    deque(hello.claims(2), maxlen=0)
    return hello


@each(
    ("field", "largest", "message"),
    [
        ("request", 2**63 - 1, lambda n: [Op.STAT, n]),
        ("request", 2**63 - 1, lambda n: hello(n)),
        ("namespace_id", 2**32 - 1, lambda n: reserve(space=n)),
        ("size_bytes", 2**32 - 1, lambda n: reserve(size=n)),
        ("kind", len(Kind) - 1, lambda n: reserve(kind=n)),
        ("meta_length", META_BYTES_MAX, lambda n: reserve(size=META_BYTES_MAX, meta=n)),
        ("checksum", 2**64 - 1, lambda n: reserve(checksum=n)),
        ("items", 2**64 - 1, lambda n: [Op.COMMIT, 1, [[0, 0, n]]]),
        ("items", 2**64 - 1, lambda n: [Op.UNPIN, 1, [[n, 0]]]),
        ("reserved", 2**64 - 1, lambda n: hello(reserved=[[n, 0]])),
        ("pinned", 2**64 - 1, lambda n: hello(pinned=[[0, 0, n]])),
        ("namespace_id", 2**32 - 1, lambda n: [Op.CLEAR, 1, n]),
        ("number", 2**63 - 1, lambda n: [Op.RESET, 1, n, [0]]),
        ("namespace_id", 2**32 - 1, lambda n: [Op.RESET, 1, 0, [n]]),
        ("at_most", LIST_ROWS_MAX, lambda n: [Op.LIST, 1, b"", n]),
        ("ttl_s", RETAINED_S_MAX, lambda n: [Op.RETAIN, 1, KEY, n, 0]),
        ("tenant", 2**32 - 1, lambda n: [Op.RETAIN, 1, KEY, 0, n]),
    ],
)
def test_a_number_is_an_integer_from_0_to_its_largest(field, largest, message):
    assert read(message(0))
    assert read(message(largest))
    for wrong in (largest + 1, -1, True, 1.0, "1", None, [[0], [0]]):
        with pytest.raises(UsageError, match=f"^{field}="):
            read(message(wrong))


@each(
    ("field", "least", "largest", "message"),
    [
        ("keys", 0, BATCH_KEYS_MAX, lambda n: [Op.PIN, 1, KEY * n]),
        ("items", 0, BATCH_KEYS_MAX, lambda n: [Op.ABORT, 1, [[1, 2]] * n]),
        ("reserved", 0, HELD_MAX, lambda n: hello(reserved=[[1, 2]] * n)),
        ("pinned", 0, HELD_MAX, lambda n: hello(pinned=[[1, 2, 3]] * n)),
        ("namespace_ids", 1, RESET_NAMESPACES_MAX, lambda n: [Op.RESET, 1, 0, [7] * n]),
        ("names", 1, NAME_BYTES_MAX, lambda n: [Op.NAMES, 0, KEY, [b"n" * n]]),
        ("after", 0, KEY_BYTES, lambda n: [Op.LIST, 1, b"k" * n, 1]),
    ],
)
def test_a_list_is_as_long_as_that_at_most(field, least, largest, message):
    assert read(message(least))
    assert read(message(largest))
    for wrong in (largest + 1, *range(least - 1, least)):
        if wrong >= 0:
            with pytest.raises(UsageError, match=f"^{field}="):
                read(message(wrong))


def test_who_sends_too_many_keys_hears_how_many_they_were():
    with pytest.raises(UsageError, match=f"^keys={BATCH_KEYS_MAX + 1}: at most {BATCH_KEYS_MAX} "):
        read([Op.PIN, 1, KEY * (BATCH_KEYS_MAX + 1)])


@each(
    ("message", "field"),
    [
        ([Op.COMMIT, 1, [b"abc"]], "items"),
        ([Op.COMMIT, 1, {"a": 1}], "items"),
        ([Op.COMMIT, 1, [[1, True, 3]]], "items"),
        ([Op.ABORT, 1, [[1, 2, 3]]], "items"),
        ([Op.PIN, 1, "k" * KEY_BYTES], "keys"),
        ([Op.LIST, 1, "", 1], "after"),
        ([Op.NAMES, 0, KEY, {b"name": 1}], "names"),
        ([Op.RESET, 1, 0, {7: 7}], "namespace_ids"),
        (reserve(values={b"a": 1}), "values"),
        (reserve(values=[]), "values"),
        (reserve(values=["a"]), "values"),
        (reserve(values=[b"ab"]), "values"),
        (reserve(size={1: 1}), "size_bytes"),
    ],
)
def test_what_is_only_like_the_right_kind_is_refused(message, field):
    with pytest.raises(UsageError, match=f"^{field}="):
        read(message)


def test_lists_for_no_keys_are_empty_and_a_single_wrong_number_is_named_with_its_range():
    assert read([Op.RESERVE, 1, 7, b"", [], [], [], None, []]).sizes == []
    with pytest.raises(UsageError, match=r"^request=-1: must be an integer from 0 to \d+$"):
        read(hello(request=-1))


@each(
    ("message", "items"),
    [
        (None, 0),
        ({1: 2, 3: 4, 5: 6}, 0),
        ([], 0),
        ([Op.STAT, 1], 0),
        ([Op.CLEAR, 1, 7], 0),
        ([Op.PIN, 1, KEY * 5], 5),
        ([Op.PIN, 1, b""], 0),
        ([Op.COMMIT, 1, [[1, 2, 3]] * 4], 4),
        ([Op.RESERVE, 1, 7, KEY * 3, 1, 0, 0, [b"v"] * 3, 0], 3),
        ([Op.HELLO, 1, 1, "a" * 32, [[1, 2]] * 6, [[1, 2, 3]] * 9], 9),
        ([Op.LIST, 1, KEY * 9, 17], 17),
        ([Op.LIST, 1, b"", 1 << 40], LIST_ROWS_MAX),
        ([Op.LIST, 1, b"", "17"], 0),
        ([Op.LIST, 1, b"", True], 0),
    ],
)
def test_a_message_costs_as_many_items_as_it_names_blocks(message, items):
    assert control.items_of(message) == items


def test_another_message_of_as_many_parts_is_no_hello():
    message = hello()
    message[0] = Op.STAT
    with pytest.raises(UsageError, match=r"^message="):
        Hello(message)


@pytest.mark.parametrize("sent", [msgpack.ExtType(1, b"x"), {5: 1}])
def test_extensions_and_keys_of_maps_that_are_no_text_end_the_connection(sent):
    unpacker = control.unpacker()
    unpacker.feed(msgpack.packb([int(Op.STAT), 1, sent]))
    with pytest.raises(ValueError):
        next(unpacker)


@each("items", [7, None, b"x", "x", {}])
def test_what_is_no_list_where_one_is_due_is_refused_by_name(items):
    with pytest.raises(UsageError, match=r"^items="):
        read([Op.COMMIT, 1, items])


def test_a_message_is_read_as_it_comes_out_of_the_byte_stream():
    unpacker = control.unpacker()
    unpacker.feed(control.packed([Op.COMMIT, 1, [[0, 1, 2]]]))
    assert [read(message) for message in unpacker] == [Commit(1, 1, [(0, 1, 2)])]


@pytest.mark.parametrize("field", ["op", "request", "after"])
def test_a_request_of_lists_in_lists_is_refused_by_name(field):
    """As deep as msgpack takes it, which is deeper than `repr` does."""
    nested = msgpack.unpackb(b"\x91" * 1000 + b"\x00")
    message = [int(Op.LIST), 1, b"", 5]
    message[["op", "request", "after"].index(field)] = nested
    with pytest.raises(UsageError, match=field) as refused:
        decode(1, message)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("metas", [5, [0, 5]])
def test_a_description_is_no_longer_than_the_value_that_it_ends(metas):
    """Else the block would exist, and be a miss to everybody."""
    keys = bytes(range(2 * KEY_BYTES))
    message = [int(Op.RESERVE), 1, 3, keys, [5, 4], 0, metas, None, 0]
    with pytest.raises(UsageError, match="meta_length=5"):
        decode(1, message)
    message[4] = [5, 5]
    assert decode(1, message).sizes == [5, 5]
