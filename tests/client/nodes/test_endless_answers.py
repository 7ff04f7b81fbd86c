"""A peer at the control socket that sends without end, and never what was asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgpack
import pytest

from kvstore.client.nodes.control import FIRST_ANSWER_TIMEOUT_S, ControlChannel
from kvstore.errors import DeadlineError
from kvstore.machine import Machine
from kvstore.nodedir import NodeDir
from kvstore.protocol.control import Op

if TYPE_CHECKING:
    from pathlib import Path

ANOTHERS = msgpack.packb([999_999, True, None])
EACH_S = 0.01
READ_MAX = 1000
TIMEOUT_S = 0.2


class EndlessPeer(Machine):
    """A machine whose clock goes on with each read, and where each read has something."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.read = 0

    def monotonic(self) -> float:
        return self.now

    def unix_socket(self) -> EndlessPeer:  # type: ignore[override]
        return self

    def peer_uid(self, connection: object) -> int:
        return os.geteuid()

    def recv(self, size_bytes: int) -> bytes:
        self.now += EACH_S
        self.read += 1
        assert self.read < READ_MAX, "it reads without end"
        return ANOTHERS

    def settimeout(self, timeout_s: float) -> None: ...

    def connect(self, path: str) -> None: ...

    def sendall(self, message: bytes) -> None: ...

    def close(self) -> None: ...


def test_answers_to_nobody_do_not_stretch_the_deadline(tmp_path: Path) -> None:
    peer = EndlessPeer()
    directory = NodeDir(tmp_path, "n")
    directory.leases.mkdir(parents=True)
    channel = ControlChannel(directory, (1, 1), TIMEOUT_S, lambda: ([], []), machine=peer)
    began = peer.now
    with pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    assert peer.now - began == pytest.approx(FIRST_ANSWER_TIMEOUT_S, abs=2 * EACH_S)
    channel.close()
