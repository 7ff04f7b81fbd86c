import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.segment.header import (
    FREE,
    GENERATION_MAX,
    HEADER_BYTES,
    RESERVED,
    SEALED,
    Header,
    Superblock,
    fields,
    of_reserved,
    of_word,
    pack,
    pack_superblock,
    unpack,
    unpack_superblock,
    word,
)

headers = st.builds(
    Header,
    generation=st.integers(0, GENERATION_MAX),
    key=st.binary(min_size=32, max_size=32),
    length=st.integers(0, 2**32 - 1),
    granule=st.integers(0, 255),
    kind=st.integers(0, 255),
    meta_length=st.integers(0, 2**16 - 1),
    checksum=st.integers(0, 2**64 - 1),
    namespace_id=st.integers(0, 2**32 - 1),
)


@given(headers)
def test_a_sealed_header_is_64_bytes_and_gives_back_what_it_was_made_of(header):
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert unpack(raw) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_any_bit_flipped_is_not_trusted(header, bit):
    raw = bytearray(pack(header))
    raw[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(raw)) is None


@given(headers, headers, st.integers(1, 7))
def test_a_half_written_header_is_not_trusted(old, new, words):
    """Any mixture of the words of two headers that is neither of them."""
    before, after = pack(old), pack(new)
    mixed = after[: words * 8] + before[words * 8 :]
    if mixed not in (before, after):
        assert unpack(mixed) is None


@given(
    st.integers(0, GENERATION_MAX // 2), st.integers(0, 1 << 23), st.integers(0, 3), st.integers(4)
)
def test_a_reserved_word_says_where_the_slot_is_and_no_lower_generation(at, later, granule, size):
    size = min(size, VALUE_BYTES_MAX >> 10)
    seen = of_reserved(word(RESERVED, at, granule, size), at + later)
    assert seen == (at, granule, size)
    generation, _, _ = of_reserved(word(RESERVED, at, granule, size), at + (1 << 25))
    assert generation >= at


@pytest.mark.parametrize("state", [FREE, RESERVED])
@given(headers)
def test_a_header_that_is_not_sealed_is_not_trusted(state, header):
    raw = struct.pack("<Q", word(state, header.generation)) + pack(header)[8:]
    assert unpack(raw) is None


def test_a_superblock_gives_back_what_it_was_made_of_and_nothing_when_damaged():
    block = Superblock(2**64 - 1, 2**32 - 1, 3, 1 << 44)
    raw = pack_superblock(block)
    assert unpack_superblock(raw + bytes(4000)) == block
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        assert unpack_superblock(bytes(damaged)) is None
    assert unpack_superblock(b"") is None


@pytest.mark.parametrize("state", [FREE, SEALED])
@pytest.mark.parametrize("generation", [0, 1, (1 << 24) - 1, 1 << 24, GENERATION_MAX])
def test_a_word_gives_back_its_state_and_generation(state: int, generation: int) -> None:
    assert of_word(word(state, generation)) == (state, generation)


def test_a_header_of_another_state_is_none_though_its_checksum_is_right() -> None:
    raw = pack((9, bytes(32), 40, 0, 1, 0, 99, 0))
    assert fields(raw) is not None
    freed = bytes([FREE]) + raw[1:60]
    assert fields(freed + crc32(freed).to_bytes(4, "little")) is None
