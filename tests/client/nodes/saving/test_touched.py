"""What a client remembers as used, by run, until its nodes are told."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from redis_servers import RedisServer, wait_until
from stores import PATIENT

from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving import host_writer
from kvstore.client.nodes.saving.touched import TOUCHED_MAX, TOUCHED_RUNS_MAX, Touched
from kvstore.nodedir import NodeDir
from kvstore.protocol.control import Op, join_keys, packed
from kvstore.spi import BlockSession
from kvstore.types import EXISTS

if TYPE_CHECKING:
    from pathlib import Path

    from stores import NodeProcess


def key(number: int) -> bytes:
    return number.to_bytes(4) * 8


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def told(touched: Touched) -> list[list[bytes]]:
    return [list(run) for run in touched.runs()]


def test_each_call_is_a_run_of_its_own() -> None:
    touched = Touched()
    assert told(touched) == []
    touched.add(keys(0, 3))
    touched.add([])
    touched.add([*keys(0, 2), key(9)])
    touched.add(keys(0, 3))
    touched.add([key(5), key(6), key(5)])
    assert told(touched) == [keys(0, 3), [key(0), key(1), key(9)], keys(5, 2)]


def test_runs_beyond_the_limit_are_one_and_keep_their_order() -> None:
    touched = Touched()
    for number in range(TOUCHED_RUNS_MAX + 3):
        touched.add(keys(2 * number, 3))
    runs = told(touched)
    assert len(runs) == TOUCHED_RUNS_MAX + 1
    assert runs[-1] == keys(2 * TOUCHED_RUNS_MAX, 7)


@pytest.mark.parametrize("each", [1, 30, 1000, TOUCHED_MAX + 5])
def test_keys_beyond_the_limit_are_forgotten(each: int) -> None:
    touched = Touched()
    for call in range(2 + TOUCHED_MAX // each):
        touched.add(keys(call * each, each))
    runs = told(touched)
    assert sum(map(len, runs)) == TOUCHED_MAX
    assert list(itertools.chain.from_iterable(runs)) == keys(0, TOUCHED_MAX)


def test_nodes_hear_of_each_run_in_a_message_of_its_own_and_all_are_sent_at_once(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_writer, "TOUCH_EVERY_S", 3600.0)
    with closing(BlockSession(**node.client_options)) as session:
        session.touch([])
        (writer,) = session.writer.writers()
        assert writer.linked is not None
        sent: list[bytes] = []
        channel: ControlChannel = writer.linked.control
        assert channel._socket is not None

        class Noted:
            def __init__(self, real: object) -> None:
                self._real = real

            def send(self, message: bytes) -> int:
                sent.append(message)
                return len(message)

            def __getattr__(self, name: str) -> object:
                return getattr(self._real, name)

        monkeypatch.setattr(channel, "_socket", Noted(channel._socket))
        session.touch(keys(0, 2))
        session.touch(keys(1, 3))
        session.touch(keys(4, 2), left=True)
        session.touch(keys(0, 2), saved=True)
        assert sent == []
        session.writer.touch(keys(7, 1), session.machine.monotonic(), at_once=True)
        runs = keys(0, 2), keys(1, 3), keys(7, 1)
        assert sent == [
            b"".join(packed([Op.TOUCH, 0, join_keys(run)]) for run in runs),
            packed([Op.SAVED, 0, join_keys(keys(0, 2))]),
            packed([Op.LEFT, 0, join_keys(keys(4, 2))]),
        ]


OLDER_NODE = """
import sys
from kvstore.protocol import control, control_events
del control_events._DECODERS[control.Op.SAVED], control_events._DECODERS[control.Op.LEFT]
from kvstore.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
"""`kvstore node` of before `Op.SAVED` and `Op.LEFT`."""


def test_a_node_that_does_not_know_of_saves_or_leaving_goes_on_with_the_connection(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    directory = NodeDir(tmp_path, "old")
    place = ("--run-dir", str(tmp_path), "--key-prefix", "kv:old")
    command = [sys.executable, "-c", OLDER_NODE, "node", "--name", "old", "--size", "4MiB"]
    process = subprocess.Popen([*command, "--url", redis_server.url, *place])
    try:
        wait_until(lambda: directory.why_not_ready() == "", "the node is ready")
        options = {"url": redis_server.url, "run_dir": tmp_path, "key_prefix": "kv:old"}
        with closing(BlockSession(**options, limits=PATIENT)) as session:
            session.touch([])
            (writer,) = session.writer.writers()
            link = writer.linked
            assert link is not None
            connection = link.control._socket
            (one,) = session.reserve([key(1)], 1000, 1)
            assert not isinstance(one, str)
            session.commit([one])  # type: ignore[list-item]  # it was granted
            for said in {"saved": True}, {"left": True}:
                session.writer.touch(keys(1, 1), session.machine.monotonic(), at_once=True, **said)
            assert session.were_read([key(1)]) == [None]
            assert session.reserve([key(1)], 1000, 1) == [EXISTS]
            assert link.control._socket is connection is not None
    finally:
        process.terminate()
        process.wait(20)
