"""Pages that an engine names itself, saved and loaded whole over the model of a store."""

from __future__ import annotations

import ctypes
import os

import pytest
from each_input import each

from connector.limits import PAGE_PARTS_MAX, SAVE_BATCH_BLOCKS
from connector.pages.pages import Pages, Parts, is_there, memory_at, pages_at
from kvstore import Namespace, PutStatus, UsageError
from kvstore.testing.blockstore import MemoryBlockStore, timed_out

NAMESPACE = Namespace({"model": "m"})
PART = 3_000


def page(*fills: int) -> Parts:
    return [memoryview(bytearray([fill]) * PART) for fill in fills]


def empty(parts: int = 2) -> Parts:
    return page(*[0] * parts)


def names(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


@pytest.fixture
def pages(store: MemoryBlockStore) -> Pages:
    return Pages(store, NAMESPACE)


def test_a_page_comes_back_part_by_part(pages: Pages) -> None:
    a, b = names(2)
    results = pages.save([a, b], [page(1, 2), page(3, 4)])
    assert [r.status for r in results] == [PutStatus.STORED] * 2
    targets = [empty(), empty()]
    assert pages.load_run([a, b], targets) == [True, True]
    assert targets == [page(1, 2), page(3, 4)]


def test_trap_a_pages_key_does_not_depend_on_its_place_in_a_batch(pages: Pages) -> None:
    batch = names(100)
    pages.save(batch, [page(i) for i in range(100)])
    target = page(0)
    assert pages.load_run([batch[77]], [target]) == [True]
    assert target == page(77)
    assert pages.run_length(batch[3:]) == 97


def test_pages_of_another_namespace_are_not_found(store: MemoryBlockStore, pages: Pages) -> None:
    (name,) = names(1)
    pages.save([name], [page(1)])
    assert Pages(store, Namespace({"model": "other"})).run_length([name]) == 0


def test_a_page_that_exists_or_is_being_saved_is_there(pages: Pages) -> None:
    (name,) = names(1)
    results = pages.save([name, name], [page(1), page(1)])
    assert [r.status for r in results] == [PutStatus.STORED, PutStatus.IN_PROGRESS]
    assert all(is_there(r) for r in results)
    (again,) = pages.save([name], [page(1)])
    assert again.status is PutStatus.EXISTS
    assert is_there(again)


def test_only_the_leading_run_is_loaded(pages: Pages) -> None:
    a, b, c = names(3)
    pages.save([a, c], [page(1), page(3)])
    assert pages.run_length([a, b, c]) == 1
    assert pages.load_run([a, b, c], [page(0), page(0), page(0)]) == [True, False, False]
    assert pages.load_run([], []) == []


def test_a_page_of_another_size_is_not_loaded(pages: Pages) -> None:
    (name,) = names(1)
    pages.save([name], [page(1, 2)])
    target = page(9)
    assert pages.load_run([name], [target]) == [False]
    assert target == page(9)


def test_a_page_that_is_evicted_while_it_is_copied_is_not_loaded(
    store: MemoryBlockStore, pages: Pages
) -> None:
    a, b = names(2)
    pages.save([a, b], [page(1), page(2)])
    store.on_check = lambda: store.evict(pages.keys([a])[0])
    assert pages.load_run([a, b], [page(0), page(0)]) == [False, True]


def test_pages_of_several_sizes_and_more_than_a_batch_are_saved_in_order(pages: Pages) -> None:
    count = 2 * SAVE_BATCH_BLOCKS + 3
    batch = names(count)
    given = [page(*([i % 251] * (1 + (i // 50) % 2))) for i in range(count)]
    assert all(pages.save(batch, given))
    targets = [empty(len(parts)) for parts in given]
    assert all(pages.load_run(batch, targets))
    assert targets == given


def test_a_full_store_says_which_pages_were_refused() -> None:
    pages = Pages(MemoryBlockStore(capacity_blocks=1), NAMESPACE)
    saved = pages.save(names(2), [page(1), page(2)])
    assert [is_there(r) for r in saved] == [True, False]
    assert saved[1].reason == "full"


@pytest.mark.parametrize("hook", ["on_reserve", "on_commit"])
def test_a_node_that_does_not_answer_refuses_all_without_raising(
    store: MemoryBlockStore, pages: Pages, hook: str
) -> None:
    asked: list[str] = []

    def hangs() -> None:
        asked.append(hook)
        timed_out()

    setattr(store, hook, hangs)
    count = 2 * SAVE_BATCH_BLOCKS
    results = pages.save(names(count), [page(1)] * count)
    assert len(results) == count
    assert not any(is_there(r) for r in results)
    assert len(asked) == 1, "one deadline is waited for, not one for each batch"


def test_a_store_that_is_down_is_a_miss(store: MemoryBlockStore, pages: Pages) -> None:
    (name,) = names(1)
    pages.save([name], [page(1)])
    store.node_down = True
    assert pages.load_run([name], [page(0)]) == [False]
    assert [is_there(r) for r in pages.save(names(1), [page(1)])] == [False]
    store.index_down = True
    assert pages.run_length([name]) == 0


def test_a_copy_that_fails_gives_its_slots_back(store: MemoryBlockStore, pages: Pages) -> None:
    part = memoryview(bytearray(8))
    broken = memoryview(bytearray(16)).cast("I")  # items of another format cannot be copied
    with pytest.raises(ValueError):
        pages.save(names(1), [[part, broken]])
    assert store.reserved() == 0


def test_memory_is_cut_into_pages_of_equally_many_ranges() -> None:
    memory = (ctypes.c_uint8 * 40)(*range(40))
    at = ctypes.addressof(memory)
    cut = pages_at([at, at + 20, at + 10, at + 30], [5, 5, 5, 5], pages=2)
    assert [[bytes(part)[0] for part in parts] for parts in cut] == [[0, 20], [10, 30]]
    cut[0][0][:] = b"abcde"
    assert bytes(memory[:5]) == b"abcde"


@each(
    ("addresses", "sizes", "pages"),
    [([1, 2, 3], [1, 1, 1], 2), ([1, 2], [1], 1), ([], [], 1), ([0], [4], 1), ([8], [0], 1)],
)
def test_memory_that_makes_no_pages_is_refused(
    addresses: list[int], sizes: list[int], pages: int
) -> None:
    with pytest.raises(UsageError):
        pages_at(addresses, sizes, pages)


def test_a_page_has_a_largest_number_of_ranges() -> None:
    count = PAGE_PARTS_MAX + 1
    with pytest.raises(UsageError, match=str(PAGE_PARTS_MAX)):
        pages_at([8] * count, [1] * count, pages=1)
    assert memory_at(ctypes.addressof(ctypes.c_uint8(7)), 1).format == "B"
