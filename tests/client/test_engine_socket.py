"""The socket at which an engine answers questions about itself: whose it is, how long it waits."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from threads_at_once import at_once

from kvstore.client import engine_socket
from kvstore.client.engine_socket import EngineSocket, ask_engine, engine_pid, engine_sockets
from kvstore.errors import PeerError, UsageError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def path(home: Path) -> Iterator[Path]:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "wrong" in question:
            raise UsageError("wrong", question["wrong"], "must not be")
        if "bug" in question:
            raise ZeroDivisionError
        return {"asked": question}

    listening = EngineSocket(home, answer)
    (path,) = engine_sockets(home)
    yield path
    listening.close()
    listening.close()
    assert list(home.iterdir()) == []


def test_only_this_user_may_ask(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert engine_pid(path) == os.getpid()


def test_a_directory_that_others_may_enter_is_refused(home: Path) -> None:
    home.chmod(0o755)
    with pytest.raises(UsageError, match="0700"):
        EngineSocket(home, lambda _: {})


def test_a_question_is_answered_and_errors_name_what_is_wrong(path: Path) -> None:
    assert ask_engine(path, {"a": [1, 2]}) == {"asked": {"a": [1, 2]}}
    with pytest.raises(PeerError, match="wrong=7: must not be"):
        ask_engine(path, {"wrong": 7})
    with pytest.raises(PeerError, match="its log says why"):
        ask_engine(path, {"bug": 1})
    assert ask_engine(path, {}) == {"asked": {}}


def test_a_peer_that_says_nothing_keeps_others_waiting_no_longer_than_its_deadline(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "REQUEST_TIMEOUT_S", 1.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        silent.send(b"{")
        give_up_at = time.monotonic() + 20.0
        answered: dict[str, Any] = {}
        while not answered:
            assert time.monotonic() < give_up_at
            with suppress(PeerError):
                answered = ask_engine(path, {})
        assert answered == {"asked": {}}


def test_a_message_has_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_socket, "MESSAGE_BYTES_MAX", 100)
    with pytest.raises(PeerError):
        ask_engine(path, {"a": "x" * 5_000_000})
    assert ask_engine(path, {}) == {"asked": {}}


def test_the_socket_of_a_killed_engine_is_no_engine_and_the_next_start_removes_it(
    home: Path,
) -> None:
    left = home / "engine-1-aaaaaaaa.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    with pytest.raises(PeerError, match="did not answer"):
        ask_engine(left, {})
    EngineSocket(home, lambda _: {}).close()
    assert list(home.iterdir()) == []


def test_many_ask_at_once_and_each_gets_its_own_answer(path: Path) -> None:
    found: list[dict[str, Any]] = []
    at_once([lambda i=i: found.append(ask_engine(path, {"i": i})) for i in range(6)])
    assert sorted(one["asked"]["i"] for one in found) == list(range(6))
