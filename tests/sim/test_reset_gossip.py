"""Resets under random bad luck: nodes that die and come back warm, an index that forgets.

The real core, the real gossip and the real question "who has confirmed it", over an index
in memory and time that the test moves. What must never happen: a block that was there when a
reset began is there, in a node that can be read, after the reset was said to be complete.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import announcement

from kvstore.client import reset_everywhere
from kvstore.core.events import NOBODY, Reserve, Reset
from kvstore.core.node import NodeCore
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.memory import MemoryIndex
from kvstore.machine import Machine
from kvstore.node.publishing.heartbeat import HEARTBEAT_S, Heartbeat
from kvstore.node.publishing.resets import ResetNews
from kvstore.nodedir import NodeDir
from kvstore.system.host_clock import Moment

HOSTS = 3
PREFIX = "kv:t"
SEEDS = 40
STEPS = 80


class Index(MemoryIndex):
    """One that may be away, and that has another name each time it has lost everything."""

    unavailable = False

    def _answer(self) -> None:
        if self.unavailable:
            raise IndexUnavailableError("away")

    def lose_everything(self) -> None:
        super().lose_everything()
        self._incarnation = f"{random.random()}"

    def incarnation(self) -> str:
        self._answer()
        return super().incarnation()

    def nodes(self) -> dict[int, bytes]:
        self._answer()
        return super().nodes()

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        self._answer()
        super().announce(node_id, announcement, ttl_s)


class World:
    """Hosts with one node each; the second number of a key is when it was saved."""

    def __init__(self, seed: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.machine = Machine()
        self.machine.monotonic = self.machine.wall = lambda: self.now
        self.machine.moment = lambda: Moment(b"b" * 16, int(self.now * 1e3), int(self.now * 1e3))
        self.machine.sleep = self.sleep
        self.index = Index(now=lambda: self.now)
        self.nodes = [Host(self, root / f"{seed}-{i}", i) for i in range(HOSTS)]
        self.complete_before = 0
        """Blocks saved before this number must be nowhere."""
        self.saved = 0
        self.counts: Counter[str] = Counter()

    def sleep(self, for_s: float) -> None:
        """Time goes by for all: those that live have heartbeats."""
        until = self.now + for_s
        while self.now < until:
            self.now += min(0.2, until - self.now + 1e-9)
            for node in self.nodes:
                node.beat_if_due()

    def check(self) -> None:
        for node in self.nodes:
            if node.readable:
                assert node.core is not None
                old = [
                    n for n in map(number_of, node.core.blocks.by_key) if n < self.complete_before
                ]
                assert not old, f"{node.name} has {old}, reset before {self.complete_before}"


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def number_of(key: bytes) -> int:
    return int.from_bytes(key, "big")


class Host:
    def __init__(self, world: World, run_dir: Path, number: int) -> None:
        self.world, self.run_dir, self.name = world, run_dir, f"n{number}"
        self.directory = NodeDir(run_dir, self.name)
        self.directory.path.mkdir(parents=True)
        self.word = announcement(node_id=number + 1, name=self.name, key_prefix=PREFIX)
        self.core: NodeCore | None = None
        """Also of one that is dead: what its memory holds."""
        self.alive = self.readable = False
        self.start()

    def start(self) -> None:
        fresh = NodeCore(node_id=self.word.node_id, epoch=1, size_bytes=4 << 20)
        self.news = ResetNews(
            self.directory, self.run_dir, PREFIX, self.world.index, machine=self.world.machine
        )
        if self.core is not None:
            warm, self.core.resets = self.core, fresh.resets
            try:
                self.news.catch_up(warm, lambda _: None)
                self.world.counts["warm"] += 1
            except ValueError:
                self.core = fresh
                self.world.counts["empty"] += 1
        else:
            self.core = fresh
        self.heartbeat = Heartbeat(
            self.world.index,
            self.word,
            lambda: None,
            lambda: 0,
            None,
            self.hear,
            lambda incarnation: self.news.announced(incarnation, self.core.resets),  # type: ignore[union-attr]
            machine=self.world.machine,
        )
        self.alive = self.readable = True
        self.heartbeat.beat()
        self.due = self.world.now + HEARTBEAT_S

    def hear(self, announcements: Any) -> str:
        assert self.core is not None
        for number, ids in self.news.unknown_to(self.core.resets, announcements):
            self.core.handle(Reset(NOBODY, 0, number, ids), self.world.now)
        self.news.save(self.core.resets)
        return self.core.resets.pack()

    def beat_if_due(self) -> None:
        if self.alive and self.world.now >= self.due:
            self.due = self.world.now + HEARTBEAT_S * self.world.rng.uniform(0.8, 1.2)
            self.heartbeat.beat()

    def kill(self) -> None:
        self.alive = self.readable = False

    def save(self) -> None:
        if self.alive:
            assert self.core is not None
            key = key_of(self.world.saved)
            self.world.saved += 1
            self.core.handle(Reserve(1, 1, [key], [10], 7, [0], [0], [b"x" * 10], [0]), 0.0)

    # What `reset_everywhere` asks of a writer, and of a directory of nodes.

    key_prefix = PREFIX

    @property
    def machine(self) -> Machine:
        return self.world.machine

    def announcements(self) -> Any:
        return announced_nodes(self.world.index)

    def reset(self, number: int, ids: Any) -> int:
        assert self.core is not None
        effects = self.core.handle(Reset(1, 1, number, ids), self.world.now)
        self.news.save(self.core.resets)
        self.heartbeat.beat()
        return int(effects.replies[0].body[0])

    def here(self) -> Iterator[Any]:
        if self.alive:
            kept = self.directory.kept_resets
            yield self.word, SimpleNamespace(alive=lambda: True, kept_resets=kept)


def step(world: World) -> None:
    rng = world.rng
    node = rng.choice(world.nodes)
    what = rng.randrange(12)
    if what < 4:
        node.save()
    elif what < 6:
        world.sleep(rng.choice([0.05, 0.5, 2.0, 7.0]))
    elif what == 6:
        node.kill() if node.alive else node.start()
    elif what == 7:
        world.index.lose_everything()
    elif what == 8:
        world.index.unavailable = not world.index.unavailable
    elif what == 9 and not node.alive:
        node.start()
    elif what >= 10 and node.alive:
        before = world.saved
        away: Any = None
        place: Any = node
        result = reset_everywhere.reset_everywhere(
            place,
            away,
            world.index,
            place,
            [7],
            rng.choice([0.0, 4.0]),
        )
        world.counts["complete" if result else "incomplete"] += 1
        if result:
            world.complete_before = before
    world.check()


def try_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed, tmp_path, monkeypatch)
        for _ in range(STEPS):
            step(world)
        counts += world.counts
    return counts


def test_after_a_complete_reset_nothing_older_can_be_read_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = try_seeds(tmp_path, monkeypatch)
    for name in ("complete", "incomplete", "warm", "empty"):
        assert counts[name] > 2, counts


@pytest.mark.parametrize("forgets", [False, True])
def test_who_was_down_learns_of_it_when_all_who_knew_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    world = World(0, tmp_path, monkeypatch)
    one, two, away = world.nodes
    away.save()
    away.kill()
    world.sleep(7.0)
    place: Any = one
    assert reset_everywhere.reset_everywhere(place, place, world.index, place, [7], timeout_s=5.0)
    one.kill()
    two.kill()
    world.sleep(30.0)
    if forgets:
        world.index.lose_everything()
    away.start()
    assert away.core is not None
    assert not away.core.blocks.by_key


def test_a_node_that_was_alone_keeps_its_blocks_when_the_index_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0, tmp_path, monkeypatch)
    one, two, alone = world.nodes
    one.kill()
    two.kill()
    world.sleep(30.0)
    alone.save()
    alone.kill()
    world.sleep(30.0)
    world.index.lose_everything()
    alone.start()
    assert alone.core is not None
    assert len(alone.core.blocks.by_key) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("broken", "method"),
    [
        (ResetNews, "catch_up"),
        (ResetNews, "unknown_to"),
    ],
)
def test_the_fuzz_finds_a_node_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, method: str
) -> None:
    """Negative control."""
    answers: dict[str, Any] = {"catch_up": lambda *_: None, "unknown_to": lambda *_: []}
    monkeypatch.setattr(broken, method, answers[method])
    if method == "unknown_to":  # it says that it has dropped what it has not heard of
        monkeypatch.setattr(Host, "hear", lambda host, words: _repeat(words))
    with pytest.raises(AssertionError, match="reset before"):
        try_seeds(tmp_path, monkeypatch)


def _repeat(words: Any) -> str:
    return max((word.resets for word in words), default="", key=len)
