"""The two stages of a lookup and why each ends, over one mapped segment and one node on another
host (reader_parts.py).

Longer than other files: one class is under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_readers import READERS, reader_of
from reader_parts import AWAY, HERE, KEY, SIGNER, Counting, Nodes, Remote, key_of, readable, save
from segment_bytes import head_of
from stores import announcement

from kvstore import MissReason
from kvstore.client import block_lookup
from kvstore.client.base import BlockRef
from kvstore.client.block_lookup import BlockLookup, found_here
from kvstore.client.reader import Reader
from kvstore.index.base import KeyRecord
from kvstore.record import node_start, pack_record
from kvstore.segment import batch_read
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.types import Key, Location, Tier

KEYS = [key_of(number) for number in range(1, 6)]
ELSEWHERE = AWAY._replace(node_id=9)
"""On a host that cannot be reached."""
NOW = 1024.0


class Ticking:
    """A clock that a second passes by at each look."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        self.s += 1.0
        return self.s


class Questions(Counting):
    """An index that takes its time."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _ask(self, keys: Sequence[Key]) -> None:
        self.meanwhile()
        super()._ask(keys)


class Lookups:
    """A lookup and all that it stands on. The clock stands still unless somebody moves it."""

    def __init__(self, nodes: Nodes, **options: Any) -> None:
        signer = options.get("signer")
        self.now = NOW
        nodes.machine = SimpleNamespace(monotonic=lambda: self.now)  # type: ignore[assignment]
        self.nodes = nodes
        self.index = Questions(options.get("answers", float("inf")))
        self.remote = options.get("remote") or Remote()
        self.reader = Reader(self.index, readable(nodes, self.remote), signer=signer)
        self.lookup = BlockLookup(self.index, self.reader, signer, index_timeout_s=0.5)

    def publish(self, where: dict[Key, Any]) -> None:
        """Locations, or records as they are."""
        records = {
            key: pack_record(key, at) if isinstance(at, Location) else at
            for key, at in where.items()
        }
        self.index.publish([KeyRecord(*pair) for pair in records.items()])

    def index_takes(self, seconds: float) -> None:
        self.index.meanwhile = lambda: setattr(self, "now", self.now + seconds)

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> Any:
        run = self.lookup.match(keys, timeout_s)
        assert [one.key for one in run] == list(keys[: len(run)])
        return len(run), run.short

    def found(self, keys: Sequence[Key], timeout_s: float | None = None) -> Any:
        answers = self.lookup.lookup(keys, timeout_s)
        assert all(one is None or one.key == key for one, key in zip(answers, keys, strict=True))
        return [one is not None for one in answers], answers.short


@pytest.fixture(params=READERS, autouse=True)
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_read, "READER", reader_of(request.param))


@pytest.fixture
def lookups(nodes: Nodes) -> Lookups:
    return Lookups(nodes)


# --- this host's memory -----------------------------------------------------


def everywhere(nodes: Nodes, keys: Sequence[Key], give_up_at: float) -> list[bool]:
    nodes.machine = SimpleNamespace(monotonic=Ticking())  # type: ignore[assignment]
    found = found_here(nodes, None, keys, give_up_at)  # type: ignore[arg-type]
    return [one is not None for one in found]


def test_with_a_deadline_every_segment_is_searched_until_then(
    owned: OwnedShm, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is looked at once at the start, and before each part of the keys."""
    monkeypatch.setattr(block_lookup, "KEYS_AT_ONCE", 2)
    save(owned)
    nodes.attached.ours = False
    nodes.mapped, nodes.unmapped = (), nodes.mapped
    for give_up_at, count in ((1.0, 0), (2.0, 0), (3.0, 2), (4.0, 4), (5.0, 5)):
        assert everywhere(nodes, [KEY] * 5, give_up_at) == [True] * count


def test_without_one_those_of_the_own_index_are_searched_and_found_unless_records_are_signed(
    owned: OwnedShm, nodes: Nodes
) -> None:
    save(owned)
    for signer in (None, SIGNER):
        (one,) = found_here(nodes, signer, [KEY])  # type: ignore[arg-type]
        record = pack_record(KEY, HERE)
        assert one == BlockRef(KEY, record if signer is None else signer.signed(KEY, record))
        nodes.attached.records.clear()
    assert nodes.finds == [True, False]
    nodes.attached.ours = False
    assert list(found_here(nodes, None, [KEY])) == [None]  # type: ignore[arg-type]


def test_the_record_of_a_header_is_made_once_while_there_is_room_for_it(
    owned: OwnedShm, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a reader does not make them anew in less time than they are looked up in."""
    monkeypatch.setattr(batch_read, "READER", reader_of("Python"))
    monkeypatch.setattr(block_lookup, "RECORDS_KEPT_MAX", 2)
    for slot_id, key in enumerate(KEYS[:3], 1):
        save(owned, key=key, slot_id=slot_id)

    def found(key: Key) -> Any:
        (one,) = found_here(nodes, None, [key])  # type: ignore[arg-type]
        return one

    first, second = found(KEYS[0]), found(KEYS[1])
    assert found(KEYS[0]) is first
    assert found(KEYS[1]) is second
    third = found(KEYS[2])
    assert len(nodes.attached.records) == 1
    assert found(KEYS[2]) is third
    assert found(KEYS[0]) == first


def test_what_was_made_of_a_header_is_nothing_to_the_next_one_in_its_slot(
    owned: OwnedShm, nodes: Nodes
) -> None:
    for generation, key in enumerate((KEYS[0], KEYS[1], KEYS[1]), 1):
        save(owned, key=key, generation=generation)
        (other, one) = found_here(nodes, None, [KEYS[generation == 1], key])  # type: ignore[arg-type]
        record = pack_record(key, HERE._replace(generation=generation))
        assert one == BlockRef(key, record)
        assert other is None


def test_of_several_segments_each_is_looked_into(
    owned: OwnedShm, nodes: Nodes, tmp_path: Path
) -> None:
    save(owned, key=KEYS[0], slot_id=1)
    second = OwnedShm(tmp_path / "second", Superblock(8, 1, 0, 128 << 10))
    save(second, key=KEYS[1], slot_id=2)
    beside = Nodes(second).attached
    beside.start = node_start(8, 1)
    beside.announcement = announcement(node_id=8, epoch=1)
    nodes.mapped = (nodes.attached, beside)
    found = list(found_here(nodes, None, KEYS[:3]))  # type: ignore[arg-type]
    assert found == [
        BlockRef(KEYS[0], pack_record(KEYS[0], HERE._replace(slot=1))),
        BlockRef(KEYS[1], pack_record(KEYS[1], HERE._replace(node_id=8, slot=2))),
        None,
    ]
    beside.shm.close()
    second.close()


def test_a_signed_record_is_made_once(owned: OwnedShm, nodes: Nodes) -> None:
    save(owned)
    (first,) = found_here(nodes, SIGNER, [KEY])  # type: ignore[arg-type]
    (again,) = found_here(nodes, SIGNER, [KEY])  # type: ignore[arg-type]
    assert again is first


@pytest.mark.parametrize("granule", [4, 255])
def test_a_damaged_header_or_one_that_leads_out_of_its_segment_is_passed_over(
    owned: OwnedShm, nodes: Nodes, granule: int
) -> None:
    save(owned, key=KEYS[0], slot_id=1)
    save(owned, granule, key=KEYS[1], slot_id=2)
    save(owned, key=KEYS[2], slot_id=4)
    head_of(owned)[4096 + 64 + 60] ^= 1
    found = list(found_here(nodes, None, KEYS))  # type: ignore[arg-type]
    assert [one is not None for one in found] == [False, False, True, False, False]


# --- the first stage --------------------------------------------------------


def test_what_is_here_asks_nobody(owned: OwnedShm, lookups: Lookups) -> None:
    for slot_id, key in enumerate(KEYS, 1):
        save(owned, key=key, slot_id=slot_id)
    for timeout_s in (None, 0.0, 1.0):
        assert lookups.match(KEYS, timeout_s) == (5, None)
        assert lookups.found(KEYS[::-1], timeout_s) == ([True] * 5, None)
        assert lookups.match([], timeout_s) == (0, None)
        assert lookups.found([], timeout_s) == ([], None)
    assert lookups.index.asked == []
    assert lookups.reader.miss_reasons == {}


def test_without_time_the_index_is_not_asked(owned: OwnedShm, lookups: Lookups) -> None:
    lookups.publish({KEYS[0]: AWAY, KEYS[2]: AWAY})
    save(owned, key=KEYS[1])
    assert lookups.match(KEYS, 0.0) == (0, MissReason.DEADLINE)
    assert lookups.match(KEYS[1:], 0.0) == (1, MissReason.DEADLINE)
    assert lookups.found(KEYS[:3], 0.0) == ([False, True, False], MissReason.DEADLINE)
    assert lookups.index.asked == []


# --- the index --------------------------------------------------------------


def test_the_index_goes_on_where_this_host_ends(owned: OwnedShm, lookups: Lookups) -> None:
    save(owned, key=KEYS[0])
    lookups.publish({KEYS[1]: AWAY, KEYS[3]: AWAY})
    assert lookups.match(KEYS[:2]) == (2, None)
    assert lookups.match(KEYS) == (2, MissReason.ABSENT)
    assert lookups.index.asked == [KEYS[1:2], KEYS[1:]]
    assert lookups.found(KEYS) == ([True, True, False, True, False], None)
    assert lookups.index.asked[2:] == [KEYS[1:]]
    assert lookups.match(KEYS[2:]) == (0, MissReason.ABSENT)
    assert lookups.reader.miss_reasons == {}


def test_an_answer_that_comes_too_late_is_a_miss(lookups: Lookups) -> None:
    lookups.publish({KEYS[0]: AWAY})
    lookups.index_takes(0.25)
    assert lookups.match(KEYS[:1], 0.25) == (1, None)
    assert lookups.found(KEYS[:1], 0.25) == ([True], None)
    assert lookups.match(KEYS[:1], None) == (1, None)
    assert lookups.reader.miss_reasons == {}
    assert lookups.match(KEYS[:1], 0.125) == (0, MissReason.DEADLINE)
    assert lookups.found(KEYS[:1], 0.125) == ([False], MissReason.DEADLINE)
    assert lookups.reader.miss_reasons == {"deadline": 2}


def test_more_keys_than_one_batch_are_asked_for_once_each(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_lookup, "BATCH_KEYS_MAX", 2)
    lookups.publish(dict.fromkeys(KEYS, AWAY))
    assert lookups.match(KEYS) == (5, None)
    assert lookups.found(KEYS) == ([True] * 5, None)
    batches = [KEYS[:2], KEYS[2:4], KEYS[4:]]
    assert lookups.index.asked == batches * 2
    lookups.index.remove([KeyRecord(KEYS[3], pack_record(KEYS[3], AWAY))])
    lookups.index.asked.clear()
    assert lookups.match(KEYS) == (3, MissReason.ABSENT)
    assert lookups.index.asked == batches[:2]


# --- an index that fails ----------------------------------------------------


@pytest.fixture
def without_index(nodes: Nodes) -> Lookups:
    return Lookups(nodes, answers=0)


def test_without_an_index_what_any_node_of_this_host_has_is_found(
    owned: OwnedShm, without_index: Lookups
) -> None:
    """Also of one that is of another index, as far as anybody knows."""
    lookups = without_index
    save(owned, key=KEYS[0], slot_id=1)
    save(owned, key=KEYS[1], slot_id=2)
    lookups.nodes.attached.ours = False
    assert lookups.match(KEYS[:2]) == (2, None)
    assert lookups.found(KEYS[:2]) == ([True, True], None)
    assert lookups.reader.index_failures == 2
    assert lookups.reader.miss_reasons == {}
    assert lookups.match(KEYS[:3]) == (2, MissReason.INDEX_ERROR)
    assert lookups.found(KEYS[1:3]) == ([True, False], MissReason.INDEX_ERROR)
    assert lookups.reader.index_failures == 4
    assert lookups.reader.miss_reasons == {"index-error": 2}


def test_what_was_found_before_the_index_failed_stays(
    owned: OwnedShm, without_index: Lookups
) -> None:
    save(owned, key=KEYS[1])
    assert without_index.match(KEYS[1:]) == (1, MissReason.INDEX_ERROR)
    assert without_index.found(KEYS[:3]) == ([False, True, False], MissReason.INDEX_ERROR)


@pytest.mark.parametrize(
    ("timeout_s", "took_s", "found"),
    [(None, 9.0, True), (1.0, 0.5, True), (1.0, 1.0, False), (1.0, 1.5, False)],
)
def test_this_host_is_searched_in_what_is_left_of_the_time(
    owned: OwnedShm, without_index: Lookups, timeout_s: float | None, took_s: float, found: bool
) -> None:
    lookups = without_index
    save(owned, key=KEYS[0])
    lookups.nodes.attached.ours = False
    lookups.index_takes(took_s)
    short = None if found else MissReason.INDEX_ERROR
    assert lookups.match(KEYS[:1], timeout_s) == (int(found), short)
    assert lookups.found(KEYS[:1], timeout_s) == ([found], short)


def test_without_a_deadline_this_host_is_searched_for_as_long_as_the_index_may_take(
    owned: OwnedShm, without_index: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups, asked = without_index, []

    def found(nodes: Any, signer: Any, keys: Any, give_up_at: float | None = None) -> Any:
        asked.append(give_up_at)
        return iter([None] * len(keys))

    monkeypatch.setattr(block_lookup, "found_here", found)
    lookups.index_takes(2.0)
    lookups.match(KEYS)
    lookups.match(KEYS, 3.0)
    assert asked == [None, NOW + 2.0 + 0.5, None, NOW + 2.0 + 3.0]


# --- nodes in reach ---------------------------------------------------------


def test_records_of_nodes_that_cannot_be_read_are_left_out_and_the_rest_keeps_its_place(
    owned: OwnedShm, nodes: Nodes, lookups: Lookups
) -> None:
    others = (AWAY, ELSEWHERE, AWAY._replace(epoch=2), HERE._replace(epoch=2), HERE)
    lookups.publish(dict(zip(KEYS, others, strict=True)))
    found = [True, False, False, False, True]
    assert lookups.found([*KEYS, KEY]) == ([*found, False], None)
    records = lookups.lookup.readable([KEY, *KEYS])
    assert [record is not None for record in records] == [False, *found]
    assert nodes.checks >= 2
    assert lookups.match(KEYS) == (1, MissReason.OUT_OF_REACH)
    assert lookups.reader.miss_reasons == {"out-of-reach": 1}
    assert lookups.match([KEYS[0], KEYS[4]]) == (2, None)
    save(owned)
    assert lookups.match([KEY, KEYS[1]]) == (1, MissReason.OUT_OF_REACH)
    assert lookups.lookup.readable([]) == []


def test_dead_nodes_of_this_host_are_looked_for_before_records_are_believed(
    nodes: Nodes, lookups: Lookups
) -> None:
    lookups.publish({KEYS[0]: HERE})
    checks = nodes.checks
    assert lookups.lookup.readable(KEYS[:1]) != [None]
    assert nodes.checks == checks + 1


def test_without_other_hosts_only_what_is_mapped_is_in_reach(nodes: Nodes) -> None:
    lookups = Lookups(nodes)
    lookups.remote.reached = False
    lookups.publish({KEYS[0]: AWAY, KEYS[1]: HERE})
    assert lookups.found(KEYS[:2]) == ([False, True], None)


def test_where_the_node_of_a_record_cannot_be_read_this_hosts_memory_may_have_the_block(
    owned: OwnedShm, nodes: Nodes, lookups: Lookups
) -> None:
    """A node in VRAM has taken the record over, say."""
    nodes.attached.ours = False
    save(owned, key=KEYS[1], slot_id=1)
    lookups.publish({KEYS[0]: AWAY, KEYS[1]: ELSEWHERE, KEYS[2]: AWAY, KEYS[4]: ELSEWHERE})
    assert lookups.match(KEYS[:3]) == (3, None)
    assert lookups.found(KEYS) == ([True, True, True, False, False], None)
    (one,) = lookups.lookup.lookup(KEYS[1:2], None)
    assert one is not None
    assert one.record == pack_record(KEYS[1], HERE._replace(slot=1))


def test_what_the_index_does_not_have_is_not_taken_from_nodes_of_another_index(
    owned: OwnedShm, nodes: Nodes, lookups: Lookups
) -> None:
    """It may have been reset in this one."""
    nodes.attached.ours = False
    save(owned, key=KEYS[0], slot_id=1)
    save(owned, key=KEYS[1], slot_id=2)
    lookups.publish({KEYS[1]: ELSEWHERE})
    assert lookups.found(KEYS[:2]) == ([False, True], None)


def test_time_that_is_just_over_is_over_for_this_hosts_memory_too(
    owned: OwnedShm, nodes: Nodes, lookups: Lookups
) -> None:
    nodes.attached.ours = False
    save(owned, key=KEYS[0])
    lookups.publish({KEYS[0]: ELSEWHERE})
    lookups.index_takes(0.25)
    assert lookups.found(KEYS[:1], 0.25) == ([False], None)


@pytest.mark.parametrize("record", [b"", b"x" * 15, b"x"])
def test_a_record_that_names_no_node_is_in_nobodys_reach(
    lookups: Lookups, record: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when somebody has announced a node that a part of one would name."""
    monkeypatch.setattr(lookups.remote, "node", lambda *_: lookups.remote.word)
    lookups.publish({KEYS[0]: record})
    assert lookups.found(KEYS[:1]) == ([False], None)


# --- signed records ---------------------------------------------------------


def signed(key: Key, location: Location = AWAY) -> bytes:
    return SIGNER.signed(key, pack_record(key, location))


@pytest.mark.parametrize("wrong", range(3))
def test_a_run_goes_up_to_its_first_record_that_is_not_signed(nodes: Nodes, wrong: int) -> None:
    careful, careless = Lookups(nodes, signer=SIGNER), Lookups(nodes)
    records = {key: signed(key) for key in KEYS[:3]}
    careful.publish(records)
    assert careful.match(KEYS[:3]) == (3, None)
    assert careful.match(KEYS) == (3, MissReason.ABSENT)
    assert careful.reader.miss_reasons == {}
    records[KEYS[wrong]] = pack_record(KEYS[wrong], AWAY)
    for lookups in (careful, careless):
        lookups.publish(records)
    assert careful.match(KEYS) == (wrong, MissReason.BAD_SIGNATURE)
    assert careful.reader.miss_reasons == {"bad-signature": 1}
    expected = [number != wrong for number in range(3)]
    assert careful.found(KEYS[:4]) == ([*expected, False], None)
    assert careful.reader.miss_reasons == {"bad-signature": 2}
    assert careless.match(KEYS[:3]) == (3, None)
    assert careless.found(KEYS[:4]) == ([True, True, True, False], None)
    assert careless.reader.miss_reasons == {}


def test_out_of_reach_comes_before_a_signature_that_is_wrong_later(nodes: Nodes) -> None:
    lookups = Lookups(nodes, signer=SIGNER)
    lookups.publish({KEYS[0]: signed(KEYS[0], ELSEWHERE), KEYS[1]: pack_record(KEYS[1], AWAY)})
    assert lookups.match(KEYS) == (0, MissReason.OUT_OF_REACH)


# --- where a block lies -------------------------------------------------------


def test_a_block_lies_in_vram_on_this_host_or_elsewhere_by_the_start_that_its_record_names(
    nodes: Nodes,
) -> None:
    places = [AWAY, HERE, AWAY._replace(epoch=2), HERE._replace(node_id=9), AWAY]
    places += [HERE._replace(segment=1), AWAY._replace(segment=16, epoch=3)]
    refs = [BlockRef(KEY, pack_record(KEY, at)) for at in places]
    expected = [Tier.VRAM, Tier.HOST, Tier.OTHER_HOST, Tier.OTHER_HOST, Tier.VRAM]
    expected += [Tier.DISK, Tier.OTHER_HOST]
    nodes.in_vram = {(8, 1): Remote().word}
    assert Lookups(nodes).lookup.tiers(refs) == expected
    nodes.in_vram = {}
    here = (Tier.HOST, Tier.DISK)
    without = [one if one in here else Tier.OTHER_HOST for one in expected]
    assert Lookups(nodes).lookup.tiers(refs) == without


def test_a_source_is_the_memory_of_this_host_or_one_start_of_a_node_elsewhere(nodes: Nodes) -> None:
    nodes.in_vram = {(8, 1): Remote().word}
    places = [AWAY, HERE, HERE._replace(node_id=9), HERE._replace(node_id=9, epoch=2)]
    refs = [BlockRef(KEY, pack_record(KEY, at)) for at in places]
    vram, host, one, restarted = Lookups(nodes).lookup.sources(refs)
    assert (vram, host) == ("vram", "host")
    assert one.startswith("other_host:")
    assert restarted.startswith("other_host:")
    assert one != restarted
