"""What lies on the own host is found first, and the index asked for the rest only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from redis_servers import RedisServer
from stores import PATIENT, NodeProcess

from kvstore import MissReason
from kvstore.client.block_lookup import found_here
from kvstore.spi import BlockSession
from kvstore.types import Key

SIGNING_KEY = "thirty-two random characters.."
ABSENT = b"?" * 32


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def near(redis: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis, environment={"KVSTORE_SIGNING_KEY": SIGNING_KEY}) as node:
        yield node


class Asking:
    """A session, and the keys that it asked its index for."""

    def __init__(self, node: NodeProcess, **options: Any) -> None:
        self.session = BlockSession(**{**node.client_options, "limits": PATIENT, **options})
        index = self.session.index
        self.asked: list[Key] = []
        for name in ("match", "lookup"):
            setattr(index, name, self.noted(getattr(index, name)))
        self.session._watch.look = lambda now: None  # type: ignore[method-assign]

    def noted(self, ask: Any) -> Any:
        def asked(keys: Sequence[Key]) -> Any:
            self.asked += keys
            return ask(keys)

        return asked

    def close(self) -> None:
        self.session.close()


def saved(session: BlockSession, count: int) -> list[Key]:
    keys = [os.urandom(32) for _ in range(count)]
    reservations = session.reserve(keys, 1000, 0)
    assert all(session.commit(reservations))
    return keys


@pytest.fixture
def keys(near: NodeProcess) -> Iterator[list[Key]]:
    with closing(BlockSession(**{**near.client_options, "limits": PATIENT})) as writer:
        yield saved(writer, 5)


@pytest.fixture
def asking(near: NodeProcess) -> Iterator[Asking]:
    with closing(Asking(near)) as made:
        yield made


def test_a_run_that_is_here_asks_nobody(asking: Asking, keys: list[Key]) -> None:
    run = asking.session.match(keys)
    assert [one.key for one in run] == keys
    assert run.short is None
    assert asking.session.lookup(keys[::-1]) == run[::-1]
    assert asking.asked == []


def test_it_says_what_the_index_would(asking: Asking, keys: list[Key]) -> None:
    here = asking.session.match(keys)
    assert [one.record for one in here] == [
        record[:44] for record in asking.session.index.match(keys)
    ]


def test_the_index_is_asked_from_the_first_missing_key_on(asking: Asking, keys: list[Key]) -> None:
    run = asking.session.match([*keys[:2], ABSENT, *keys[2:]])
    assert [one.key for one in run] == keys[:2]
    assert run.short is MissReason.ABSENT
    assert asking.asked == [ABSENT, *keys[2:]]


def test_a_lookup_asks_for_missing_keys_only(asking: Asking, keys: list[Key]) -> None:
    answers = asking.session.lookup([keys[0], ABSENT, keys[1]])
    assert [one and one.key for one in answers] == [keys[0], None, keys[1]]
    assert asking.asked == [ABSENT]


def test_a_key_that_the_hints_have_forgotten_is_found_by_the_index(
    asking: Asking, keys: list[Key]
) -> None:
    assert len(asking.session.match(keys)) == 5
    (attached,) = asking.session.nodes.mapped
    attached.shm.records = lambda *_: None  # type: ignore[method-assign]
    hinted_each = attached.shm.hinted_each
    attached.shm.hinted_each = lambda wanted: hinted_each(  # type: ignore[method-assign]
        keys[1] if key == keys[0] else key for key in wanted
    )
    assert [one.key for one in asking.session.match(keys)] == keys
    assert asking.asked == keys


def test_what_was_dropped_or_saved_anew_is_not_remembered(asking: Asking, keys: list[Key]) -> None:
    """A record is made once for a header, and is nothing without it."""
    session = asking.session
    before = list(session.match(keys))
    assert session.writer.drop([keys[1], keys[3]]) == [True, True]
    assert [one.key for one in session.match(keys)] == keys[:1]
    fresh = saved(session, 2)  # in the slots that became free
    assert [one and one.key for one in session.lookup([*keys, *fresh])] == [
        *(keys[0], None, keys[2], None, keys[4]),
        *fresh,
    ]
    (again,) = session.reserve([keys[1]], 1000, 0)
    assert all(session.commit([again]))
    run = session.match(keys[:2])
    assert run[0] == before[0]
    assert run[1].record != before[1].record
    assert session.view(run[1]) is not None
    assert session.view(before[1]) is None


def test_a_client_with_a_signing_key_believes_a_node_after_a_genuine_record_of_it(
    near: NodeProcess, keys: list[Key]
) -> None:
    with closing(Asking(near, signing_key=SIGNING_KEY)) as asking:
        run = asking.session.match(keys)
        assert asking.asked == keys
        assert asking.session.match(keys) == run
        assert asking.asked == keys


def test_a_node_of_another_index_is_not_believed(near: NodeProcess, keys: list[Key]) -> None:
    """It serves our keys from our run directory, and what was reset in our index is there yet."""
    with RedisServer() as other, closing(Asking(near, url=other.url)) as asking:
        asking.session.nodes.map_all(0.0)
        assert asking.session.nodes.mapped
        assert list(found_here(asking.session.nodes, None, keys)) == [None] * 5
        assert asking.session.match(keys) == []
