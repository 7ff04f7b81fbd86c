"""What a service manager is told, by a socket such as systemd's."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from kvstore.system import service_manager


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_it_is_told_once_that_the_start_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = str(tmp_path / "notify") if kind == "file" else f"@kvstore-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path if kind == "file" else "\0" + path[1:])
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        service_manager.say_ready()
        assert manager.recv(100) == b"READY=1"
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


@pytest.mark.parametrize("name", [None, "", "vsock:2:1234"])
def test_where_nobody_can_be_told_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if name is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", name)
    service_manager.say_ready()
    assert not caplog.text


def test_a_service_manager_that_is_gone_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING):
        service_manager.say_ready()
    assert "cannot be told that the start is over" in caplog.text
