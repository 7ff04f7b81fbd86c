"""What a node answers when it is asked what became of a key."""

import pytest

from kvstore.core.events import (
    Abort,
    Clear,
    Commit,
    Drop,
    Explain,
    Introduce,
    Reserve,
    SessionDead,
    SessionResumed,
)
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.report import RESERVED_CODE, SEALED_CODE, UNKNOWN_CODE
from kvstore.keys import Namespace

ARENA = 64 << 10
KEYS = Namespace.named("test").block_keys(range(200), 1)


@pytest.fixture
def core():
    return NodeCore(node_id=5, epoch=9, size_bytes=ARENA)


def reserve(core, keys, size=8192, now=0.0, namespace_id=3, session=1):
    n = len(keys)
    event = Reserve(
        session, 1, keys, [size] * n, namespace_id, [0] * n, [0] * n, [None] * n, [0] * n
    )
    return core.handle(event, now).replies[0].body


def put(core, keys, now=0.0, **options):
    grants = reserve(core, keys, now=now, **options)
    core.handle(Commit(1, 2, [(slot, generation, 0) for slot, generation, _ in grants]), now)


def explained(core, keys, now=0.0):
    effects = core.handle(Explain(1, 7, keys), now)
    assert effects.writes == []
    (reply,) = effects.replies
    assert (reply.session, reply.request, reply.after_publish) == (1, 7, False)
    return reply.body


def fates(core, keys, now=0.0):
    return explained(core, keys, now)[0]


def test_sealed_reserved_and_unknown_are_told_apart(core):
    put(core, KEYS[:1])
    reserve(core, KEYS[1:2], now=4.0)
    assert fates(core, KEYS[:3], now=5.0) == [
        (SEALED_CODE, 0.0),
        (RESERVED_CODE, 1.0),
        (UNKNOWN_CODE, 0.0),
    ]


def test_an_evicted_key_is_told_with_its_age(core):
    put(core, KEYS[7::-1])
    put(core, KEYS[8:9], now=3.0)
    assert fates(core, KEYS[:1], now=5.0) == [(GoneWhy.EVICTED, 2.0)]


def test_a_key_that_is_stored_again_is_there(core):
    put(core, KEYS[7::-1])
    put(core, KEYS[8:9])
    put(core, KEYS[:1])
    assert fates(core, KEYS[:1]) == [(SEALED_CODE, 0.0)]


def test_deleted_and_cleared_keys_are_told(core):
    put(core, KEYS[:2])
    core.handle(Drop(1, 3, KEYS[:1]), 1.0)
    core.handle(Clear(1, 3, 3), 2.0)
    assert fates(core, KEYS[:2], now=3.0) == [(GoneWhy.DELETED, 2.0), (GoneWhy.CLEARED, 1.0)]


def test_a_block_cleared_while_it_was_written_is_told_as_cleared(core):
    ((slot, generation, _),) = reserve(core, KEYS[:1])
    core.handle(Clear(1, 3, 3), 1.0)
    assert fates(core, KEYS[:1], now=2.0) == [(GoneWhy.CLEARED, 1.0)]
    core.handle(Commit(1, 2, [(slot, generation, 0)]), 2.0)
    assert fates(core, KEYS[:1], now=2.0) == [(GoneWhy.CLEARED, 0.0)]


def test_what_was_never_committed_is_told_with_how_it_ended(core):
    grants = reserve(core, KEYS[:3])
    core.handle(Abort(1, 3, [grants[0][:2]]), 1.0)
    core.handle(SessionResumed(1, dict([grants[2][:2]]), {}), 1.0)
    core.handle(SessionDead(1), 1.0)
    assert fates(core, KEYS[:3], now=1.0) == [
        (GoneWhy.ABORTED, 0.0),
        (GoneWhy.ABORTED, 0.0),
        (GoneWhy.WRITER_DIED, 0.0),
    ]


def test_what_was_refused_is_told_with_the_reason(core):
    reserve(core, KEYS[:8])
    reserve(core, KEYS[8:9])
    reserve(core, KEYS[9:10], size=ARENA + 1)
    assert fates(core, KEYS[8:10]) == [(GoneWhy.REFUSED_SPACE, 0.0), (GoneWhy.REFUSED_SIZE, 0.0)]


def test_only_the_last_so_many_departures_are_known(monkeypatch):
    monkeypatch.setattr("kvstore.core.blocks.GONE_KEYS_MAX", 2)
    core = NodeCore(node_id=5, epoch=9, size_bytes=ARENA)
    put(core, KEYS[:3])
    core.handle(Drop(1, 3, KEYS[:2]), 1.0)
    assert explained(core, KEYS[:1])[1] is None
    core.handle(Drop(1, 3, KEYS[2:3]), 2.0)
    found, reaches_back_s, _ = explained(core, KEYS[:3], now=4.0)
    assert [code for code, _ in found] == [UNKNOWN_CODE, GoneWhy.DELETED, GoneWhy.DELETED]
    assert reaches_back_s == 3.0


def test_namespaces_with_blocks_are_told_with_their_fields_as_far_as_known(core):
    told = Namespace({"model": "m"})
    core.handle(Introduce(1, told), 0.0)
    core.handle(Introduce(1, Namespace({"model": "without blocks"})), 0.0)
    put(core, KEYS[:2], namespace_id=told.id)
    put(core, KEYS[2:3], namespace_id=3)
    assert explained(core, [])[2] == [(told.id, 2, told.canonical()), (3, 1, b"")]


def test_a_node_remembers_the_fields_of_the_last_so_many_namespaces(monkeypatch):
    monkeypatch.setattr("kvstore.core.node.NAMESPACES_MAX", 2)
    core = NodeCore(node_id=5, epoch=9, size_bytes=ARENA)
    a, b, c = (Namespace({"n": i}) for i in range(3))
    for namespace in (a, b, a, c):
        core.handle(Introduce(1, namespace), 0.0)
    assert core.namespaces.all() == [a, c]
