"""What a dead node leaves is not kept mapped: its next start may need the room."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import NodeProcess

from kvstore import Client
from kvstore.client.base import Reservation
from kvstore.spi import BlockSession

KEY = b"k" * 32
LENGTH = 100_000


@pytest.fixture
def mortal(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as process:
        yield process


def mapped(path: Path) -> int:
    """How often this process maps that file, be it deleted."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(path) in line for line in lines)


def reserved(session: BlockSession, key: bytes = KEY) -> Reservation:
    (slot,) = session.reserve([key], LENGTH, 1)
    assert isinstance(slot, Reservation)
    return slot


def saved(session: BlockSession, key: bytes = KEY) -> None:
    slot = reserved(session, key)
    slot.buffer[:] = bytes(LENGTH)
    assert all(session.commit([slot]))


def test_a_client_that_only_saves_unmaps_a_dead_node(mortal: NodeProcess) -> None:
    with closing(BlockSession(**mortal.client_options)) as session:
        saved(session)
        data, head = mortal.segment_files()
        assert mapped(data)
        mortal.kill()
        wait_until(lambda: mapped(data) + mapped(head) == 0, "nothing of it is mapped")
        mortal.forget()
        mortal.start()
        wait_until(lambda: session.writer.no_node() is None, "the next start is found")
        saved(session)


def test_an_idle_client_that_has_read_unmaps_a_dead_node(mortal: NodeProcess) -> None:
    with Client(**mortal.client_options) as client:
        assert client.put("k", b"v" * LENGTH)
        assert client.get("k") == b"v" * LENGTH
        data, head = mortal.segment_files()
        assert mapped(data)
        mortal.kill()
        wait_until(lambda: mapped(data) + mapped(head) == 0, "nothing of it is mapped")
        assert client.get("k") is None


def test_a_reservation_of_a_dead_node_stays_mapped_until_it_is_dropped(
    mortal: NodeProcess,
) -> None:
    with closing(BlockSession(**mortal.client_options)) as session:
        slot = reserved(session)
        data, head = mortal.segment_files()
        mortal.kill()
        wait_until(lambda: mapped(head) == 0, "what is not in use is unmapped")
        assert mapped(data) == 1
        slot.buffer[:] = bytes(LENGTH)
        session.abort([slot])
        del slot
        wait_until(lambda: mapped(data) == 0, "the buffer was the last of it")


def test_a_warm_start_in_the_same_file_is_mapped_anew(mortal: NodeProcess) -> None:
    with Client(**mortal.client_options) as client:
        assert client.put("k", b"v" * LENGTH)
        data, _ = mortal.segment_files()
        mortal.kill()
        wait_until(lambda: mapped(data) == 0, "nothing of it is mapped")
        mortal.start()
        wait_until(lambda: client.get("k") == b"v" * LENGTH, "its blocks are there again")
        assert mortal.segment_files()[0] == data


def test_a_client_dropped_without_a_close_is_not_kept_by_its_reaper(mortal: NodeProcess) -> None:
    client = Client(**mortal.client_options)
    assert client.put("k", b"v" * LENGTH)
    data, _ = mortal.segment_files()
    assert mapped(data)
    del client
    gc.collect()
    wait_until(lambda: mapped(data) == 0, "it went with its client")
