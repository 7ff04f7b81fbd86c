"""A node of another host is killed: its records stay in the index for seconds, and are silenced for
every client of this host by whoever notices first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess
from two_hosts import client_of, listening_node

from kvstore import Client, Limits
from kvstore.client.remote.silenced import LISTEN_EVERY_S, Silenced
from kvstore.limits import NODE_TTL_S, SILENCED_MAX

QUICK = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=1.0)


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with listening_node(redis_server) as process:
        with client_of(process) as client:
            assert client.put("k", os.urandom(MIB))
            assert client.put("other", os.urandom(MIB))
        yield process


@pytest.fixture
def two(node: NodeProcess, elsewhere: Path) -> Iterator[tuple[Client, Client]]:
    """Clients of one host, the node's is another."""
    with (
        client_of(node, elsewhere, limits=QUICK) as one,
        client_of(node, elsewhere, limits=QUICK) as two,
    ):
        yield one, two


def forget(client: Client) -> None:
    """That it remembers where blocks were."""
    client._reader._seen_remote.clear()


def announced(node: NodeProcess, client: Client) -> bool:
    word = node.directory.announcement()
    assert word is not None
    return client.session.index.node(word.node_id) is not None


def test_a_failed_read_silences_the_node_for_clients_that_have_not_noticed(
    node: NodeProcess, two: tuple[Client, Client]
) -> None:
    reader, other = two
    assert reader.get("k") is not None
    assert other.exists("k")
    tokens = other.session.match([other.namespace.value_key("k")])
    assert len(tokens) == 1
    node.kill()
    assert reader.get("other") is None
    assert not reader.exists("k")
    wait_until(lambda: not other.exists("k"), "the other has heard it")
    assert other.session.match([other.namespace.value_key("k")]) == []
    assert announced(node, other), "it was not the end of the announcement"


def test_a_client_that_only_looks_notices_a_killed_node_it_is_connected_to(
    node: NodeProcess, two: tuple[Client, Client]
) -> None:
    looking, other = two
    assert looking.get("k") is not None
    assert other.exists("k")
    node.kill()
    wait_until(lambda: not looking.exists("other"), "its connection was hung up")
    wait_until(lambda: not other.exists("k"), "the other has heard it")
    assert announced(node, other)


def test_a_failed_save_silences_the_node_too(node: NodeProcess, two: tuple[Client, Client]) -> None:
    saver, other = two
    assert saver.put("mine", b"v" * 1000)
    assert other.exists("k")
    node.kill()
    saver.put("another", b"v" * 1000)
    wait_until(lambda: not other.exists("k"), "the other has heard it")
    assert announced(node, other)


def test_it_stays_silent_until_it_answers_and_not_for_longer(
    node: NodeProcess, two: tuple[Client, Client]
) -> None:
    reader, _ = two
    assert reader.get("k") is not None
    word = node.directory.announcement()
    assert word is not None
    # As if a third client had been wrong.
    Silenced(reader.session.run_dir).say(word.node_id, word.epoch)
    said = reader.session.run_dir / "silent"
    time.sleep(2 * LISTEN_EVERY_S)
    forget(reader)
    assert not reader.exists("k"), "it is heard at once"
    wait_until(lambda: reader.exists("k"), "it found out by itself")
    assert not any(said.iterdir()), "and said so"


def test_word_of_before_its_last_answer_is_not_believed(
    node: NodeProcess, two: tuple[Client, Client]
) -> None:
    reader, _ = two
    word = node.directory.announcement()
    assert word is not None
    assert reader.get("k") is not None
    Silenced(reader.session.run_dir).say(word.node_id, word.epoch)
    before = time.monotonic() - NODE_TTL_S / 2
    os.utime(next((reader.session.run_dir / "silent").iterdir()), (before, before))
    time.sleep(2 * LISTEN_EVERY_S)
    assert reader.exists("k")


def test_what_is_said_is_heard_once_and_does_not_pile_up(tmp_path: Path) -> None:
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    assert list(listener.heard(0.0)) == []
    for node_id in range(SILENCED_MAX + 10):
        speaker.say(node_id, 7)
    heard = list(listener.heard(10.0))
    assert len(heard) == SILENCED_MAX
    assert {epoch for _, epoch, _ in heard} == {7}
    again = len(list(listener.heard(20.0)))
    assert again in (0, SILENCED_MAX), "what was one too many went, which is news too"
    assert list(listener.heard(25.0)) == []
    old = time.monotonic() - NODE_TTL_S - 1
    for path in (tmp_path / "silent").iterdir():
        os.utime(path, (old, old))
    speaker.say(1, 8)
    assert [one[:2] for one in listener.heard(30.0)] == [(1, 8)]
    speaker.unsay(1, 8)
    assert list((tmp_path / "silent").iterdir()) == []


def test_nothing_depends_on_being_able_to_say_or_hear_it(tmp_path: Path) -> None:
    (tmp_path / "silent").write_text("no directory")
    silenced = Silenced(tmp_path)
    silenced.say(1, 1)
    silenced.unsay(1, 1)
    assert list(silenced.heard(0.0)) == []
    (tmp_path / "silent").unlink()
    silenced.say(1, 1)
    (tmp_path / "silent" / "no-number").touch()
    (tmp_path / "silent" / "zz").touch()
    assert [one[:2] for one in silenced.heard(10.0)] == [(1, 1)]
