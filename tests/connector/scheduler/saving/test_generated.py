"""Generated blocks are saved as long as they are asked for again, here or by another engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from connector_parts import BLOCK, Clock, FakeRequest, Side, taken, wait_for

from connector.messages import WorkerReport
from connector.scheduler.saving.generated import (
    ASK_EVERY_S,
    ASKED_SHARE_MIN,
    JUDGED_BLOCKS,
    OLD_S,
    SAMPLED_ONE_IN,
    TRAIL_BLOCKS_MAX,
    TRAILS_MAX,
)
from kvstore import MissReason
from kvstore.testing.blockstore import MemoryBlockStore

ANSWER_BLOCKS = 4
ON_WITHIN = 200
"""Requests after which what is asked for again is saved again."""


class Client:
    """Sends requests to one engine, whose workers store at once all that it saves."""

    def __init__(self, store: MemoryBlockStore, clock: Clock, save_decode: bool | str = "auto"):
        self.store, self.clock = store, clock
        self.side = Side(store, clock=clock, save_decode=save_decode)
        self.numbers = itertools.count(1)
        self.fails = False
        """Whether nothing of what is saved is stored."""
        self.last: list[bytes] = []
        """Keys of the generated blocks that the last request saved."""

    def ask(self, prompt: list[int] | None = None, blocks: int = ANSWER_BLOCKS) -> list[int]:
        """Send a prompt, by default one that was never sent, and return it with the answer, which
        is so many blocks long and never the same; `last` is what was saved of that."""
        number = next(self.numbers) * 1000
        tokens = list(prompt or range(number, number + BLOCK))
        request = FakeRequest(f"r{number}", tokens)
        self.side.tables[request.request_id] = list(range(1, 200))
        self.side.core.on_new_request(request)
        saved: list[bytes] = []
        self._step(request, len(tokens), saved)
        for i in range(blocks):
            tokens += range(-number - i * BLOCK, -number - i * BLOCK + BLOCK)
            self._step(request, BLOCK, saved)
        self.side.core.finished(request.request_id)
        self.clock.now += 1.0
        ours = self.side.keys(request)[request.num_prompt_tokens // BLOCK :]
        self.last = [key for key in ours if key in saved]
        return tokens

    def _step(self, request: FakeRequest, tokens: int, saved: list[bytes]) -> None:
        for job in self.side.step((request, tokens)).saves:
            saved += [key for block in job.blocks for key in block.keys]
            stored = frozenset() if self.fails else frozenset(range(len(job.blocks)))
            report = WorkerReport(ended_saves={job.job_id: 1}, stored_blocks={job.job_id: stored})
            self.side.core.report(report)

    def look(self, after_s: float = ASK_EVERY_S) -> None:
        """Have the engine ask the nodes, `after_s` later, and hear them."""
        generated, nothing = self.side.core._generated, FakeRequest("nothing", [5])
        wait_for(lambda: not generated._thread.full, "the thread that asks")
        self.clock.now += after_s
        self.side.core.on_new_request(nothing)
        wait_for(lambda: generated._thread.put((0.0, [])), "the thread that asks")
        # What was put behind the question is answered behind it.
        wait_for(lambda: generated._answers and generated._answers[-1] == [], "the nodes' answer")
        self.side.core.on_new_request(nothing)

    def judged(self) -> tuple[int, int]:
        """Return how many generated blocks were judged since the last call: asked for, and not."""
        counts = taken(self.side.core.take_stats)
        names = ("generated_blocks:yes", "generated_blocks:no")
        return counts.get(names[0], 0), counts.get(names[1], 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(store: MemoryBlockStore, clock: Clock) -> Iterator[Client]:
    client = Client(store, clock)
    yield client
    client.side.core.close()


def drop_all(client: Client) -> None:
    """Have requests whose answers are not sent again, until enough blocks are judged."""
    while sum(totals := client.judged()) < JUDGED_BLOCKS:
        assert totals == (0, 0)
        for _ in range(-(-JUDGED_BLOCKS // ANSWER_BLOCKS)):
            client.ask()
        client.look(OLD_S)


def sampled(client: Client) -> list[int]:
    """Have requests until one is sampled; returns that with its answer."""
    for _ in range(2 * SAMPLED_ONE_IN):
        tokens = client.ask()
        if client.last:
            return tokens
    raise AssertionError("none was sampled")


def test_saving_stops_where_thinking_is_dropped_and_goes_on_where_it_is_kept(
    client: Client,
) -> None:
    drop_all(client)
    saved = []
    for _ in range(10 * SAMPLED_ONE_IN):
        client.ask()
        saved.append(len(client.last))
    assert set(saved) == {0, ANSWER_BLOCKS}, "whole, or not at all"
    assert saved.count(ANSWER_BLOCKS) == 10
    tokens, saved = client.ask(), []
    for _ in range(ON_WITHIN):
        tokens = client.ask(tokens if len(tokens) < 40 * BLOCK else None)
        saved.append(len(client.last))
        # An engine's requests take longer than a question to the nodes.
        wait_for(lambda: not client.side.core._generated._thread.full, "the thread that asks")
    first = saved[::-1].index(0) if 0 in saved else len(saved)
    assert first > 10, f"of the last requests before {ON_WITHIN} one was not saved: {saved}"


def test_one_sample_that_is_asked_for_by_chance_does_not_have_all_saved(client: Client) -> None:
    drop_all(client)
    for number in (1, 2):
        tokens = sampled(client)
        client.side.core.on_new_request(FakeRequest(f"again {number}", tokens))
        saved = [bool(client.ask() and client.last) for _ in range(SAMPLED_ONE_IN)]
        assert all(saved) is (number == 2)


def test_of_clients_that_take_turns_it_is_not_always_the_same_that_is_sampled(
    client: Client,
) -> None:
    drop_all(client)
    sampled = set()
    for number in range(40 * SAMPLED_ONE_IN):
        client.ask(blocks=1)
        if client.last:
            sampled.add(number % SAMPLED_ONE_IN)
    assert len(sampled) > 10


def test_where_all_is_returned_saving_never_stops(client: Client) -> None:
    tokens = client.ask()
    for number in range(2 * TRAILS_MAX):
        tokens = client.ask(tokens if number % 8 else None)
        assert len(client.last) == ANSWER_BLOCKS
        if number % 200 == 199:
            client.look(OLD_S)
    assert sum(client.judged()) > JUDGED_BLOCKS


@pytest.mark.parametrize(("percent", "on"), [(3, False), (8, True)])
def test_the_share_that_is_asked_for_decides(client: Client, percent: int, on: bool) -> None:
    assert (percent > 100 * ASKED_SHARE_MIN) is on
    for number in range(JUDGED_BLOCKS // ANSWER_BLOCKS + 1):
        tokens = client.ask()
        if number * percent % 100 < percent:
            client.side.core.on_new_request(FakeRequest(f"again {number}", tokens))
    client.look(OLD_S)
    saved = [bool(client.ask() and client.last) for _ in range(SAMPLED_ONE_IN)]
    assert all(saved) is on


def test_what_another_engine_reads_was_asked_for(client: Client, store: MemoryBlockStore) -> None:
    for _ in range(JUDGED_BLOCKS // ANSWER_BLOCKS + 1):
        client.ask()
        store.read |= set(client.last[:1])  # and of those behind the first nothing is known
    client.look(OLD_S)
    asked, unasked = client.judged()
    assert (asked, unasked) == (asked, 3 * asked)
    client.ask()
    assert client.last


def test_what_is_young_is_not_judged_unless_it_was_evicted(
    client: Client, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.ask()
    client.look(OLD_S - ASK_EVERY_S)
    assert client.judged() == (0, 0)
    monkeypatch.setitem(store._gone, client.last[0], MissReason.EVICTED)
    client.look()
    assert client.judged() == (0, ANSWER_BLOCKS)


def test_where_nodes_evict_within_minutes_what_is_asked_for_is_judged_as_soon_as_the_rest(
    client: Client, store: MemoryBlockStore
) -> None:
    for number in range(2 * JUDGED_BLOCKS // ANSWER_BLOCKS):
        tokens = client.ask()
        if number % 2:
            client.side.core.on_new_request(FakeRequest(f"again {number}", tokens))
        else:
            store._gone.update(dict.fromkeys(client.last, MissReason.EVICTED))
        if number % 100 == 99:
            client.look()
            asked, unasked = client.judged()
            assert asked == unasked > 0
    client.ask()
    assert client.last


def test_a_request_of_which_something_was_not_stored_is_not_judged(client: Client) -> None:
    tokens = client.ask(blocks=0)
    client.fails = True
    client.ask(tokens, blocks=1)
    client.fails = False
    client.ask()
    client.look(OLD_S)
    assert client.judged() == (0, ANSWER_BLOCKS)


def test_nothing_is_judged_while_no_node_answers(
    client: Client, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.ask()
    monkeypatch.setattr(store, "were_read", lambda keys: [])
    client.look(OLD_S)
    assert client.judged() == (0, 0)


def test_what_is_followed_is_bounded(client: Client, store: MemoryBlockStore) -> None:
    asked: list[int] = []
    real: Callable[[list[bytes]], list[bool | None]] = store.were_read  # type: ignore[assignment]
    store.were_read = lambda keys: [asked.append(len(keys)), real(keys)][1]  # type: ignore
    for _ in range(TRAILS_MAX + 10):
        client.ask(blocks=TRAIL_BLOCKS_MAX + 2)
    client.look(OLD_S)
    assert max(asked) == TRAILS_MAX * TRAIL_BLOCKS_MAX


@pytest.mark.parametrize(("save_decode", "blocks"), [(True, ANSWER_BLOCKS), (False, 0)])
def test_true_and_false_decide_for_good(
    store: MemoryBlockStore, clock: Clock, save_decode: bool, blocks: int
) -> None:
    client = Client(store, clock, save_decode)
    for _ in range(JUDGED_BLOCKS // ANSWER_BLOCKS + 1):
        client.ask()
        assert len(client.last) == blocks
    assert client.judged() == (0, 0)
    client.side.core.close()
