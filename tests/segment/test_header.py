import struct
from pathlib import Path
from zlib import crc32

import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.segment.header import (
    FREE,
    GENERATION_MAX,
    HEADER_BYTES,
    HOME_PLACE,
    LAYOUT_VERSION,
    RESERVED,
    SEALED,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPY,
    Header,
    Superblock,
    fields,
    hint_of,
    hints_of,
    home_of,
    layout_of,
    newest_superblock,
    of_reserved,
    pack,
    pack_home,
    pack_superblock,
    superblock_place,
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


@each("state", [FREE, SEALED])
@each("generation", [0, 1, (1 << 24) - 1, 1 << 24, GENERATION_MAX])
def test_a_word_has_its_state_in_the_first_byte_and_its_generation_from_the_third(
    state: int, generation: int
) -> None:
    assert word(state, generation) == generation << 16 | state


def test_a_header_of_another_state_is_none_though_its_checksum_is_right() -> None:
    raw = pack((9, bytes(32), 40, 0, 1, 0, 99, 0))
    assert fields(raw) is not None
    freed = bytes([FREE]) + raw[1:60]
    assert fields(freed + crc32(freed).to_bytes(4, "little")) is None


# --- the first page ---------------------------------------------------------------


def superblock_of(magic: bytes = b"kvstore1", version: int = LAYOUT_VERSION) -> bytes:
    """A superblock whose checksum is right, of that kind of file and layout."""
    raw = struct.pack("<8sIIQQI", magic, version, 0, 7, 1 << 20, 3)
    return raw + crc32(raw).to_bytes(4, "little")


def test_a_whole_superblock_of_another_layout_or_file_is_not_ours() -> None:
    assert unpack_superblock(superblock_of()) == Superblock(7, 3, 0, 1 << 20)
    assert unpack_superblock(superblock_of(version=LAYOUT_VERSION + 1)) is None
    assert unpack_superblock(superblock_of(magic=b"kvstore2")) is None


def test_a_page_says_its_layout_though_it_is_not_ours_or_damaged() -> None:
    for version in (1, LAYOUT_VERSION, 99):
        without_checksum = superblock_of(version=version)[:-4]
        assert layout_of(without_checksum) == version
    assert layout_of(without_checksum[:-1]) is None
    assert layout_of(superblock_of(magic=b"kvstore2")) is None


def page_of(*epochs: int | None) -> bytes:
    """A first page with two copies, each of the start of that epoch; None: a damaged one."""
    page = bytearray(SUPERBLOCK_BYTES)
    for place, epoch in zip((0, SUPERBLOCK_COPY), epochs, strict=True):
        raw = b"" if epoch is None else pack_superblock(Superblock(7, epoch, 0, 1 << 20))
        page[place : place + len(raw)] = raw
    return bytes(page)


@pytest.mark.parametrize(
    ("epochs", "place"),
    [((3, None), SUPERBLOCK_COPY), ((None, 3), 0), ((4, 3), SUPERBLOCK_COPY), ((3, 4), 0)],
)
def test_the_next_start_writes_over_the_older_or_damaged_copy(
    epochs: tuple[int | None, int | None], place: int
) -> None:
    page = page_of(*epochs)
    last = max(epoch for epoch in epochs if epoch is not None)
    assert newest_superblock(page) == Superblock(7, last, 0, 1 << 20)
    assert superblock_place(page) == place


def page_with(home: bytes) -> bytes:
    page = bytearray(SUPERBLOCK_BYTES)
    page[HOME_PLACE : HOME_PLACE + len(home)] = home
    return bytes(page)


LONGEST_HOME = "/" + "a" * (SUPERBLOCK_COPY - HOME_PLACE - 3)


@pytest.mark.parametrize("home", ["/", "/run/nodes/n", "/run/\udcff", LONGEST_HOME])
def test_a_home_is_read_as_it_was_written(home: str) -> None:
    raw = pack_home(home)
    assert raw[:2] == (len(raw) - 2).to_bytes(2, "little")
    assert len(raw) <= SUPERBLOCK_COPY - HOME_PLACE, "the second superblock stands behind it"
    assert home_of(page_with(raw)) == Path(home)


@pytest.mark.parametrize(
    "raw", [b"", pack_home(""), b"\5\0/a\0/b", b"\xff\xff/a"], ids=["no", "empty", "NUL", "long"]
)
def test_a_page_that_says_no_home_has_none(raw: bytes) -> None:
    assert home_of(page_with(raw)) is None


def test_a_home_that_reaches_into_the_second_superblock_is_not_written() -> None:
    assert pack_home(LONGEST_HOME + "b") == pack_home("") == bytes(2)


# --- hints ------------------------------------------------------------------------


@each(("slots", "hints"), [(1, 4), (2, 8), (3, 16), (4, 16), (5, 32), (32, 128)])
def test_a_slot_has_four_hints_or_up_to_eight(slots: int, hints: int) -> None:
    assert hints_of(slots) == hints


def test_a_key_has_its_hint_where_bytes_8_to_11_say() -> None:
    key = bytes(range(1, 33))
    assert hint_of(key, 1 << 40) == 0x0C0B0A09
    assert hint_of(key, 128) == 9
