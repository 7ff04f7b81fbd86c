"""Reservations of several savers, which are models here."""

import os
from time import monotonic

import pytest

from kvstore import PutStatus
from kvstore.client.nodes.saving import savers
from kvstore.spi import NodeUnavailableError
from kvstore.testing.blockstore import MemoryBlockStore

TIMEOUT_S = 5.0


@pytest.fixture
def both():
    return MemoryBlockStore(), MemoryBlockStore()


def mixed(both):
    """Four reservations, of each in turn."""
    keys = [os.urandom(32) for _ in range(4)]
    return [both[i % 2].reserve([key], 100, 7)[0] for i, key in enumerate(keys)]


def stored(both, granted):
    return [any(store.lookup([r.key]) != [None] for store in both) for r in granted]


def test_each_saver_gets_its_own_and_the_answers_keep_their_order(both):
    granted = mixed(both)
    both[1].abort([granted[3]])
    results = savers.commit(granted, TIMEOUT_S, monotonic)
    assert [bool(result) for result in results] == [True, True, True, False]
    assert stored(both, granted) == [True, True, True, False]


def test_a_saver_that_fails_costs_its_own_blocks_only(both):
    granted = mixed(both)
    both[0].node_down = True
    results = savers.commit(granted, TIMEOUT_S, monotonic)
    rejected, done = PutStatus.REJECTED, PutStatus.STORED
    assert [result.status for result in results] == [rejected, done, rejected, done]


def test_when_all_fail_it_is_raised(both):
    granted = mixed(both)
    for store in both:
        store.node_down = True
    with pytest.raises(NodeUnavailableError):
        savers.commit(granted, TIMEOUT_S, monotonic)


def test_an_interrupted_commit_gives_back_what_nobody_sealed(both):
    granted = mixed(both)

    def interrupted():
        raise KeyboardInterrupt

    both[1].on_commit = interrupted
    with pytest.raises(KeyboardInterrupt):
        savers.commit(granted, TIMEOUT_S, monotonic)
    assert stored(both, granted) == [True, False, True, False]
    again = both[1].reserve([granted[1].key, granted[3].key], 100, 7)
    assert [answer.key for answer in again] == [granted[1].key, granted[3].key]


def test_an_abort_passes_over_what_was_never_granted(both):
    granted = mixed(both)
    exists = both[0].reserve([granted[0].key], 100, 7)
    savers.abort([*exists, *granted], TIMEOUT_S, monotonic)
    assert savers.commit([], TIMEOUT_S, monotonic) == []
    assert not any(savers.commit(granted, TIMEOUT_S, monotonic))
