"""Which node of a host `kvstore run` uses, and how long it waits for another start. What becomes of
the node: test_run.py."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import announcement

from kvstore.cli import host_node
from kvstore.cli.host_node import HostNode
from kvstore.cli.store import LocalNode
from kvstore.index.redis.identity import identity_of
from kvstore.index.redis.url import parse_url
from kvstore.system.filelock import FileLock
from kvstore.transport.registry import CUDA_IPC

URL = "redis://127.0.0.1:1"


class NodeIsWantedError(Exception):
    """What `check` raises in place of a start."""


def start() -> None:
    raise NodeIsWantedError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def opened(run_dir: Path) -> None:
    with closing(HostNode(URL, "kv:t", run_dir, [], {}, lambda line: None)) as node:
        node.open(lambda: False, start)


@pytest.mark.parametrize(
    ("transports", "is_ours"),
    [
        pytest.param({CUDA_IPC: "an engine's"}, True, id="of VRAM alone"),
        pytest.param({}, False, id="of another user"),
    ],
)
def test_a_node_that_the_engine_cannot_save_to_is_not_taken_for_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, transports: dict[str, str], is_ours: bool
) -> None:
    word = announcement(index=identity_of(parse_url(URL)), transports=transports)
    directory: Any = SimpleNamespace(is_ours=lambda: is_ours)
    monkeypatch.setattr(host_node, "local_nodes", lambda *_: [LocalNode(word, directory)])
    with pytest.raises(NodeIsWantedError):
        opened(run_dir)


def test_another_start_that_hangs_is_waited_for_until_a_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_node, "OTHER_START_WAIT_S", 0.2)
    other = FileLock(run_dir, os.O_RDONLY)
    assert other.take()
    try:
        with pytest.raises(NodeIsWantedError):
            opened(run_dir)
    finally:
        other.release()
