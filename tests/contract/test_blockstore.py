"""The block store contract against the model and against the real session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stores import PATIENT

from contract.blockstore import SIZE, BlockStoreContract, keys, save
from kvstore import Limits
from kvstore.index.open import open_guarded
from kvstore.node.daemon import Node, NodeConfig
from kvstore.spi import BlockSession, BlockStore
from kvstore.testing.blockstore import MemoryBlockStore


class TestModel(BlockStoreContract):
    @pytest.fixture
    def store(self) -> BlockStore:
        return MemoryBlockStore()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    run_dir = tmp_path_factory.mktemp("run")
    opened = open_guarded(None, key_prefix="kv:t", run_dir=run_dir, limits=Limits())
    config = NodeConfig(run_dir=run_dir, size_bytes=64 << 20, key_prefix="kv:t")
    with Node(config, opened.index):
        session = BlockSession(opened.url, key_prefix="kv:t", run_dir=run_dir, limits=PATIENT)
        yield session
        session.close()
    opened.close()


class TestSession(BlockStoreContract):
    @pytest.fixture
    def store(self, session: BlockStore) -> BlockStore:
        return session

    def test_what_is_given_out_in_place_is_counted_as_read_by_shm(
        self, session: BlockSession
    ) -> None:
        (key,) = keys(1)
        save(session, key, 1)
        before = session.read_bytes()
        assert session.view(session.match([key])[0]) is not None
        after = session.read_bytes()
        assert after["shm"] - before["shm"] == SIZE
        assert after["stream"] == before["stream"]

    def test_mappings_are_there_before_the_first_save_and_as_long_as_they_are_held(
        self, session: BlockSession
    ) -> None:
        other = BlockSession(session.url, key_prefix="kv:t", run_dir=session.run_dir)
        mappings = other.mappings()
        assert {mapping.writable for mapping in mappings} == {True, False}
        other.close()
        for mapping in mappings:
            assert len(bytes(mapping.memory[-8:])) == 8
        assert BlockSession(run_dir=session.run_dir / "none").mappings() == []
