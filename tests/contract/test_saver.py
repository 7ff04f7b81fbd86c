"""The contract of savers: this host's node, nodes of other hosts, the pool in VRAM, the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stores import PATIENT, NodeThread

from contract.saver import SaverContract, Saving
from kvstore.spi import BlockSession, VramPool
from kvstore.testing.blockstore import MemoryBlockStore
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.stream.security import StreamSecurity

if TYPE_CHECKING:
    from redis_servers import RedisServer

SECURITY = StreamSecurity(secret=b"a secret that both sides know")
NAMESPACE = 7
POOL_BYTES = 2 << 20


class TestModel(SaverContract):
    @pytest.fixture
    def saving(self) -> Saving:
        store = MemoryBlockStore()

        def lose() -> None:
            store.node_down = True

        return Saving(lambda keys, size: store.reserve(keys, size, NAMESPACE), lambda: store, lose)


class TestLocal(SaverContract):
    @pytest.fixture
    def saving(self, redis_server: RedisServer) -> Iterator[Saving]:
        with (
            NodeThread(redis_server, size_bytes=16 << 20) as node,
            closing(BlockSession(**node.client_options)) as session,
        ):
            yield Saving(
                lambda keys, size: session.reserve(keys, size, NAMESPACE),
                session.writer.link,
                node.stop,
            )


class TestRemote(SaverContract):
    @pytest.fixture
    def saving(self, redis_server: RedisServer, tmp_path: Path) -> Iterator[Saving]:
        listens = {"listen": ("127.0.0.1", 0), "security": SECURITY}
        with NodeThread(redis_server, size_bytes=16 << 20, **listens) as node:
            # What is asked is what was saved, not how soon.
            limits = replace(PATIENT, stream_timeout_s=10.0)
            options = {**node.client_options, "run_dir": tmp_path, "security": SECURITY}
            options["limits"] = limits
            with closing(BlockSession(**options)) as session:
                yield Saving(
                    lambda keys, size: session.reserve(keys, size, NAMESPACE),
                    lambda: session.remote_writer,
                    node.stop,
                )


class TestVram(SaverContract):
    @pytest.fixture
    def saving(self, redis_server: RedisServer, tmp_path: Path) -> Iterator[Saving]:
        with NodeThread(redis_server, size_bytes=16 << 20) as node:
            device = ModelCuda(tmp_path)
            with closing(BlockSession(**node.client_options, device=device)) as session:
                pool = VramPool(session, device, POOL_BYTES)
                yield Saving(
                    lambda keys, size: pool.reserve(keys, size, NAMESPACE),
                    lambda: pool,
                    lambda: pool.stop(0.0),
                )
                pool.stop(0.0)
