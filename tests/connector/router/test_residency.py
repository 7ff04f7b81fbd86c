"""A router that listens to nodes' events finds prefixes without the index, and the same ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import PATIENT, NodeProcess

from connector.router import prefix
from connector.router.prefix import Prefixes
from kvstore import Client, Namespace
from kvstore.spi import Locator, Residency

SOON_S = 20.0
TOKENS = list(range(64))
BLOCK_TOKENS = 16
NAMESPACE = Namespace.named("default")


class _Keys:
    """What the router knows of a model: these are a client's own."""

    block_tokens = BLOCK_TOKENS

    def of(self, tokens: list[int]) -> list[bytes]:
        return NAMESPACE.block_keys(tokens, BLOCK_TOKENS)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def node(redis_server: RedisServer, place: str) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server, options=("--events", place)) as node:
        yield node


def known(prefixes: Prefixes) -> Prefixes:
    prefixes._models["m"] = prefix._Model(_Keys())  # type: ignore[arg-type]
    return prefixes


def test_a_prefix_is_found_while_the_index_is_away_and_by_it_while_a_node_is(
    node: NodeProcess, place: str, no_index: Locator, tmp_path: Path
) -> None:
    with Client(**node.client_options, block_tokens=BLOCK_TOKENS) as client:  # type: ignore[arg-type]
        blocks = NAMESPACE.block_keys(TOKENS, BLOCK_TOKENS)
        assert len(blocks) == 4
        assert all(client.put_blocks(TOKENS[:48], [b"b" * 9000] * 3))
    residency = Residency([place])
    wait_until(lambda: residency.in_sync and residency.blocks() == 3, "in sync", SOON_S)
    with_events = known(Prefixes(no_index, residency))
    found = asyncio.run(with_events.find("m", TOKENS))
    assert (found.blocks, found.held["node"], found.index_away) == (3, 3, False)

    async def where() -> list[tuple[str, int]]:
        """What nodes have said is looked up on the loop itself: these threads are gone."""
        with_events._threads.close()
        held = [*await with_events.where(blocks, None, ())]
        held += await with_events.where(b"".join(blocks), None, ())
        held += await with_events.where(None, _Keys(), TOKENS)  # type: ignore[arg-type]
        return [(run.holder.name, run.blocks) for run in held]

    async def found_by_index() -> prefix.Prefix:
        run_dir = tmp_path / "elsewhere"
        locator = Locator(
            node.redis.url, key_prefix=node.key_prefix, run_dir=run_dir, limits=PATIENT
        )
        silent = Residency([place, f"ipc://{tmp_path}/nobody"])
        wait_until(lambda: silent.blocks() == 3, "one of two is heard", SOON_S)
        with closing(known(Prefixes(locator, silent))) as prefixes:
            return await prefixes.find("m", TOKENS)

    by_index = asyncio.run(found_by_index())
    assert (by_index.blocks, by_index.held) == (found.blocks, found.held)
    assert asyncio.run(where()) == [("node", 3)] * 3
    with_events.close()


def test_the_command_refuses_what_is_no_place_for_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    from connector.router.run import main

    arguments = ["kvstore-router", "--decode", "http://127.0.0.1:1", "--events", "nowhere"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 1
    assert "events='nowhere'" in capsys.readouterr().err
