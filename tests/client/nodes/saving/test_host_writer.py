"""Several nodes on one host are one store to whoever saves there."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import PATIENT, NodeProcess, node_stats

from kvstore import Client, Limits
from kvstore.client.base import Reservation
from kvstore.client.nodes import control
from kvstore.client.nodes.saving import host_writer
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.nodes.saving.placement import Home, homes_of
from kvstore.client.nodes.saving.writer import Writer
from kvstore.errors import NodeUnavailableError
from kvstore.protocol.control import Op
from kvstore.spi import BlockSession
from kvstore.types import Key

MIB = 1 << 20
NODE_BYTES = 32 * MIB
NAMESPACE = 7


@pytest.fixture
def pair(redis_server: RedisServer) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes of one host and one key prefix."""
    with (
        NodeProcess(redis_server, size=NODE_BYTES) as one,
        NodeProcess(
            redis_server,
            size=NODE_BYTES,
            key_prefix=one.key_prefix,
            run_dir=one.run_dir,
            name="second",
        ) as two,
    ):
        yield one, two


def stats_of(node: NodeProcess) -> dict[str, float]:
    """What the node itself says, whoever else there is."""
    with Client(**node.client_options, node=node.name) as client:
        return dict(node_stats(client))


def blocks_at(*nodes: NodeProcess) -> list[float]:
    return [stats_of(node)["blocks"] for node in nodes]


def evicted(*nodes: NodeProcess) -> float:
    return sum(stats_of(node)["evicted"] for node in nodes)


def test_two_clients_fill_both_nodes_before_anything_is_evicted(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    """Together they save 50 of 64 MiB: more than one node has."""
    options = pair[0].client_options
    with Client(**options) as one, Client(**options) as two:
        for number in range(25):
            for name, client in (("a", one), ("b", two)):
                assert client.put(f"{name}{number}", os.urandom(MIB - 4096))
        assert evicted(*pair) == 0
        assert min(blocks_at(*pair)) >= 18
        assert all(one.get(f"b{number}") is not None for number in range(25))


def test_what_others_save_to_a_node_counts_at_once_where_little_room_is_left(
    pair: tuple[NodeProcess, NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their share of one node's keys is larger than that node, as once in thirty runs of the test
    above; what a client was told of its room before is out of date."""
    monkeypatch.setattr("kvstore.client.nodes.saving.homes.ROOM_BELIEVED_S", 3600.0)
    options, size_bytes = pair[0].client_options, MIB - 4096
    with Client(**options) as one, Client(**options) as two:
        words = [node.directory.announcement() for node in pair]
        homes = [Home(w.node_id, w.size_bytes, w.size_bytes, w.size_bytes) for w in words if w]
        names = [
            name
            for name in map(str, range(200))
            if homes_of([(one.namespace.value_key(name), size_bytes)], {}, homes)
            == [homes[0].node_id]
        ][:40]
        assert len(names) == 40
        for name, client in zip(names, itertools.cycle((one, two)), strict=False):
            assert client.put(name, os.urandom(size_bytes))
        assert evicted(*pair) == 0
        assert blocks_at(*pair) == [32, 8]


def test_blocks_of_long_prompts_fill_both_nodes_before_anything_is_evicted(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    """The blocks of a run belong together, so one home alone would overflow here."""
    block = os.urandom(MIB // 2)
    with Client(**pair[0].client_options, block_tokens=4) as client:
        for prompt in range(6):
            tokens = [prompt, *range(1, 80)]
            assert all(client.put_blocks(tokens, [block] * 20))
        assert evicted(*pair) == 0
        assert all(client.match_prefix([prompt, *range(1, 80)]).blocks == 20 for prompt in range(6))


def test_a_run_lies_on_one_node_while_that_has_room(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    with Client(**pair[0].client_options, block_tokens=4) as client:
        assert all(client.put_blocks(list(range(80)), [b"x" * 10_000] * 20))
    assert sorted(blocks_at(*pair)) == [0, 20]


def test_what_is_stored_on_one_node_is_not_stored_again_on_another(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    """Also when it is not at the node that its key would be at."""
    names = [f"k{number}" for number in range(40)]
    with Client(**pair[0].client_options, node="second") as client:
        assert all(client.put_many(dict.fromkeys(names, b"v" * 5000)))
    with Client(**pair[0].client_options) as client:
        assert {r.status.value for r in client.put_many(dict.fromkeys(names, b"v" * 5000))} == {
            "exists"
        }
    assert blocks_at(*pair) == [0, 40]


def test_a_client_that_names_a_node_saves_to_it_alone(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    with Client(**pair[0].client_options, node="node") as client:
        assert all(client.put_many({f"k{number}": b"v" for number in range(20)}))
    assert blocks_at(*pair) == [20, 0]


def test_touches_pins_and_deletions_reach_the_node_that_has_the_block(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    options = pair[0].client_options
    with Client(**options, node="second") as there, Client(**options, node="node") as reader:
        assert there.put("kept", b"k" * 5000)
        assert there.put("pinned", b"p" * 5000)
        assert there.put("gone", b"g" * 5000)
        pinned = reader.pin("pinned")
        assert pinned is not None
        assert reader.delete("gone")
        for number in range(120):
            assert there.put(f"filler{number}", os.urandom(MIB // 2))
            assert reader.get("kept") == b"k" * 5000, f"evicted after {number} puts"
            reader.session.writer._touch_at = 0.0  # do not wait for the next time
        assert stats_of(pair[1])["evicted"] > 40
        assert bytes(pinned.buffer) == b"p" * 5000
        assert stats_of(pair[1])["pinned"] == 1
        pinned.close()
        assert reader.get("gone") is None
        wait_until(lambda: stats_of(pair[1])["pinned"] == 0, "the pin ends")


def test_a_clear_empties_all_nodes_of_the_host(pair: tuple[NodeProcess, NodeProcess]) -> None:
    with Client(**pair[0].client_options) as client:
        assert all(client.put_many({f"k{number}": b"v" for number in range(40)}))
        assert 0 not in blocks_at(*pair)
        assert client.session.clear(client.namespace.id) == 40
        assert blocks_at(*pair) == [0, 0]
        assert node_stats(client)["blocks"] == 0


def keys_for_both() -> list[bytes]:
    return [os.urandom(32) for _ in range(40)]


def reserved(session: BlockSession, keys: list[bytes]) -> list[Reservation]:
    answers = session.reserve(keys, 1000, NAMESPACE)
    granted = [answer for answer in answers if isinstance(answer, Reservation)]
    assert len(granted) == len(keys), answers
    assert [r.key for r in granted] == keys
    return granted


def test_reservations_of_both_nodes_are_committed_and_aborted_together(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    keys = keys_for_both()
    with closing(BlockSession(**pair[0].client_options)) as session:
        granted = reserved(session, keys)
        assert len({r.node_id for r in granted}) == 2
        for i, reservation in enumerate(granted):
            reservation.buffer[:] = bytes([i]) * 1000
        session.abort(granted[:10])
        assert all(session.commit(granted[10:]))
        found = session.lookup(keys)
        assert [one is None for one in found] == [True] * 10 + [False] * 30
        for i, one in enumerate(found[10:], 10):
            assert one is not None
            view = session.view(one)
            assert view is not None
            assert bytes(view.buffer) == bytes([i]) * 1000
        pins = session.pin(keys[10:])
        assert None not in pins
        session.unpin([pin for pin in pins if pin is not None])
        assert [stats_of(node)["reserved"] + stats_of(node)["pinned"] for node in pair] == [0, 0]


def test_a_node_that_dies_costs_the_reservations_there_and_no_put(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    keys = keys_for_both()
    with (
        closing(BlockSession(**pair[0].client_options)) as session,
        Client(**pair[0].client_options) as client,
    ):
        granted = reserved(session, keys)
        assert client.put("before", b"v")
        pair[1].kill()
        word = pair[1].directory.announcement()
        assert word is not None
        for reservation in granted:
            reservation.buffer[:] = bytes(1000)
        results = session.commit(granted)
        assert [bool(r) for r in results] == [r.node_id != word.node_id for r in granted]
        assert all(client.put_many({f"k{number}": b"v" * 40_000 for number in range(40)}))
        assert len(reserved(session, keys_for_both())) == 40


def test_a_node_that_hangs_costs_one_deadline_and_then_no_put(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    with Client(**pair[0].client_options) as client:
        assert all(client.put_many({f"a{number}": b"v" for number in range(40)}))
        for writer in client.session.writer.writers():
            writer.link().control._timeout_s = 0.3
        pair[1].signal(signal.SIGSTOP)
        try:
            first = client.put_many({f"b{number}": b"v" * 40_000 for number in range(40)})
            assert any(first)
            for i in range(20):
                assert client.put(f"c{i}", b"v" * 40_000)
        finally:
            pair[1].signal(signal.SIGCONT)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Also of a client's first request, with which it waits longest."""
    monkeypatch.setattr(control, "FIRST_ANSWER_TIMEOUT_S", 1.5)
    return Limits(redis_timeout_s=5.0, request_timeout_s=0.6)


NAMES = [f"name{number}" for number in range(100)]


def first_asked(session: BlockSession, key: bytes, size_bytes: int) -> str:
    ((link, _),) = session.writer.plan([key], [size_bytes])
    return link.announcement.name


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "fresh"])
@pytest.mark.parametrize("size_bytes", [100, 100_000], ids=["inline", "in slots"])
def test_a_put_whose_first_node_hangs_goes_to_a_healthy_one(
    pair: tuple[NodeProcess, NodeProcess], soon: Limits, connected: bool, size_bytes: int
) -> None:
    with Client(**{**pair[0].client_options, "limits": soon}) as client:
        key_of = client.namespace.value_key
        name = next(
            n for n in NAMES if first_asked(client.session, key_of(n), size_bytes) == "node"
        )
        if connected:
            for writer in client.session.writer.writers():
                writer.stats()
        pair[0].signal(signal.SIGSTOP)
        try:
            result = client.put(name, b"v" * size_bytes)
            assert result, result.reason
            assert client.get(name) == b"v" * size_bytes
        finally:
            pair[0].signal(signal.SIGCONT)
        assert client.put(name, b"v" * size_bytes).status.value == "exists"


def test_a_reservation_whose_first_node_hangs_is_granted_by_a_healthy_one(
    pair: tuple[NodeProcess, NodeProcess], soon: Limits
) -> None:
    with closing(BlockSession(**{**pair[0].client_options, "limits": soon})) as session:
        keys = (os.urandom(32) for _ in range(100))
        key = next(key for key in keys if first_asked(session, key, 1000) == "node")
        pair[0].signal(signal.SIGSTOP)
        try:
            (granted,) = reserved(session, [key])
            assert granted.node_id == pair[1].directory.announcement().node_id
        finally:
            pair[0].signal(signal.SIGCONT)
        assert all(session.commit([granted]))
        wait_until(lambda: stats_of(pair[0])["reserved"] == 0, "what it granted is given back")


def test_a_node_that_comes_later_is_used_and_one_that_ended_is_not(
    redis_server: RedisServer,
) -> None:
    with (
        NodeProcess(redis_server, size=NODE_BYTES) as one,
        Client(**one.client_options) as client,
    ):
        assert client.put("first", b"v")
        with NodeProcess(
            redis_server,
            size=NODE_BYTES,
            key_prefix=one.key_prefix,
            run_dir=one.run_dir,
            name="second",
        ) as two:
            wait_until(lambda: len(client.session.writer.writers()) == 2, "the node is found")
            assert all(client.put_many({f"k{number}": b"v" for number in range(40)}))
            assert 0 not in blocks_at(one, two)
        assert all(client.put_many({f"l{number}": b"v" for number in range(40)}))
        wait_until(lambda: len(client.session.writer.writers()) == 1, "the end is noticed")


def test_requests_are_sent_to_all_nodes_before_any_answer_is_waited_for(
    pair: tuple[NodeProcess, NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each node that hangs would cost a deadline of its own."""
    with Client(**pair[0].client_options) as client:
        assert all(client.put_many({f"a{number}": b"v" for number in range(40)}))
        order: list[tuple[str, str]] = []
        for writer in client.session.writer.writers():
            control = writer.link().control
            name, post, collect = control.directory.name, control.post, control.collect

            def noted_post(op, *args, name=name, post=post, **kwargs):  # type: ignore[no-untyped-def]
                order.append(("post" if op is Op.RESERVE else "other", name))
                return post(op, *args, **kwargs)

            def noted_collect(ticket, name=name, collect=collect):  # type: ignore[no-untyped-def]
                order.append(("collect", name))
                return collect(ticket)

            monkeypatch.setattr(control, "post", noted_post)
            monkeypatch.setattr(control, "collect", noted_collect)
        assert all(client.put_many({f"b{number}": b"v" for number in range(40)}))
        assert [what for what, _ in order[:2]] == ["post", "post"]
        assert {name for _, name in order[:2]} == {"node", "second"}


def test_a_value_too_large_for_one_node_goes_to_the_one_that_can_take_it(
    redis_server: RedisServer,
) -> None:
    with (
        NodeProcess(redis_server, size=2 * MIB) as small,
        NodeProcess(
            redis_server,
            size=32 * MIB,
            key_prefix=small.key_prefix,
            run_dir=small.run_dir,
            name="large",
        ),
        Client(**small.client_options) as client,
    ):
        assert all(client.put_many({f"k{number}": bytes(3 * MIB) for number in range(8)}))


def test_room_is_said_without_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        NodeProcess(redis_server, size=NODE_BYTES) as node,
        Client(**node.client_options) as client,
    ):
        wait_until(lambda: node.directory.room() > 0, "it is said")
        before = node.directory.room()
        assert NODE_BYTES - MIB <= before <= NODE_BYTES
        assert client.put("k", bytes(MIB))
        wait_until(lambda: node.directory.room() < before, "it is said anew")


def test_who_tells_a_node_something_where_there_is_none_holds_back_no_save(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_writer, "HERE_BELIEVED_S", 3600.0)
    looks: list[str] = []
    with closing(BlockSession(redis_server.url, run_dir=tmp_path, limits=PATIENT)) as session:
        monkeypatch.setattr(session.nodes, "writables", lambda: looks.append("look") or [])
        session.touch([])
        assert len(looks) == 1
        for _ in range(2):
            with pytest.raises(NodeUnavailableError):
                session.writer.plan([bytes(32)], [1])
        assert len(looks) == 2, "a save looks once more, and the next one not so soon"
        session.writer.touch([], session.machine.monotonic(), at_once=True)
        assert len(looks) == 2


def test_pins_of_one_node_end_when_the_next_is_interrupted(
    pair: tuple[NodeProcess, NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["one", "two"]
    for node, name in zip(pair, names, strict=True):
        with Client(**node.client_options, node=node.name) as client:
            assert client.put(name, b"v" * 50_000)
    pin_many, asked = Writer.pin_many, []

    def interrupted(writer: Writer, keys: Sequence[Key], granted: Grants) -> object:
        asked.append(writer)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return pin_many(writer, keys, granted)

    with Client(**pair[0].client_options) as client:
        keys = [client.namespace.value_key(name) for name in names]
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "pin_many", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.session.pin(keys)
        assert [stats_of(node)["pinned"] for node in pair] == [0, 0]
        pinned = client.session.pin(keys)
        assert None not in pinned
