"""Where bytes of other hosts go: into the memory of the caller as far as that is sure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from remote_parts import parts_of

from kvstore import UsageError
from kvstore.client.nodes import fetch as fetch_module
from kvstore.client.nodes.fetch import FetchedBlock, RemoteBlock, fetch
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.payloads.out import Out
from kvstore.index.memory import MemoryIndex
from kvstore.limits import CLAIMED_BYTES_MAX, META_BYTES_MAX
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.types import Key, Location

NOW = 1024.0
LENGTH = 1000


class Far(RemoteNodes):
    """Answers with what it was told, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(*parts_of(MemoryIndex()), 1.0)
        self.outcomes: dict[Key, Outcome] = {}
        self.lies: set[Key] = set()
        self.wanted: list[Wanted] = []
        self.reads: list[float | None] = []
        self.doubted: list[list[Key]] = []
        self.looks: list[float | None] = []

    def read(self, wanted: Sequence[Wanted], deadline: float | None = None) -> list[Outcome]:
        self.reads.append(deadline)
        self.wanted += wanted
        for one in wanted:
            for part in one.into:
                part[:] = bytes([65 + len(part) % 26]) * part.nbytes
        return [self.outcomes.get(one.key, Outcome(Read.HIT)) for one in wanted]

    def there(
        self, blocks: Sequence[tuple[Key, Location]], deadline: float | None = None
    ) -> list[bool]:
        self.doubted.append([key for key, _ in blocks])
        self.looks.append(deadline)
        return [key not in self.lies for key, _ in blocks]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setattr(time, "monotonic", lambda: NOW)
    nodes = Far()
    yield nodes
    monkeypatch.undo()
    nodes.close()


def block(number: int, length: int = LENGTH) -> RemoteBlock:
    return RemoteBlock(bytes([number]) * 32, Location(8, 1, 0, 0, 1, 0, length, 1))


# --- what was fetched -------------------------------------------------------


@pytest.mark.parametrize("there", [0, 745, 960, 1000])
@pytest.mark.parametrize("meta_length", [0, 40])
def test_a_fetched_block_is_value_and_description_whatever_part_lies_where(
    there: int, meta_length: int
) -> None:
    payload = memoryview(bytes(range(250)) * 4)
    location = block(1).location
    got = FetchedBlock(location, payload[:there], payload[there:], 1, meta_length)
    assert got.size_bytes == LENGTH - meta_length
    assert got.valid()
    value = payload[: got.size_bytes]
    assert got.data == value[there:]
    if there <= LENGTH - meta_length:
        assert got.meta == payload[got.size_bytes :]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_payload_in_one_part_is_a_read_only_buffer(in_place: bool) -> None:
    payload, nothing = memoryview(bytearray(b"v" * LENGTH)), memoryview(b"")
    parts = (payload, nothing) if in_place else (nothing, payload)
    got = FetchedBlock(block(1).location, *parts, 1, 0)
    assert got.buffer == payload
    assert got.buffer.readonly


# --- where it goes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "in_place"),
    [
        (None, 0),
        (LENGTH - META_BYTES_MAX, 0),
        (LENGTH - 1, 0),
        (LENGTH, LENGTH),
        (LENGTH + 1, LENGTH - META_BYTES_MAX),
        (5 * LENGTH, LENGTH - META_BYTES_MAX),
    ],
)
def test_plain_bytes_go_into_the_callers_memory_as_far_as_they_are_no_description(
    far: Far, room: int | None, in_place: int
) -> None:
    out = None if room is None else bytearray(room)
    outs = None if out is None else [None, Out(out)]
    got = fetch(far, {1: block(1)}, outs, None)[1]
    assert (got.there.nbytes, got.aside.nbytes) == (in_place, LENGTH - in_place)
    (wanted,) = far.wanted
    assert [part.nbytes for part in wanted.into] == [n for n in (in_place, LENGTH - in_place) if n]
    if out is not None:
        assert bytes(out[:in_place]) == bytes(got.there)
        assert not any(out[in_place:])


@pytest.mark.parametrize("length", [1, META_BYTES_MAX])
def test_what_may_be_all_description_goes_to_memory_of_its_own(far: Far, length: int) -> None:
    out = Out(bytearray(LENGTH))
    got = fetch(far, {0: block(1, length)}, [out], None)[0]
    assert (got.there.nbytes, got.aside.nbytes) == (0, length)
    nothing = Out(bytearray())
    assert fetch(far, {0: block(1, length)}, [nothing], None)[0].aside.nbytes == length


@pytest.mark.parametrize("count", [LENGTH // 4, LENGTH])
def test_no_byte_is_written_to_numbers_before_their_description_was_seen(
    far: Far, count: int
) -> None:
    out = Out(memoryview(bytearray(4 * count)).cast("i"))
    got = fetch(far, {0: block(1)}, [out], None)[0]
    assert (got.there.nbytes, got.aside.nbytes) == (0, LENGTH)
    assert not any(out.room)


def test_an_out_that_is_sure_to_be_too_small_is_refused_and_nothing_is_read(far: Far) -> None:
    outs = [Out(bytearray(LENGTH)), Out(bytearray(LENGTH - META_BYTES_MAX - 1))]
    with pytest.raises(UsageError, match=f"at least {LENGTH - META_BYTES_MAX} bytes"):
        fetch(far, {0: block(1), 1: block(2)}, outs, None)
    assert far.reads == []


def test_only_what_was_read_is_given_by_the_same_numbers(far: Far) -> None:
    far.outcomes = {
        block(1).key: Outcome(Read.MISS),
        block(2).key: Outcome(Read.FAILED),
        block(3).key: Outcome(Read.HIT, kind=3, meta_length=40),
    }
    got = fetch(far, {5: block(1), 2: block(2), 4: block(3)}, None, None)
    assert list(got) == [4]
    assert (got[4].location, got[4].kind, got[4].meta_length) == (block(3).location, 3, 40)
    assert [one.key[0] for one in far.wanted] == [1, 2, 3]


# --- deadlines --------------------------------------------------------------


@pytest.mark.parametrize(("given", "left_s"), [(None, 1.0), (0.25, 0.25), (60.0, 1.0)])
def test_the_time_of_a_call_is_that_of_its_bytes_or_less(
    far: Far, given: float | None, left_s: float
) -> None:
    fetch(far, {0: block(1), 1: block(2)}, None, None if given is None else NOW + given)
    of_the_bytes_s = far.timeout_s(2 * LENGTH) - far.timeout_s(0)
    assert far.reads == [NOW + left_s + (of_the_bytes_s if given != left_s else 0)]


def test_what_is_asked_about_lengths_is_part_of_the_callers_time(far: Far) -> None:
    claims = {0: block(1, CLAIMED_BYTES_MAX), 1: block(2, CLAIMED_BYTES_MAX)}
    fetch(far, claims, None, NOW + 0.25)
    assert far.looks == [NOW + 0.25]


# --- records that claim too much --------------------------------------------


def asked_of(far: Far, blocks: dict[int, RemoteBlock], outs: Any = None) -> list[int]:
    """The blocks that were asked for after those that claim too much were doubted."""
    fetch(far, blocks, outs, None)
    return [one.key[0] for one in far.wanted]


def test_beyond_the_limit_of_claimed_memory_every_node_is_asked_first(far: Far) -> None:
    half = CLAIMED_BYTES_MAX // 2
    assert asked_of(far, {0: block(1, half), 1: block(2, half)}) == [1, 2]
    assert far.doubted == []
    far.wanted.clear()
    far.lies = {block(2).key}
    assert asked_of(far, {0: block(1, half), 1: block(2, half + 1)}) == [1]
    assert far.doubted == [[block(1).key, block(2).key]]
    far.lies = {block(1).key, block(2).key}
    assert fetch(far, {0: block(1, half), 1: block(2, half + 1)}, None, None) == {}
    assert len(far.reads) == 2, "of no block at all nobody is asked"


def test_memory_that_the_caller_gives_is_not_claimed(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "CLAIMED_BYTES_MAX", LENGTH)
    blocks = {0: block(1), 1: block(2), 2: block(3, 10)}
    outs = [Out(bytearray(LENGTH)), None, Out(bytearray(LENGTH))]  # of the last most is left over
    assert asked_of(far, blocks, outs) == [1, 2, 3]
    assert far.doubted == []
    fetch(far, {**blocks, 3: block(4, 1)}, [*outs, None], None)
    assert len(far.doubted) == 1


@pytest.mark.parametrize(("more", "is_doubted"), [(META_BYTES_MAX, False), (256, True)])
def test_what_fits_no_out_is_doubted(far: Far, more: int, is_doubted: bool) -> None:
    far.lies = {block(2).key}
    blocks = {0: block(1), 1: block(2, LENGTH + more), 2: block(3, 5 * LENGTH)}
    outs = [Out(bytearray(LENGTH)), Out(bytearray(LENGTH)), None]
    assert asked_of(far, blocks, outs) == ([1, 3] if is_doubted else [1, 2, 3])
    assert far.doubted == ([[block(2).key]] if is_doubted else [])
