"""What a RESERVE request says of the blocks that a client wants to save."""

import msgpack

from kvstore.protocol.control import Op, decode, packed
from kvstore.protocol.control_requests import Want, reserve_arguments

KEYS = [bytes([i]) * 32 for i in range(2)]


def arguments(values, *, checksums=True):
    wants = [
        Want(key, 100 + i, 1, 2, value, 7 + i)
        for i, (key, value) in enumerate(zip(KEYS, values, strict=True))
    ]
    return reserve_arguments(wants, 5, checksums=checksums)


def test_blocks_are_said_column_by_column():
    assert arguments([None, b"v"]) == (
        *(5, b"".join(KEYS), (100, 101), 1, 2),
        *((None, b"v"), (7, 8)),
    )


def test_values_and_checksums_that_nobody_has_are_left_out():
    assert arguments([None, None], checksums=False)[-2:] == (None, 0)


def test_what_all_blocks_have_alike_is_said_once_and_read_for_each():
    wants = [Want(key, 100, 1, 2, None, 0) for key in KEYS]
    said = reserve_arguments(wants, 5, checksums=False)
    assert said == (5, b"".join(KEYS), 100, 1, 2, None, 0)
    event = decode(1, msgpack.unpackb(packed([Op.RESERVE, 1, *said])))
    assert (event.sizes, event.kinds, event.meta_lengths) == ([100] * 2, [1] * 2, [2] * 2)
