"""How a found value becomes the caller's, and what is counted: over one mapped segment and one node
on another host (reader_parts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from batch_readers import LeavesAll
from reader_parts import AWAY, KEY, VALUE, Counting, Nodes, Remote, key_of, readable, save
from segment_bytes import data_of

from kvstore import UsageError
from kvstore.client.reader import Reader
from kvstore.client.values.getting import ValueGetter
from kvstore.core.events import Mark
from kvstore.index.base import KeyRecord
from kvstore.record import pack_record
from kvstore.segment.shm import OwnedShm
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.types import Key, Kind, Location

NOW = 1024.0
ABSENT = key_of(9)
META = b"\x92\xa3<i4\x91\xcd\x00\xf8"  # msgpack of ["<i4", [248]]
assert len(VALUE) - len(META) == 991


class Far(Remote):
    """Has one value under each key, and remembers by which keys it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, bytes] = {}
        self.kind, self.meta_length = int(Kind.BYTES), 0
        self.reads: list[list[Key]] = []

    def timeout_s(self, size_bytes: int) -> float:
        return 1.0

    def there(self, blocks: Sequence[tuple[Key, Location]]) -> list[bool]:
        return [len(self.values.get(key, b"")) == at.length for key, at in blocks]

    def read(self, wanted: Sequence[Wanted], deadline: float | None = None) -> list[Outcome]:
        self.reads.append([one.key for one in wanted])
        return [self._read(one) for one in wanted]

    def _read(self, one: Wanted) -> Outcome:
        value = self.values.get(one.key, b"")
        if len(value) != one.location.length:
            return Outcome(Read.MISS)
        at = 0
        for part in one.into:
            part[:] = value[at : at + part.nbytes]
            at += part.nbytes
        return Outcome(Read.HIT, kind=self.kind, meta_length=self.meta_length)


class Place:
    """A getter, and all that it stands on."""

    def __init__(self, nodes: Nodes, verify: str = "remote") -> None:
        self.nodes = nodes
        self.index = Counting()
        self.far = Far()
        self.reader = Reader(self.index, readable(nodes, self.far))
        self.touched: list[tuple[list[Key], float]] = []
        session = SimpleNamespace(
            machine=SimpleNamespace(monotonic=lambda: NOW),
            reader=self.reader,
            verify=verify,
            nodes=nodes,
            writer=SimpleNamespace(touch=lambda keys, now: self.touched.append((list(keys), now))),
        )
        self.getter = ValueGetter(session)  # type: ignore[arg-type]

    def away(self, key: Key, value: bytes, *, length: int | None = None) -> None:
        """Put it on the other host; the index says that it has `length`."""
        self.far.values[key] = value
        at = AWAY._replace(length=len(value) if length is None else length)
        self.index.publish([KeyRecord(key, pack_record(key, at))])

    def counted(self, hits: int, misses: int, hit_bytes: int) -> bool:
        return self.getter.counts == {"hits": hits, "misses": misses, "hit_bytes": hit_bytes}

    def counted_away(self, hits: int, hit_bytes: int) -> bool:
        return self.getter.remote_counts == {"hits": hits, "hit_bytes": hit_bytes}


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read by the batch (kvstore/segment/batch_read.py)."""
    monkeypatch.setattr("kvstore.segment.batch_read.READER", LeavesAll())


@pytest.fixture
def place(nodes: Nodes) -> Place:
    return Place(nodes)


@pytest.fixture
def careful(nodes: Nodes) -> Place:
    return Place(nodes, "always")


def test_a_hit_of_this_host_is_the_value_counted_and_said_to_have_been_used(
    owned: OwnedShm, place: Place
) -> None:
    save(owned)
    assert place.counted(0, 0, 0)
    assert place.counted_away(0, 0)
    assert place.getter.get(KEY, None) == VALUE
    out = bytearray(1500)
    assert place.getter.get(KEY, out) == VALUE
    assert bytes(out) == VALUE + bytes(500)
    assert place.counted(2, 0, 2000)
    assert place.counted_away(0, 0)
    assert place.touched == [([KEY], NOW)] * 2
    assert place.reader.miss_reasons == {}


def test_a_miss_is_none_and_touches_nothing(place: Place) -> None:
    assert place.getter.get(KEY, None) is None
    assert place.getter.get_many([KEY, ABSENT], [None, "not judged where nothing is"]) == [None] * 2
    assert place.counted(0, 3, 0)
    assert place.touched == []
    assert place.reader.miss_reasons == {}
    assert place.getter.get_many([], []) == []
    assert place.touched == []


def test_of_several_those_that_are_there_are_touched(owned: OwnedShm, place: Place) -> None:
    save(owned)
    place.away(key_of(2), b"2" * 500)
    got = place.getter.get_many([ABSENT, KEY, key_of(2)], [None] * 3)
    assert got == [None, VALUE, b"2" * 500]
    assert place.touched == [([KEY, key_of(2)], NOW)]
    assert place.counted(2, 1, 1500)
    assert place.counted_away(1, 500)
    assert place.getter.get_many([KEY], [None]) == [VALUE]
    assert place.touched[1:] == [([KEY], NOW)]


@pytest.mark.usefixtures("one_by_one")
def test_a_place_seen_before_is_used_again_of_nodes_that_live(
    owned: OwnedShm, place: Place
) -> None:
    save(owned)
    assert place.getter.get(KEY, None) == VALUE
    assert place.nodes.checks == 1
    seen = place.reader.remembered[KEY]
    assert place.getter.get(KEY, None) == VALUE
    assert place.nodes.checks == 2
    assert place.getter.get_many([KEY], [None]) == [VALUE]
    assert place.reader.remembered[KEY] is seen
    owned.apply(Mark(3, 0, 1))
    assert place.getter.get(KEY, None) is None
    assert place.counted(3, 1, 3000)
    assert place.reader.miss_reasons == {"load-failed": 1}


# --- other hosts ------------------------------------------------------------


def test_a_hit_of_another_host_is_remembered_there(place: Place) -> None:
    place.away(KEY, VALUE)
    assert place.getter.get(KEY, None) == VALUE
    assert place.getter.get(KEY, bytearray(1000)) == VALUE
    assert len(place.index.asked) == 1
    assert place.counted(2, 0, 2000)
    assert place.counted_away(2, 2000)
    place.far.values.clear()
    assert place.getter.get(KEY, None) is None
    assert place.reader.miss_reasons == {"load-failed": 2}
    assert len(place.index.asked) == 2, "it may be elsewhere by now"


@pytest.mark.usefixtures("one_by_one")
def test_what_a_node_does_not_have_although_the_index_just_said_so_is_asked_for_once(
    place: Place,
) -> None:
    place.away(KEY, VALUE)
    place.far.values.clear()
    assert place.getter.get_many([KEY, ABSENT], [None, None]) == [None, None]
    assert place.far.reads == [[KEY]]
    assert place.reader.miss_reasons == {"load-failed": 1}
    assert place.nodes.checks == 2


def test_a_value_that_grew_meanwhile_does_not_make_a_right_out_wrong(place: Place) -> None:
    place.reader.seen_remote(KEY, AWAY._replace(length=1100))
    place.away(KEY, VALUE)
    place.far.there = lambda blocks: [True] * len(blocks)  # type: ignore[method-assign]
    out = bytearray(1000)
    assert place.getter.get(KEY, out) == VALUE
    assert bytes(out) == VALUE


def test_an_out_that_is_too_small_is_so_after_two_looks_however_often_others_remember_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.away(KEY, b"v" * 1100)
    looks: list[None] = []
    search = place.reader.search

    def searched(keys: Sequence[Key], *, remembered: bool = False) -> Any:
        looks.append(None)
        place.reader.seen_remote(KEY, AWAY._replace(length=1100))
        return search(keys, remembered=remembered)

    monkeypatch.setattr(place.reader, "search", searched)
    with pytest.raises(UsageError, match="1100 bytes"):
        place.getter.get(KEY, bytearray(1000))
    assert len(looks) == 2


@pytest.mark.usefixtures("one_by_one")
def test_an_out_that_is_too_small_for_what_is_here_is_refused_at_once(
    owned: OwnedShm, place: Place
) -> None:
    save(owned)
    out = bytearray(999)
    with pytest.raises(UsageError, match="1000 bytes"):
        place.getter.get_many([KEY], [out])
    assert not any(out)
    assert place.nodes.checks == 2


# --- values that leave while they are read ----------------------------------


def leaves_while_read(place: Place, owned: OwnedShm, monkeypatch: pytest.MonkeyPatch) -> None:
    read = place.reader.read

    def late(*arguments: Any) -> Any:
        owned.apply(Mark(3, 0, 1))
        return read(*arguments)

    monkeypatch.setattr(place.reader, "read", late)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("room", [None, 1000, 10])
def test_what_left_while_it_was_read_is_looked_for_once_more_and_lost(
    owned: OwnedShm, place: Place, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    save(owned)
    leaves_while_read(place, owned, monkeypatch)
    out = None if room is None else bytearray(room)
    assert place.getter.get_many([KEY, ABSENT], [out, None]) == [None, None]
    assert place.counted(0, 2, 0)
    assert place.reader.miss_reasons == {"load-failed": 1}
    assert place.nodes.checks == 3
    assert place.touched == []
    assert place.reader.remembered == {}


@pytest.mark.usefixtures("one_by_one")
def test_what_left_is_read_where_it_is_now(
    owned: OwnedShm, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(owned)
    place.away(KEY, b"2" * 500)
    save(owned, key=key_of(2), slot_id=4)
    leaves_while_read(place, owned, monkeypatch)
    out = bytearray(500)
    got = place.getter.get_many([key_of(2), KEY, ABSENT], [None, out, None])
    assert got == [VALUE, b"2" * 500, None]
    assert bytes(out) == b"2" * 500
    assert place.counted(2, 1, 1500)
    assert place.nodes.checks == 3
    assert place.index.asked == [[ABSENT], [KEY]]


# --- descriptions, and checksums --------------------------------------------


def described(owned: OwnedShm, *, checksum: int = 0, kind: Kind = Kind.NUMPY) -> bytes:
    """A saved value of 248 numbers, or with a description that is damaged."""
    value = VALUE[: -len(META)] + META
    save(owned, meta_length=len(META), checksum=checksum, kind=kind)
    data_of(owned)[3 * 4096 : 3 * 4096 + 1000] = value
    return value


@pytest.mark.usefixtures("one_by_one")
def test_what_cannot_be_made_of_its_description_is_lost(owned: OwnedShm, place: Place) -> None:
    pytest.importorskip("numpy")
    described(owned)  # 248 numbers of 4 bytes are not 991 bytes
    assert place.getter.get(KEY, None) is None
    assert place.reader.miss_reasons == {"load-failed": 1}
    assert place.reader.remembered == {}
    assert place.nodes.checks == 1


def test_an_array_is_made_of_its_bytes_here_and_of_another_host(
    owned: OwnedShm, place: Place
) -> None:
    numpy = pytest.importorskip("numpy")
    numbers = numpy.arange(248, dtype="<i4")
    meta = b"\x92\xa3<i4\x91\xcc\xf8"
    payload = numbers.tobytes() + meta
    save(owned, meta_length=len(meta), kind=Kind.NUMPY, value=payload)
    place.far.kind, place.far.meta_length = int(Kind.NUMPY), len(meta)
    place.away(key_of(2), payload)
    for key in (KEY, key_of(2)):
        assert (place.getter.get(key, None) == numbers).all()
        assert (place.getter.get(key, numpy.zeros(248, "<i4")) == numbers).all()
        assert bytes(place.getter.get(key, bytearray(992))) == numbers.tobytes()
        with pytest.raises(UsageError, match="give such an array"):
            place.getter.get(key, numpy.zeros(248, "<f4"))
        raw = bytearray(5000)
        assert bytes(place.getter.get(key, raw)) == numbers.tobytes()
        assert not any(raw[992:])


@pytest.mark.parametrize("kind", [Kind.BYTES, Kind.BLOCK])
def test_blocks_and_bytes_are_bytes(owned: OwnedShm, place: Place, kind: Kind) -> None:
    save(owned, kind=kind)
    assert type(place.getter.get(KEY, None)) is bytes


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_who_verifies_always_compares_what_was_copied_with_its_checksum(
    owned: OwnedShm, place: Place, careful: Place, right: bool, into: bool
) -> None:
    save(owned, checksum=xxhash.xxh3_64_intdigest(VALUE) ^ (not right))
    out = bytearray(1000) if into else None
    assert place.getter.get(KEY, out) == VALUE
    got = careful.getter.get(KEY, out)
    assert got == (VALUE if right else None)
    assert careful.counted(int(right), int(not right), 1000 * right)
    assert careful.reader.miss_reasons == ({} if right else {"corrupt": 1})
    assert careful.touched == [([KEY], NOW)] * right


def test_what_came_from_another_host_was_compared_on_its_way(careful: Place) -> None:
    careful.away(KEY, VALUE)
    assert careful.getter.get(KEY, None) == VALUE
    assert careful.reader.miss_reasons == {}
