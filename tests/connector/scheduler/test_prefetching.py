"""Blocks of another host come to this host's node because a request's hints ask for it.

Two nodes with run directories of their own are two hosts; all that is between them is a stream.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from connector_parts import BLOCK, FakeRequest, layout, prompt
from each_input import each
from redis_servers import RedisServer, wait_until
from stores import NodeProcess

from connector.metrics import Counts
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.prefetching import PrefetchBlock, Prefetcher, bring
from connector.scheduler.request_settings import RequestSettings
from kvstore import Limits, StreamSecurity
from kvstore.spi import BlockSession, Key, Reservation

SECRET = "a secret that both hosts know"
BLOCK_BYTES = 100_000
LAYOUT = layout()
NAMESPACE = LAYOUT.groups[0].namespaces[0]


@dataclass(frozen=True)
class Action:
    action_type: str
    action_version: str
    payload: Any


@pytest.fixture
def hosts(redis_server: RedisServer) -> Iterator[tuple[BlockSession, BlockSession]]:
    """Sessions on two hosts that each have a node."""
    with ExitStack() as stack:
        sessions: list[BlockSession] = []
        key_prefix = None
        for _ in range(2):
            node = stack.enter_context(
                NodeProcess(
                    redis_server,
                    key_prefix=key_prefix,
                    options=("--listen", "127.0.0.1:0"),
                    environment={"KVSTORE_SECRET": SECRET},
                )
            )
            key_prefix = node.key_prefix
            session = BlockSession(
                redis_server.url,
                key_prefix=key_prefix,
                run_dir=node.run_dir,
                limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0),
                security=StreamSecurity(secret=SECRET.encode()),
            )
            stack.callback(session.close)
            sessions.append(session)
        yield sessions[0], sessions[1]


def keys_of(request: FakeRequest) -> list[Key]:
    return NAMESPACE.engine_keys(request.block_hashes, LAYOUT.hashes_per_key)


def save(session: BlockSession, keys: list[Key]) -> list[bytes]:
    values = [os.urandom(BLOCK_BYTES) for _ in keys]
    slots = session.reserve(keys, BLOCK_BYTES, NAMESPACE.id)
    for slot, value in zip(slots, values, strict=True):
        assert isinstance(slot, Reservation)
        slot.buffer[:] = value
    assert all(session.commit([slot for slot in slots if isinstance(slot, Reservation)]))
    return values


def here(session: BlockSession, keys: list[Key]) -> list[bytes]:
    """The leading blocks that are in this host's memory."""
    found = session.match(keys, timeout_s=0.0)
    return [bytes(view.buffer) for view in session.views(found, None) if view is not None]


class Asking:
    """A prefetcher of a host, and what it said."""

    def __init__(self, session: BlockSession) -> None:
        self.notes: list[tuple[str, str]] = []
        self.counts = Counts()
        self.prefetcher = Prefetcher(
            LazyStore(lambda: session), LAYOUT, self.counts, lambda *note: self.notes.append(note)
        )

    def ask(self, request: FakeRequest, tokens_max: int) -> str:
        """What became of it."""
        self.prefetcher.ask(request, tokens_max)
        wait_until(lambda: self.notes, "it was tried")
        return self.notes.pop()[1]


def test_blocks_of_another_host_are_in_this_hosts_memory_afterwards(
    hosts: tuple[BlockSession, BlockSession],
) -> None:
    far, near = hosts
    request = prompt(20)
    keys = keys_of(request)
    values = save(far, keys)
    wait_until(lambda: len(near.match(keys)) == 20, "all are published")
    assert here(near, keys) == []
    asking = Asking(near)
    try:
        assert asking.ask(request, 3 * BLOCK + 5) == "prefetched: 3 yes"
        assert here(near, keys) == values[:3]
        assert asking.ask(request, 1 << 40) == "prefetched: 17 yes"
        assert here(near, keys) == values
        assert asking.ask(request, 1 << 40) == "prefetched: nothing is on other hosts"
    finally:
        asking.prefetcher.close()
    stats = asking.counts.take()
    assert stats is not None
    assert stats.counts["kvstore_prefetched_blocks:yes"] == 20


def test_without_a_node_here_nothing_is_copied_to_where_it_is(
    hosts: tuple[BlockSession, BlockSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = hosts
    request = prompt(2)
    keys = keys_of(request)
    save(far, keys)
    wait_until(lambda: len(near.match(keys)) == 2, "all are published")
    monkeypatch.setattr(near, "mappings", lambda: ())
    asking = Asking(near)
    try:
        assert asking.ask(request, 1 << 40) == "prefetched: 2 no-node"
    finally:
        asking.prefetcher.close()
    assert here(near, keys) == []


def test_a_block_that_changes_while_it_is_read_is_not_sealed(
    hosts: tuple[BlockSession, BlockSession],
) -> None:
    """Whoever reads checks (rule 4): what is wrong here would be a hit for everybody."""
    far, near = hosts
    keys = keys_of(prompt(1))
    save(far, keys)
    wait_until(lambda: len(near.match(keys)) == 1, "it is published")
    (found,) = near.match(keys)

    class Changing:
        def __init__(self, view: Any) -> None:
            self.buffer = view.buffer

        def valid(self) -> bool:
            return False

    class Store:
        def __getattr__(self, name: str) -> Any:
            return getattr(near, name)

        def views(self, found: Any, *more: Any) -> Any:
            return map(Changing, near.views(found, *more))

    results: Counter[str] = Counter()
    bring([PrefetchBlock(found, NAMESPACE.id)], Store(), results)  # type: ignore[arg-type]
    assert results == {"lost": 1}
    assert here(near, keys) == []
    bring([PrefetchBlock(found, NAMESPACE.id)], near, results)
    assert results == {"lost": 1, "yes": 1}


@each(
    ("action", "tokens"),
    [
        (Action("prefetch", "1", {"max_tokens": 512}), 512),
        (Action("prefetch", "1.0", {}), 1 << 62),
        (Action("prefetch", "2", {}), 0),
        (Action("prefetch", "1", {"max_tokens": "all"}), 0),
        (Action("prefetch", "1", {"max_tokens": -1}), 0),
        (Action("prefetch", "1", [1]), 0),
    ],
)
def test_hints_that_are_not_understood_bring_nothing(action: Action, tokens: int) -> None:
    found = RequestSettings.of("r", None, [action]).prefetch_tokens
    assert min(found, 1 << 62) == tokens
