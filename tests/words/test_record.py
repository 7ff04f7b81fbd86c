import json
import random
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from kvstore.record import (
    RECORD_BYTES,
    RECORD_VERSION,
    SIGNED_RECORD_BYTES,
    RecordSigner,
    node_start,
    node_start_of,
    pack_each,
    pack_record,
    slot_of,
    unpack_record,
)
from kvstore.types import Location

KEY = bytes(range(32))
locations = st.builds(
    Location,
    node_id=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    segment=st.integers(0, 2**16 - 1),
    slot=st.integers(0, 2**32 - 1),
    generation=st.integers(0, 2**56 - 1),
    granule=st.integers(0, 255),
    length=st.integers(0, 2**32 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(locations)
def test_a_record_gives_back_the_location_it_was_made_of(location):
    assert unpack_record(KEY, pack_record(KEY, location)) == location


@given(locations, locations)
def test_a_record_tells_the_start_of_its_node_and_of_no_other(one, other):
    start = node_start_of(KEY, pack_record(KEY, one))
    same = (one.node_id, one.epoch) == (other.node_id, other.epoch)
    assert start is not None
    assert (start == node_start_of(KEY, pack_record(KEY, other))) is same
    moved = other._replace(node_id=one.node_id, epoch=one.epoch)
    assert node_start_of(KEY, pack_record(KEY, moved)) == start


@given(locations)
def test_a_record_tells_its_slot_without_its_key(location):
    assert slot_of(pack_record(KEY, location)) == (location.slot, location.generation)


@given(st.lists(locations, max_size=5))
def test_records_of_many_blocks_are_those_of_each(wanted):
    """Each leads back to its own location, of one start of one node."""
    start, blocks, expected = node_start(1 << 63, 7), [], []
    for number, one in enumerate(wanted):
        key = bytes([number]) * 32
        place = one._replace(
            node_id=1 << 63, epoch=7, segment=0, generation=one.generation % (1 << 48)
        )
        expected.append(pack_record(key, place))
        parts = (place.slot, place.generation, key, place.length, place.granule)
        blocks.append((*parts, 3, 4, place.checksum, 5))
    assert pack_each(start, blocks) == expected


def test_a_record_stays_small_enough_for_embstr():
    assert RECORD_BYTES == 44


@given(locations, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_record_with_any_bit_flipped_is_none(location, bit):
    record = bytearray(pack_record(KEY, location))
    record[bit // 8] ^= 1 << bit % 8
    assert unpack_record(KEY, bytes(record)) is None
    assert node_start_of(KEY, bytes(record)) is None


@given(locations)
def test_a_record_under_another_key_is_none(location):
    assert unpack_record(bytes(32), pack_record(KEY, location)) is None
    assert node_start_of(bytes(32), pack_record(KEY, location)) is None


@given(locations)
def test_a_record_of_another_version_is_none_even_when_it_is_whole(location):
    body = pack_record(KEY, location)[:-4]
    for version in (0, RECORD_VERSION - 1, RECORD_VERSION + 1, 255):
        other = bytes([version]) + body[1:]
        assert unpack_record(KEY, other + crc32(other, crc32(KEY)).to_bytes(4, "little")) is None


@given(locations)
def test_a_checksum_that_leaves_out_the_key_makes_no_record(location):
    body = pack_record(KEY, location)[:-4]
    for crc in (crc32(body), crc32(body, crc32(b"")), crc32(KEY), 0):
        assert unpack_record(KEY, body + crc.to_bytes(4, "little")) is None


def test_bytes_of_any_length_are_none_or_a_location_and_never_an_error():
    rng = random.Random(1)
    for length in range(100):
        assert unpack_record(KEY, rng.randbytes(length)) is None


SIGNER = RecordSigner(b"a secret of the tenant", "kv:a")


@given(locations)
def test_a_signed_record_is_right_and_still_says_where(location: Location) -> None:
    record = SIGNER.signed(KEY, pack_record(KEY, location))
    assert len(record) == SIGNED_RECORD_BYTES == 60
    assert SIGNER.right(KEY, record)
    assert unpack_record(KEY, record) == location


@given(locations, st.integers(0, SIGNED_RECORD_BYTES * 8 - 1))
def test_no_signed_record_may_be_changed(location: Location, bit: int) -> None:
    record = bytearray(SIGNER.signed(KEY, pack_record(KEY, location)))
    record[bit // 8] ^= 1 << bit % 8
    assert not SIGNER.right(KEY, bytes(record))


@given(locations)
def test_a_signature_is_of_one_key_tenant_and_secret(location: Location) -> None:
    plain = pack_record(KEY, location)
    record = SIGNER.signed(KEY, plain)
    assert not SIGNER.right(bytes(32), record)
    assert not SIGNER.right(KEY, plain)
    for other in (
        RecordSigner(b"a secret of the tenant", "kv:b"),
        RecordSigner(b"a secret of another tenant", "kv:a"),
    ):
        assert not other.right(KEY, record)


def test_a_signed_announcement_is_the_object_with_one_field_more_and_right() -> None:
    signer = RecordSigner(b"secret", "kv:")
    raw = signer.announcement(b'{"node": 5, "up": true}')
    said = json.loads(raw)
    assert (said.pop("node"), said.pop("up")) == (5, True)
    assert len(said.pop("signature")) == 32
    assert not said
    assert signer.announced(raw)
    assert not RecordSigner(b"other", "kv:").announced(raw)
    assert not RecordSigner(b"secret", "kv:x").announced(raw)


def test_an_announcement_with_any_byte_changed_added_or_left_out_is_not_right() -> None:
    signer = RecordSigner(b"secret", "kv:")
    raw = signer.announcement(b'{"node": 5}')
    for at in range(len(raw)):
        assert not signer.announced(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert not signer.announced(raw[:at] + raw[at + 1 :])
        assert not signer.announced(raw[:at])
        assert not signer.announced(raw[at + 1 :])
    assert not signer.announced(raw + b" ")
    assert not signer.announced(signer.announcement(b"}")[:-1])


def test_another_version_of_this_code_signs_the_same() -> None:
    """Nodes and clients of two versions run beside each other."""
    signer = RecordSigner(b"secret", "kv:")
    record = bytes(RECORD_BYTES)
    assert signer.signed(KEY, record)[RECORD_BYTES:].hex() == "82cd5561d7a5981783a4d532fbe31bbc"
    assert signer.announcement(b"{}") == b'{, "signature": "0326dbab9284f4c2af20e9d0e88bc7b2"}'


def test_only_a_signed_record_can_be_right() -> None:
    signer = RecordSigner(b"secret", "kv:")
    signed = signer.signed(KEY, bytes(RECORD_BYTES))
    assert signer.right(KEY, signed)
    for end in range(len(signed)):
        assert not signer.right(KEY, signed[:end])
    assert not signer.right(KEY, signed + b"x")
