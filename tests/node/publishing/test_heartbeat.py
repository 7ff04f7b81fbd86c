"""An index that takes nothing new hears all the same that a node lives."""

from __future__ import annotations

import pytest
from stores import announcement

from kvstore.errors import (
    IndexBreakerOpenError,
    IndexDeadlineError,
    IndexRefusedError,
    IndexUnavailableError,
)
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.node.publishing.heartbeat import ANNOUNCEMENT_TTL_S, HEARTBEAT_S, Heartbeat


class Index(MemoryIndex):
    """Refuses what is written, on request, and never renews unless it is asked to."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(now=lambda: self.now)
        self.refusal: IndexUnavailableError | None = None
        self.renewed = 0

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        super().announce(node_id, announcement, ttl_s)

    def publish(self, records):
        if self.refusal is not None:
            raise self.refusal
        return super().publish(records)

    def renew(self, node_id: int, ttl_s: float) -> bool:
        self.renewed += 1
        return super().renew(node_id, ttl_s)


@pytest.fixture
def index() -> Index:
    return Index()


def heartbeat(index: Index | GuardedIndex, epoch: int = 1) -> tuple[Heartbeat, list[object]]:
    """Return one, and the errors of its beats."""
    errors: list[object] = []
    word = announcement(node_id=1, epoch=epoch)
    made = Heartbeat(index, word, lambda: None, lambda: 0, on_beat=errors.append)
    return made, errors


def test_a_node_stays_announced_while_the_index_is_full_and_says_so(index: Index, caplog) -> None:
    beat, errors = heartbeat(index)
    beat.beat()
    said = index.node(1)
    index.refusal = IndexRefusedError("it is full")
    for _ in range(10):
        index.now += ANNOUNCEMENT_TTL_S - HEARTBEAT_S
        beat.beat()
    assert index.node(1) == said
    assert errors[-1] is index.refusal
    assert "other hosts find what it was told before: it is full" in caplog.text
    index.refusal = None
    beat.beat()
    assert errors[-1] is None


def test_the_breaker_that_failed_publications_have_opened_keeps_nobody_from_renewing(
    index: Index,
) -> None:
    guard = GuardedIndex(index, failures_max=1, retry_after_s=3600.0, retry_after_max_s=3600.0)
    beat, errors = heartbeat(guard)
    beat.beat()
    index.refusal = IndexRefusedError("it is full")
    with pytest.raises(IndexRefusedError):
        guard.publish([KeyRecord(bytes(32), b"r")])
    for _ in range(10):
        index.now += ANNOUNCEMENT_TTL_S - HEARTBEAT_S
        beat.beat()
    assert isinstance(errors[-1], IndexBreakerOpenError)
    assert list(index.nodes()) == [1]
    guard.close()


def test_what_a_former_start_announced_is_not_kept_alive(index: Index) -> None:
    """Readers would go to the new one for the old one's blocks."""
    heartbeat(index, epoch=1)[0].beat()
    index.refusal = IndexRefusedError("it is full")
    heartbeat(index, epoch=2)[0].beat()
    assert index.renewed == 0


def test_one_that_hangs_is_not_asked_twice(index: Index) -> None:
    beat, _ = heartbeat(index)
    beat.beat()
    index.refusal = IndexDeadlineError("late")
    beat.beat()
    assert index.renewed == 0


def test_what_is_not_there_any_more_is_not_said_to_stay(index: Index, caplog) -> None:
    beat, _ = heartbeat(index)
    beat.beat()
    index.lose_everything()
    index.refusal = IndexRefusedError("it is full")
    beat.beat()
    assert "cannot reach the index" in caplog.text
