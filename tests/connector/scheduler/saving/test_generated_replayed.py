"""What `save_decode: auto` decides on sessions of agents, replayed in the trace's own time through
the scheduler side and a node's core, beside what `true` saves and finds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
from connector_parts import BLOCK, PER_KEY, Clock, Side, taken

from benchmarks.hybrids.replay import CoreStore, Prompt, block_hashes
from benchmarks.suites.hybrids import trace
from connector.messages import SaveJob, WorkerReport
from connector.scheduler.saving import generated
from connector.scheduler.saving.generated import JUDGED_BLOCKS, SAMPLED_ONE_IN
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.spi import Key, LookupResult

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ANSWER_BLOCKS = 4
"""Blocks of an answer; of an agent's, those that its next prompt adds, and at most so many."""
ON_WITHIN = 200
"""Requests after which what is asked for again is saved again."""
TABLE = list(range(1, 1 << 16))


@dataclass
class Request:
    """Names the blocks of its prompt and its answer, as a trace does, in place of tokens."""

    request_id: str
    blocks: Sequence[int]
    prompt_blocks: int
    num_computed_tokens: int = 0
    tokens_so_far: int = field(init=False)
    kv_transfer_params: None = None

    def __post_init__(self) -> None:
        self.tokens_so_far = self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_blocks * BLOCK

    @property
    def num_tokens(self) -> int:
        return self.tokens_so_far

    @cached_property
    def _hashes(self) -> list[bytes]:
        return [one for one in block_hashes(self.blocks, 64) for _ in range(PER_KEY)]

    @property
    def block_hashes(self) -> list[bytes]:
        return self._hashes[: self.tokens_so_far // BLOCK * PER_KEY]


class AtOnce:
    """Handles what it is given within the call: in the trace's time a thread takes none."""

    def __init__(self, name: str, handle: Callable[[Any], None], items_max: int) -> None:
        self.put = handle

    def start(self) -> None:
        pass

    def end(self) -> None:
        pass

    def join(self, timeout_s: float) -> bool:
        return True


class Store(CoreStore):
    """Counts look-ups, as the model that `Side` begins with."""

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        self.match_calls += 1
        return super().lookup(keys, timeout_s)


class Replay:
    """One engine whose workers load and store at once, in front of a node of so many blocks."""

    def __init__(self, blocks: int, save_decode: bool | str = "auto") -> None:
        self.clock = Clock()
        self.store = Store(blocks * SLOT_BYTES_MIN)
        self.side: Any = Side(
            self.store, clock=self.clock, pinned_blocks_max=1 << 20, save_decode=save_decode
        )
        self._names = itertools.count()
        self.asked_blocks = self.hit_blocks = self.saved_blocks = 0
        self.saves: list[bool] = []
        """Of each request with an answer, whether that was saved."""

    def ask(self, prompt: Prompt) -> None:
        size = len(prompt.blocks)
        request = Request(f"r{next(self._names)}", [*prompt.blocks, *prompt.answer], size)
        self.clock.now = self.store.now = 1000.0 + prompt.at
        core = self.side.core
        self.side.tables[request.request_id] = TABLE
        core.on_new_request(request)
        found = self.side.match(request)
        core.allocated(request, lambda: [TABLE], found)
        self.asked_blocks += size
        self.hit_blocks += found // BLOCK
        request.num_computed_tokens = found
        self._step(request, request.num_prompt_tokens - found)
        request.tokens_so_far += len(prompt.answer) * BLOCK
        saved = self._step(request, len(prompt.answer) * BLOCK) if prompt.answer else 0
        if prompt.answer:
            self.saves.append(saved > 0)
        core.finished(request.request_id)
        del self.side.tables[request.request_id]

    def _step(self, request: Request, tokens: int) -> int:
        plan = self.side.step((request, tokens))
        report = WorkerReport()
        for load in plan.loads:
            self.store.touch([one.key for block in load.blocks for one in block.found])
            report.ended_loads[load.job_id] = 1
        for job in plan.saves:
            report.stored_blocks[job.job_id] = self._stored(job)
            report.ended_saves[job.job_id] = 1
        self.side.core.report(report)
        return sum(len(job.blocks) for job in plan.saves)

    def _stored(self, job: SaveJob) -> frozenset[int]:
        keys = [key for block in job.blocks for key in block.keys]
        assert self.store.save(keys, [SLOT_BYTES_MIN] * len(keys))
        before = [key for shard in (job.before or ((),))[0] for key in shard]
        self.store.touch([*before, *keys], saved=True)
        self.saved_blocks += len(keys)
        return frozenset(range(len(keys)))

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.asked_blocks

    @property
    def read_share(self) -> float:
        """Return the share of stored bytes that were ever read."""
        counts = self.store.core.blocks.watched.bytes
        return counts["ever_read_bytes"] / counts["stored_bytes"]

    def judged(self) -> tuple[int, int]:
        """Return how many generated blocks were judged: asked for, and not."""
        counts = taken(self.side.core.take_stats)
        return counts.get("generated_blocks:yes", 0), counts.get("generated_blocks:no", 0)


Replays = Callable[..., Replay]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    monkeypatch.setattr(generated, "WorkThread", AtOnce)
    random.seed(7)
    open_ones: list[Replay] = []

    def replay(prompts: Sequence[Prompt], blocks: int, save_decode: bool | str = "auto") -> Replay:
        one = Replay(blocks, save_decode)
        open_ones.append(one)
        for prompt in prompts:
            one.ask(prompt)
        return one

    yield replay
    for one in open_ones:
        one.side.core.close()


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Sessions that return all they were answered, about 30 at the same time."""
    source, lines = random.Random(7), []
    for _ in range(80):
        at, total, requests = 0.0, source.randint(4, 20), []
        for turn in range(source.randint(6, 16)):
            kept = total if turn else 0
            total += source.randint(ANSWER_BLOCKS, 12)
            requests.append([round(at, 1), kept, total])
            at += source.expovariate(1 / 60)
        lines.append(json.dumps(requests))
    file = tmp_path_factory.mktemp("trace") / "sessions.jsonl"
    file.write_text("\n".join(lines))
    return trace(file, 1, 30, ANSWER_BLOCKS)


def dropped(
    prompts: Sequence[Prompt], of: Callable[[Prompt], bool] = lambda _: True
) -> list[Prompt]:
    """Return the same prompts, with answers of which no later prompt has anything."""
    names = itertools.count(1 << 40)
    return [
        p._replace(answer=list(itertools.islice(names, ANSWER_BLOCKS))) if of(p) else p
        for p in prompts
    ]


@pytest.mark.parametrize("capacity_blocks", [1 << 14, 600])
def test_of_agents_that_return_everything_all_is_saved_and_found(
    replayed: Replays, agents: list[Prompt], capacity_blocks: int
) -> None:
    always, auto = (replayed(agents, capacity_blocks, mode) for mode in (True, "auto"))
    asked, unasked = auto.judged()
    assert asked + unasked >= JUDGED_BLOCKS
    assert all(auto.saves)
    assert abs(auto.hit_rate - always.hit_rate) < 0.002
    if capacity_blocks == 1 << 14:
        assert auto.read_share >= 0.3


def test_of_clients_that_drop_their_thinking_less_is_saved_and_as_much_found(
    replayed: Replays, agents: list[Prompt]
) -> None:
    thinking = dropped(agents)
    always, auto = (replayed(thinking, 1 << 14, mode) for mode in (True, "auto"))
    asked, _ = auto.judged()
    assert asked == 0
    assert auto.saves[-4 * SAMPLED_ONE_IN :].count(True) == 4
    assert auto.hit_rate == always.hit_rate
    assert auto.saved_blocks < always.saved_blocks
    assert auto.read_share > always.read_share
    # The same clients return everything from here on.
    behind = agents[-1].at + 3600.0
    auto.saves.clear()
    for prompt in agents[:ON_WITHIN]:
        auto.ask(prompt._replace(at=behind + prompt.at, blocks=[-1, *prompt.blocks]))
    assert all(auto.saves[-10:])


def test_where_half_of_the_clients_return_everything_all_is_saved(
    replayed: Replays, agents: list[Prompt]
) -> None:
    mixed = replayed(dropped(agents, lambda prompt: prompt.session % 2 == 0), 1 << 14)
    asked, unasked = mixed.judged()
    assert asked + unasked >= JUDGED_BLOCKS
    assert 0.3 < asked / (asked + unasked) < 0.7
    assert all(mixed.saves)
