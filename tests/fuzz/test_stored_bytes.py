"""Whatever lies in Redis, in a segment or beside a value, a reader gets a value or a miss."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import fuzz
from segment_bytes import head_of, hints_in_head

from kvstore.client.explanation import MissReason, Unreadable
from kvstore.client.nodes.known import Attached, KnownNode
from kvstore.client.nodes.readability import Readability
from kvstore.client.payloads import tensors
from kvstore.client.reader import Reader
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.nodedir import NodeDir
from kvstore.record import RecordSigner, pack_record, unpack_record
from kvstore.segment import header
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.types import Kind, Location

KEY = bytes(range(32))
KIB = 1 << 10
HALF_BYTES = 64 * KIB
BLOCK = Superblock(node_id=7, epoch=3, segment=0, size_bytes=2 * HALF_BYTES)
SLOTS = 2 * HALF_BYTES // 4096

locations = st.builds(
    Location,
    node_id=st.sampled_from([7, 8]),
    epoch=st.sampled_from([3, 4]),
    segment=st.integers(0, 1),
    slot=st.one_of(st.integers(0, SLOTS + 2), st.integers(0, 2**32 - 1)),
    generation=st.integers(0, 2),
    granule=st.integers(0, 255),
    length=st.one_of(st.integers(0, 3 * HALF_BYTES), st.integers(0, 2**32 - 1)),
    checksum=st.integers(0, 2**64 - 1),
)


@fuzz(300)
@given(key=st.binary(max_size=40), record=st.binary(max_size=80))
def test_any_bytes_are_a_location_or_none(key: bytes, record: bytes) -> None:
    found = unpack_record(key, record)
    assert found is None or isinstance(found, Location)
    assert RecordSigner(b"s" * 16, "kv:a").right(key, record) is False


@fuzz(300)
@given(raw=st.binary(min_size=64, max_size=64), state=st.integers(0, 255))
def test_any_64_bytes_are_a_sealed_header_or_none(raw: bytes, state: int) -> None:
    """Also with a CRC that is right."""
    for image in (
        raw,
        bytes([state]) + raw[1:60] + crc32(bytes([state]) + raw[1:60]).to_bytes(4, "little"),
    ):
        found = header.unpack(image)
        assert found is None or (image[0] == header.SEALED and found.key == image[8:40])


@fuzz(200)
@given(
    head=st.binary(max_size=200),
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5),
    size=st.integers(0, 3 * 4096),
)
def test_any_file_is_a_segment_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, head: bytes, numbers: list[int], size: int
) -> None:
    """Random bytes, and superblocks whose CRC is right and whose numbers are wild."""
    folder = tmp_path_factory.mktemp("segment")
    body = struct.pack("<8sIIQQIIII", b"kvstore1", header.LAYOUT_VERSION, *numbers, 0, 0)
    whole = body + crc32(body).to_bytes(4, "little")
    for raw in (head, whole, whole + bytes(size)):
        (folder / "head").write_bytes(raw)
        (folder / "data").write_bytes(bytes(size))
        with pytest.raises((ValueError, OSError)):
            AttachedShm(folder / "data", folder / "head")


class _Nodes:
    """One node's segment, mapped."""

    machine = REAL

    def __init__(self, attached: Attached) -> None:
        self.mapped = (attached,)

    def segment(self, node_id: int, epoch: int, now: float) -> Attached | None:
        return self.mapped[0] if (node_id, epoch) == (7, 3) else None

    def entry(self, node_id: int, epoch: int) -> KnownNode:
        return KnownNode(epoch)

    def check(self, now: float) -> None:
        return None

    def map_ours(self, now: float) -> bool:
        return False  # it is mapped


class _Nobody:
    """No node of another host."""

    def node(self, node_id: int, epoch: int, now: float) -> None:
        return None

    def why_not(self, node_id: int, epoch: int) -> Unreadable:
        return Unreadable(MissReason.OUT_OF_REACH, "")


@fuzz(200)
@given(
    location=locations,
    seen=st.tuples(
        st.integers(0, 2),
        st.sampled_from([KEY, bytes(32)]),
        st.one_of(st.integers(0, 3 * HALF_BYTES), st.integers(0, 2**32 - 1)),
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
    ),
    at=st.integers(0, SLOTS - 1),
    hint=st.integers(0, 2**32 - 1),
    agree=st.booleans(),
)
def test_any_record_over_any_header_is_a_place_inside_the_segment_or_none(
    tmp_path_factory: pytest.TempPathFactory,
    location: Location,
    seen: header.Fields,
    at: int,
    hint: int,
    agree: bool,
) -> None:
    folder = tmp_path_factory.mktemp("place")
    owned = OwnedShm(folder / "s", BLOCK)
    shm = AttachedShm(owned.data_path, owned.head_path)
    attached = Attached(BLOCK, shm, NodeDir(folder, "node"), ours=True)  # type: ignore[arg-type]
    reader = Reader(MemoryIndex(), Readability(_Nodes(attached), _Nobody(), verifies=False))  # type: ignore[arg-type]
    if agree:  # so that more than the first comparison is reached
        location = location._replace(node_id=7, epoch=3, segment=0, slot=at, generation=seen[0])
        location = location._replace(length=seen[2], granule=seen[3])
    start = header.SUPERBLOCK_BYTES + at * header.HEADER_BYTES
    head_of(owned)[start : start + header.HEADER_BYTES] = header.pack(seen)
    hints = hints_in_head(owned)
    hints[header.hint_of(KEY, len(hints))] = at if agree else hint % (SLOTS + len(hints))
    try:
        places = [reader.place(KEY, pack_record(KEY, location)), *reader.search([KEY])]
        for place in places:
            if place is not None:
                assert len(place.buffer) == seen[2] <= 2 * HALF_BYTES
                assert len(place.data) == seen[2] - seen[5]
                place.valid()
                place.verified()
    finally:
        for place in places:
            if place is not None:
                place.data.release()
                place.buffer.release()
        hints.release()
        shm.close()
        owned.close()


numpy = pytest.importorskip("numpy")
dtypes = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            *("<f4", "|u1", "|O", "<O8", "|V8", "<V0", "<U4", "|S3", "<M8[ns]", "<f4,<i8", "=f8"),
            *("bfloat16", "float32", "finfo", "iinfo", "load", "__doc__", "Tensor", "dtype"),
            *("<(2,3)f4", "<f4" * 20, "|S0", "<U0"),
        ]
    ),
)
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.integers(-(1 << 62), 1 << 62), max_size=40),
    st.lists(st.one_of(st.text(max_size=2), st.none(), st.booleans(), st.floats()), max_size=3),
)


@fuzz(500)
@given(
    kind=st.sampled_from([Kind.NUMPY, Kind.TORCH, Kind.BYTES, 9, 255]),
    meta=st.one_of(
        st.binary(max_size=255),
        st.tuples(dtypes, shapes).map(lambda pair: tensors.msgpack.packb(list(pair))),
    ),
    size_bytes=st.integers(0, 500),
)
def test_any_description_is_a_value_of_that_size_or_a_value_error(
    kind: int, meta: bytes, size_bytes: int
) -> None:
    """Never an array of Python objects: its bytes would be taken for pointers."""
    try:
        value, target = tensors.make(kind, meta, size_bytes)
    except ValueError:  # a UsageError too: a library that is not installed
        return
    assert target.nbytes == size_bytes
    assert not target.readonly
    assert not getattr(getattr(value, "dtype", None), "hasobject", False)
