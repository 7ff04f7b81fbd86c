"""Why a request did not hit: what the scheduler side says of it, counts and logs.

Over the model of a store (test_explain_requests_nodes.py: over real nodes). One test for
each reason a request may have, in one file so that a missing one shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from connector_parts import (
    BLOCK,
    ENGINE_BLOCK,
    PATIENCE_S,
    Clock,
    FakeRequest,
    Hold,
    Side,
    layout,
    prompt,
    wait_for,
)

from connector.layout.topology import TpKVTopology
from connector.limits import (
    EXPLAIN_EVENTS_MAX,
    EXPLAIN_LINES_MAX,
    EXPLAIN_QUESTIONS_MAX,
    EXPLAIN_QUEUE_MAX,
    EXPLAIN_REQUESTS_MAX,
)
from connector.messages import WorkerReport
from connector.rate import Rate
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.lookup import Lookups
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from kvstore import Explanation, MissReason, UsageError
from kvstore.spi import Missing
from kvstore.testing.blockstore import MemoryBlockStore


def load(side: Side, request: FakeRequest, computed: int = 0, tokens: int | None = None) -> None:
    """Match and allocate, as an engine does; the load stays under way."""
    offered = side.match(request, computed)
    table = list(range(101, 101 + len(request.tokens) // ENGINE_BLOCK + 1))
    side.core.allocated(request, lambda: (table,), offered if tokens is None else tokens)
    side.step()


def explain(side: Side, request: FakeRequest, reason: MissReason | None = None) -> Explanation:
    """Once the thread that asks had its time to find `reason`."""

    def told() -> Explanation:
        explanation = side.core.explain(request.request_id)
        assert explanation is not None
        return explanation

    if reason is not None:
        wait_for(lambda: why(told()).reason is reason, f"{reason}, not {told()}")
    return told()


def why(explanation: Explanation) -> Missing:
    assert explanation.first_missing is not None, explanation
    return explanation.first_missing


def ended(side: Side, requests: int) -> dict[str, int]:
    """Reasons by count once so many requests are counted."""
    wait_for(lambda: side.core.stats()["requests"]["requests"] == requests, "the counts")
    return side.core.stats()["missed"]


# --- hits ---------------------------------------------------------------------------


def test_a_request_that_got_everything_needs_no_reason(side: Side) -> None:
    request = prompt(3)
    side.put(request, 3)
    load(side, request)
    side.core.loads_ended([request.request_id])
    explanation = explain(side, request)
    assert (explanation.possible_tokens, explanation.hit_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert explanation.first_missing is None
    assert explanation.events == (
        f"lookup: {3 * BLOCK} tokens found, 0 in the engine, {3 * BLOCK} offered",
        f"engine took {3 * BLOCK} of {3 * BLOCK}",
        f"loaded {3 * BLOCK} tokens",
    )
    side.core.finished(request.request_id)
    assert ended(side, 1) == {}
    totals = side.core.stats()["requests"]
    assert (totals["possible_tokens"], totals["hit_tokens"]) == (3 * BLOCK, 3 * BLOCK)


def test_what_the_engine_had_itself_was_not_missed(side: Side) -> None:
    request = prompt(2)
    side.put(request, 2)
    assert side.match(request, 2 * BLOCK) == 0
    explanation = explain(side, request)
    assert (explanation.local_tokens, explanation.hit_tokens) == (2 * BLOCK, 0)
    assert explanation.first_missing is None


def test_tokens_found_and_missed_add_up_to_what_was_asked(
    side: Side, store: MemoryBlockStore
) -> None:
    """In the engine, in the store, and by reason: here for vLLM, and to a node for the rest."""
    found, evicted, own = (prompt(4, seed=i) for i in range(1, 4))
    for request in (found, evicted):
        side.put(request, 4)
    store.evict(side.keys(evicted)[1])
    for request in (found, evicted):
        load(side, request)
        side.core.loads_ended([request.request_id])
    assert side.match(own, 2 * BLOCK) == 0
    explain(side, evicted, MissReason.EVICTED)
    explain(side, own, MissReason.NEVER_STORED)
    for request in (found, evicted, own):
        side.core.finished(request.request_id)
    wait_for(lambda: sum(one["asked_tokens"] for one in store.reported) == 12 * BLOCK, "a report")
    told = sum(map(Counter, store.reported), Counter())
    assert told == {
        "asked_tokens": 12 * BLOCK,
        "engine_tokens": 2 * BLOCK,
        "hit_tokens": 5 * BLOCK,
        "missed_tokens:evicted": 3 * BLOCK,
        "missed_tokens:never-stored": 2 * BLOCK,
    }
    counted = Counter(side.core.take_stats().to_dict())
    assert counted["kvstore_possible_tokens"] == 12 * BLOCK
    parts = ("hit_tokens", "local_tokens", "missed_tokens:evicted", "missed_tokens:never-stored")
    assert sum(counted[f"kvstore_{part}"] for part in parts) == 12 * BLOCK


# --- reasons ---------------------------------------------------------------------------


def test_never_stored_evicted_and_cleared_are_what_the_store_says(
    side: Side, store: MemoryBlockStore
) -> None:
    never, evicted, cleared = (prompt(2, seed=i) for i in range(1, 4))
    assert side.match(never) == 0
    explain(side, never, MissReason.NEVER_STORED)
    side.put(evicted, 2)
    store.evict(side.keys(evicted)[1])
    assert side.match(evicted) == BLOCK
    missing = why(explain(side, evicted, MissReason.NOT_TAKEN))
    assert missing.block == 0, "what was offered is not loaded yet"
    load(side, evicted)
    side.core.loads_ended([evicted.request_id])
    missing = why(explain(side, evicted, MissReason.EVICTED))
    assert (missing.block, missing.node) == (1, "model")
    side.put(cleared, 2)
    assert side.core.reset()
    assert side.match(cleared) == 0
    explain(side, cleared, MissReason.CLEARED)
    for request in (never, evicted, cleared):
        side.core.finished(request.request_id)
    assert ended(side, 3) == {"never-stored": 1, "evicted": 1, "cleared": 1}


def test_the_shard_that_is_short_is_asked_about(store: MemoryBlockStore) -> None:
    side = Side(store, topology=TpKVTopology.of(2))
    request = prompt(2)
    side.put(request, 2, shards=[0, 1])
    store.evict(side.keys(request, shard=1)[1])
    load(side, request)
    side.core.loads_ended([request.request_id])
    assert why(explain(side, request, MissReason.EVICTED)).block == 1
    side.core.close()


def test_a_late_lookup_is_the_deadline(store: MemoryBlockStore) -> None:
    side = Side(store, lookup_timeout_s=0.05)
    hold = store.on_match = Hold()
    request = prompt(2)
    assert side.core.match(request, 0) is None
    time.sleep(0.1)
    assert side.core.match(request, 0) == 0
    assert why(explain(side, request)).reason is MissReason.DEADLINE
    hold.release()
    side.core.close()


@pytest.mark.parametrize(
    "trouble", [MissReason.BREAKER_OPEN, MissReason.INDEX_ERROR, MissReason.DEADLINE]
)
def test_trouble_with_the_index_is_told_as_the_store_tells_it(
    side: Side, store: MemoryBlockStore, trouble: MissReason
) -> None:
    store.index_down, store.index_trouble = True, trouble
    request = prompt(2)
    assert side.match(request) == 0
    assert why(explain(side, request)).reason is trouble


def test_a_lookup_that_raised_is_an_index_error(side: Side, store: MemoryBlockStore) -> None:
    def broken() -> None:
        raise RuntimeError("a bug in the store")

    store.on_match = broken
    request = prompt(2)
    assert side.match(request) == 0
    assert why(explain(side, request)).reason is MissReason.INDEX_ERROR


def test_a_store_that_cannot_be_opened_is_no_store() -> None:
    def opener() -> MemoryBlockStore:
        raise UsageError("url", "x", "wrong")

    core = SchedulerCore(
        LazyStore(opener), layout(), SchedulerSettings(lookup_timeout_s=PATIENCE_S)
    )
    request = prompt(2)
    wait_for(lambda: core.match(request, 0) == 0, "an answer")
    explanation = core.explain(request.request_id)
    assert explanation is not None
    assert why(explanation).reason is MissReason.NO_STORE
    core.close()


def test_a_prompt_shorter_than_a_block_is_too_short(side: Side) -> None:
    request = FakeRequest("short", [1, 2, 3])
    assert side.match(request) == 0
    explanation = explain(side, request)
    assert explanation.possible_tokens == 0
    assert why(explanation).reason is MissReason.TOO_SHORT


def test_too_many_lookups_is_too_busy(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookups, "submit", lambda *_: None)
    request = prompt(2)
    assert side.match(request) == 0
    assert why(explain(side, request)).reason is MissReason.TOO_BUSY


def test_an_offer_the_engine_did_not_take_is_told(side: Side) -> None:
    request = prompt(3)
    side.put(request, 3)
    load(side, request, tokens=BLOCK)
    side.core.loads_ended([request.request_id])
    missing = why(explain(side, request))
    assert (missing.block, missing.reason) == (1, MissReason.NOT_TAKEN)


def test_a_failed_load_stays_the_reason_and_what_lay_before_it_counts(
    side: Side, store: MemoryBlockStore
) -> None:
    request = prompt(3)
    side.put(request, 3)
    load(side, request)
    store.evict(side.keys(request)[2], forget=False)
    side.core.report(WorkerReport(failed_blocks={0: 2}))
    side.core.loads_ended([request.request_id])
    explanation = explain(side, request, MissReason.LOAD_FAILED)
    assert explanation.hit_tokens == 2 * BLOCK
    assert why(explanation).block == 2
    wait_for(
        lambda: "says the model" in why(explain(side, request)).detail,
        "the store to have said what became of the block",
    )
    assert side.match(request, 2 * BLOCK) == 0
    explanation = explain(side, request)
    assert why(explanation).reason is MissReason.LOAD_FAILED
    assert "lookup: 1 blocks barred after a failed load" in explanation.events


def test_nothing_is_there_under_a_salt(side: Side) -> None:
    request = prompt(2)
    request.cache_salt = "tenant"  # type: ignore[attr-defined]
    assert side.match(request) == 0
    missing = why(explain(side, request, MissReason.SALT))
    assert missing.detail.startswith("nothing is there under the request's cache salt; ")


# --- the engine never waits, and all of it is bounded ------------------------------------


def test_a_store_that_hangs_when_asked_holds_up_no_lookup_and_no_step(
    side: Side, store: MemoryBlockStore
) -> None:
    hold = store.on_why = Hold()
    assert side.match(prompt(2, seed=1)) == 0
    hold.await_reached()
    request = prompt(2, seed=2)
    side.put(request, 2)
    started = time.monotonic()
    assert side.match(request) == 2 * BLOCK
    side.core.finished(request.request_id)
    assert time.monotonic() - started < PATIENCE_S / 2
    hold.release()


@pytest.fixture
def clocked(store: MemoryBlockStore) -> Iterator[tuple[Side, Clock]]:
    clock = Clock()
    side = Side(store, clock=clock)
    yield side, clock
    side.core.close()


def test_only_so_many_questions_are_asked_in_a_time(
    clocked: tuple[Side, Clock], store: MemoryBlockStore
) -> None:
    asked: list[None] = []
    store.on_why = lambda: asked.append(None)
    side, _ = clocked
    requests = [prompt(1, seed=i) for i in range(EXPLAIN_QUESTIONS_MAX + 10)]
    for request in requests:
        assert side.match(request) == 0
    wait_for(lambda: side.core.stats()["requests"]["not_asked"] == 10, "the questions left out")
    assert len(asked) == EXPLAIN_QUESTIONS_MAX
    assert why(explain(side, requests[-1])).reason is MissReason.ABSENT


def test_a_full_queue_drops_questions_and_still_counts_requests(
    side: Side, store: MemoryBlockStore
) -> None:
    hold = store.on_why = Hold()
    assert side.match(prompt(1)) == 0
    hold.await_reached()
    count = EXPLAIN_QUEUE_MAX + 50
    for seed in range(1, count):
        request = prompt(1, seed=seed)
        assert side.match(request) == 0
        side.core.finished(request.request_id)
    side.core.finished("r0")
    hold.release()
    assert sum(ended(side, count).values()) == count


def test_the_last_so_many_requests_are_remembered(side: Side) -> None:
    count = EXPLAIN_REQUESTS_MAX + 20
    for seed in range(count):
        side.core.match(FakeRequest(f"ended{seed}", [1]), 0)
        side.core.finished(f"ended{seed}")
    for seed in range(count):
        side.core.match(FakeRequest(f"live{seed}", [1]), 0)
    ended(side, count)
    for kind in ("live", "ended"):
        known = [side.core.explain(f"{kind}{i}") is not None for i in range(count)]
        assert sum(known) == EXPLAIN_REQUESTS_MAX
    history = side.core._history
    assert len(history._traces) <= EXPLAIN_REQUESTS_MAX
    assert side.core.explain("nobody") is None


def test_events_of_one_request_are_the_last_so_many_and_each_is_told_once(side: Side) -> None:
    request = prompt(2)
    for _ in range(5):
        assert side.match(request) == 0
    assert len(explain(side, request).events) == 1
    for computed in range(EXPLAIN_EVENTS_MAX + 10):
        side.match(request, computed)
    assert len(explain(side, request).events) == EXPLAIN_EVENTS_MAX


def test_a_line_for_each_request_that_got_less_and_only_so_many_in_a_time(
    clocked: tuple[Side, Clock],
) -> None:
    lines: list[str] = []
    side, clock = clocked
    side.core.say_with(lines.append)
    hit = prompt(1, seed=9999)
    side.put(hit, 1)
    load(side, hit)
    side.core.loads_ended([hit.request_id])
    side.core.finished(hit.request_id)
    for seed in range(EXPLAIN_LINES_MAX + 5):
        request = prompt(1, seed=seed)
        assert side.match(request) == 0
        side.core.finished(request.request_id)
    ended(side, EXPLAIN_LINES_MAX + 6)
    assert len(lines) == EXPLAIN_LINES_MAX, "none for the one that hit"
    assert lines[0].startswith(f"kvstore: request r0: 0 of {BLOCK} tokens hit; block 0: ")
    clock.now += 1000
    last = prompt(1, seed=8888)
    assert side.match(last) == 0
    side.core.finished(last.request_id)
    ended(side, EXPLAIN_LINES_MAX + 7)
    assert lines[-1].endswith("(5 such lines were left out before it)")


def test_a_rate_counts_what_it_refuses() -> None:
    rate = Rate(2, 10.0)
    assert [rate.allows(t) for t in (0.0, 1.0, 2.0, 9.9, 10.0)] == [True, True, False, False, True]
    assert rate.refused == 2
