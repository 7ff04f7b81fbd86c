"""`kvstore-router` as a user has it: from anywhere, with and without what it needs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.router import __main__ as command
from kvstore.testing.ports import held_ports

SCRIPT = Path(sys.executable).with_name("kvstore-router")
TIMEOUT_S = 60.0


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a Unix socket has to fit below it."""
    with tempfile.TemporaryDirectory(prefix="kvr-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def answer(url: str, process: subprocess.Popen[bytes]) -> object:
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as said:
                return json.load(said)
        except OSError:
            assert process.poll() is None, "the router ended"
            assert time.monotonic() < give_up_at, "the router does not answer"
            time.sleep(0.1)


@pytest.mark.parametrize("words", [[str(SCRIPT)], [sys.executable, "-m", "connector.router"]])
def test_it_runs_outside_the_clone(words: list[str], tmp_path: Path, run_dir: Path) -> None:
    pytest.importorskip("aiohttp")
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with held_ports(1) as (port,):
        process = subprocess.Popen(
            [*words, "--port", str(port), "--decode", "http://127.0.0.1:1@node-a"],
            cwd=tmp_path,
            env={**kept, "KVSTORE_RUN_DIR": str(run_dir)},
        )
        try:
            assert "http://127.0.0.1:1" in str(answer(f"http://127.0.0.1:{port}/engines", process))
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def test_who_speaks_no_http_fills_no_log(tmp_path: Path, run_dir: Path) -> None:
    """aiohttp logs a traceback for each, and anybody who can connect may send thousands."""
    pytest.importorskip("aiohttp")
    with held_ports(1) as (port,):
        command = [sys.executable, "-m", "connector.router", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--decode", "http://127.0.0.1:1@node-a"],
            cwd=tmp_path,
            env={**os.environ, "KVSTORE_RUN_DIR": str(run_dir)},
            stderr=subprocess.PIPE,
        )
        try:
            answer(f"http://127.0.0.1:{port}/engines", process)
            for said in (
                b"\xff\0\r\n\r\n",
                b"GET /\xff HTT/1.1\r\n\r\n",
                b"GET http://[ HTTP/1.1\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as stranger:
                    stranger.sendall(said)
                    assert stranger.recv(1 << 16).startswith(b"HTTP/1.0 400")
            answer(f"http://127.0.0.1:{port}/engines", process)
        finally:
            process.terminate()
            _, log = process.communicate(timeout=TIMEOUT_S)
    assert b"Traceback" not in log
    assert b"Error handling request" not in log


STOP_S = 15.0
"""Below the 30 s that a body may take to come, and above the second that is given here."""


HALVES = {
    "nothing": b"",
    "half a head": b"POST /blocks HTTP/1.1\r\nHost: x\r\nContent-Le",
    "half a body": b"POST /blocks HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n{",
    "half a chunked body": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{"
    ),
    "an engine that hangs": (
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt": []}'
    ),
}


def open_still(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_it_ends_soon_whatever_has_not_come_yet(tmp_path: Path, run_dir: Path) -> None:
    pytest.importorskip("aiohttp")
    soon = "from connector.router import run; run.ROUTER_STOP_S = 1.0; raise SystemExit(run.main())"
    with held_ports(1) as (port,), socket.create_server(("127.0.0.1", 0)) as engine:
        hangs = f"http://127.0.0.1:{engine.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", soon, "--port", str(port), "--decode", hangs],
            cwd=tmp_path,
            env={**os.environ, "KVSTORE_RUN_DIR": str(run_dir)},
        )
        engine.settimeout(TIMEOUT_S)
        clients: list[tuple[str, socket.socket]] = []
        try:
            answer(f"http://127.0.0.1:{port}/engines", process)
            for what, half in 3 * [*HALVES.items()]:
                clients.append((what, socket.create_connection(("127.0.0.1", port), TIMEOUT_S)))
                clients[-1][1].sendall(half)
            assert engine.accept(), "the last request has come to its engine, and hangs there"
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            assert process.returncode == 0, {what for what, one in clients if open_still(one)}
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
            for _, client in clients:
                client.close()


def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main() == 1
    assert capsys.readouterr().err == "kvstore-router: needs aiohttp: pip install aiohttp\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--timeout-s", "nan"),
        ("--timeout-s", "0"),
        ("--save-wait-s", "-1"),
        ("--save-wait-s", "inf"),
    ],
)
def test_times_that_are_none_are_named(
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("aiohttp")
    words = ["kvstore-router", "--decode", "http://127.0.0.1:1", f"{option}={value}"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("connector.router.run.serve", lambda *_, **__: pytest.fail("it serves"))
    assert command.main() == 1
    said = capsys.readouterr().err
    assert option.strip("-").replace("-", "_") in said
    assert "must be a number" in said


def test_its_help_needs_nothing_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setattr(sys, "argv", ["kvstore-router", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    assert "--decode ENGINE" in capsys.readouterr().out
