"""What lies on this host is offered however long the index takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from connector_parts import BLOCK, PER_KEY, Clock, Hold, Side, prompt

from connector.limits import LOOKUP_AT_ONCE_KEYS, LOOKUP_TIMEOUT_S
from kvstore import MissReason, Namespace
from kvstore.spi import Key
from kvstore.testing.blockstore import MemoryBlockStore


def opened(side: Any) -> None:
    """Have the store opened now, and not by the first lookup."""
    side.core._store.get()


def lookups_of(side: Any) -> Any:
    return side.core._lookups


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hold() -> Hold:
    """Where the index hangs."""
    return Hold()


@pytest.fixture
def side(store: MemoryBlockStore, clock: Clock, hold: Hold) -> Iterator[Side]:
    side = Side(store, clock=clock, lookup_timeout_s=LOOKUP_TIMEOUT_S)
    store.on_match = hold
    yield side
    hold.release()
    side.core.close()


def here(side: Side, seed: int, blocks: int) -> None:
    request = prompt(blocks, extra=1, seed=seed)
    side.put(request, blocks)
    side.store.here.update(side.keys(request)[:blocks])


def test_a_prompt_that_is_all_here_does_not_wait_behind_one_that_asks_the_index(
    side: Side, hold: Hold
) -> None:
    here(side, seed=1, blocks=3)
    elsewhere = prompt(3, extra=1, seed=2)
    assert side.core.match(elsewhere, 0) is None
    hold.await_reached()
    assert side.match(prompt(3, extra=1, seed=1)) == 3 * BLOCK
    assert side.store.match_calls == 1, "that of the other"


def test_who_cannot_wait_for_the_index_gets_what_is_here(
    side: Side, hold: Hold, clock: Clock
) -> None:
    here(side, seed=1, blocks=2)
    longer = prompt(4, extra=1, seed=1)
    assert side.core.match(longer, 0) is None
    hold.await_reached()
    assert side.core.match(longer, 0) is None
    clock.now += LOOKUP_TIMEOUT_S
    assert side.core.match(longer, 0) == 2 * BLOCK
    side.core.allocated(longer, lambda: [list(range(20))], 2 * BLOCK)
    side.step()
    side.core.loads_ended([longer.request_id])
    explanation = side.core.explain(longer.request_id)
    assert explanation is not None
    assert explanation.first_missing is not None
    assert explanation.first_missing.reason is MissReason.DEADLINE


def test_a_late_lookup_of_which_nothing_is_here_is_a_miss(side: Side, clock: Clock) -> None:
    unknown = prompt(2, extra=1, seed=3)
    assert side.core.match(unknown, 0) is None
    clock.now += LOOKUP_TIMEOUT_S
    assert side.core.match(unknown, 0) == 0


def test_the_index_answers_for_all_when_it_is_in_time(side: Side, hold: Hold) -> None:
    longer = prompt(4, extra=1, seed=1)
    side.put(longer, 4)
    side.store.here.update(side.keys(longer)[:2])
    assert side.core.match(longer, 0) is None
    hold.await_reached()
    hold.release()
    assert side.match(longer) == 4 * BLOCK


def test_what_is_here_is_found_though_no_thread_has_come_to_look(
    side: Side, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that gives them no processor."""
    here(side, seed=1, blocks=3)
    lookups = lookups_of(side)
    monkeypatch.setattr(lookups, "_hashes_at_once", 0)
    monkeypatch.setattr(lookups._looking, "put", lambda lookup: True)
    whole, longer = prompt(3, extra=1, seed=1), prompt(4, extra=1, seed=1)
    for request in (whole, longer):
        assert side.core.match(request, 0) is None
    clock.now += LOOKUP_TIMEOUT_S
    for request in (whole, longer):
        assert side.core.match(request, 0) == 3 * BLOCK
    assert side.store.match_calls == 0


def test_what_is_all_here_is_found_by_who_submits_it(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wake a thread and to wait for it takes several times as long as to look."""
    here(side, seed=1, blocks=3)
    opened(side)
    monkeypatch.setattr(lookups_of(side)._looking, "put", None)
    monkeypatch.setattr(side.core, "_wait", None)
    request = prompt(3, extra=1, seed=1)
    side.core.on_new_request(request)
    assert side.core.match(request, 0) == 3 * BLOCK


def test_a_prompt_of_many_keys_is_left_to_a_thread(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(side, seed=1, blocks=3)
    here(side, seed=2, blocks=4)
    opened(side)
    lookups, names = lookups_of(side), list[str]()
    here_of = lookups._here

    def here_named(lookup: Any, store: Any) -> Any:
        names.append(threading.current_thread().name)
        return here_of(lookup, store)

    monkeypatch.setattr(lookups, "_here", here_named)
    most = lookups._hashes_at_once
    assert most == LOOKUP_AT_ONCE_KEYS * side.layout.hashes_per_key
    monkeypatch.setattr(lookups, "_hashes_at_once", 3 * side.layout.hashes_per_key)
    side.match(prompt(3, extra=1, seed=1))
    side.match(prompt(4, extra=1, seed=2))
    assert names == [threading.current_thread().name, "kvstore-lookup"]


def test_keys_of_other_sizes_of_engines_are_made_for_the_index_alone(
    store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be made in the engine's thread, and most prompts are here or nowhere."""
    side = Side(store, tp_sizes=(1, 2))
    (group,) = side.layout.groups
    own, *others = (split.namespaces for split in group.splits)
    assert others
    made: list[Namespace] = []
    keys_of = Namespace.engine_keys

    def engine_keys(name: Namespace, hashes: Sequence[bytes], each: int = 1) -> list[Key]:
        made.append(name)
        return keys_of(name, hashes, each)

    monkeypatch.setattr(Namespace, "engine_keys", engine_keys)
    here(side, seed=1, blocks=3)
    made.clear()
    assert side.match(prompt(3, extra=1, seed=1)) == 3 * BLOCK
    assert set(made) == set(own)
    assert side.match(prompt(3, extra=1, seed=2)) == 0
    assert set(made) == {name for names in (own, *others) for name in names}
    side.core.close()


def test_behind_a_prompt_longer_than_is_looked_up_no_part_is_found(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as what follows the last block that was looked up."""
    monkeypatch.setattr("connector.scheduler.lookup.MATCH_BLOCKS_MAX", 2)
    part = b"p" * 16
    key = side.layout.groups[0].namespaces[0].engine_keys([part])[0]
    longer = prompt(3, extra=1, seed=1)
    here(side, seed=1, blocks=3)
    (reservation,) = side.store.reserve([key], 8, side.layout.groups[0].namespaces[0].id)
    side.store.commit([reservation])  # type: ignore[list-item]
    side.store.here.add(key)
    opened(side)
    for request, with_part in ((prompt(2, extra=1, seed=1), True), (longer, False)):
        hashes = request.block_hashes[: len(request.tokens) // BLOCK * PER_KEY]
        lookup = lookups_of(side).submit(hashes, part)
        assert lookup is not None
        assert lookup.done.wait(10)
        assert lookup.run == 2
        assert any(lookup.part_placement) is with_part
