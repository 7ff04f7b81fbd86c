"""What a RESERVE request says of the blocks that a client wants to save."""

import msgpack
import pytest
from each_input import each

from kvstore.protocol.control import Op, packed
from kvstore.protocol.control_events import decode
from kvstore.protocol.control_requests import Wants, reserve_arguments
from kvstore.types import Kind

KEYS = [bytes([i]) * 32 for i in range(4)]
EACH = Wants(
    KEYS, [100, 101, 102, 103], [0, 1, 2, 3], [0, 5, 6, 7], [b"v", None] * 2, [7, 8, 9, 10]
)
ALIKE = Wants(KEYS, 100, Kind.BYTES, 2, None, 9)


def test_blocks_are_said_column_by_column():
    assert reserve_arguments(EACH, 5, checksums=True) == (
        *(5, b"".join(KEYS), EACH.sizes, EACH.kinds, EACH.meta_lengths),
        *(EACH.values, EACH.checksums),
    )


def test_values_and_checksums_that_nobody_has_are_left_out():
    wants = Wants(KEYS, 100, values=[None] * 4, checksums=[1, 2, 3, 4])
    assert reserve_arguments(wants, 5, checksums=False)[-2:] == (None, 0)


@pytest.mark.parametrize("wants", [ALIKE, Wants(KEYS, [100] * 4, [1] * 4, [2] * 4)])
def test_what_all_blocks_have_alike_is_said_once_and_read_for_each(wants):
    said = reserve_arguments(wants, 5, checksums=False)
    assert said == (5, b"".join(KEYS), 100, 1, 2, None, 0)
    event = decode(1, msgpack.unpackb(packed([Op.RESERVE, 1, *said])))
    assert (event.sizes, event.kinds, event.meta_lengths) == ([100] * 4, [1] * 4, [2] * 4)


@each("which", [range(4), range(1, 3), [0, 3], [2], range(0)])
def test_some_of_the_blocks_have_what_they_had(which):
    some = EACH.of(which)
    assert len(some) == len(which)
    for name in ("keys", "sizes", "kinds", "meta_lengths", "values", "checksums"):
        column = getattr(EACH, name)
        assert list(getattr(some, name)) == [column[i] for i in which]
    alike = ALIKE.of(which)
    assert (alike.sizes, alike.kinds, alike.meta_lengths, alike.checksums) == (100, 1, 2, 9)
    assert (list(alike.keys), alike.values) == ([KEYS[i] for i in which], None)
    assert list(alike.each_size()) == [100] * len(which)
