"""Locator: who holds a prompt's leading blocks, by the index alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis_servers import RedisServer, wait_until
from stores import PATIENT, NodeProcess, announcement

from kvstore import Client, Limits, MissReason, UsageError
from kvstore.client import locator as locator_module
from kvstore.client.nodes import directory as node_directory
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.index import open_index
from kvstore.record import RecordSigner, pack_record
from kvstore.spi import Holder, HolderRun, HolderRuns, Holders, Locator
from kvstore.types import Location

BLOCK_TOKENS = 16
TOKENS = list(range(4 * BLOCK_TOKENS))


@pytest.fixture
def writer(node: NodeProcess) -> Client:
    with Client(**node.client_options, block_tokens=BLOCK_TOKENS) as client:  # type: ignore[arg-type]
        yield client


def locator(node: NodeProcess, run_dir: Path) -> Locator:
    """As on another host: another run directory, no node of its own."""
    return Locator(node.redis.url, key_prefix=node.key_prefix, run_dir=run_dir, limits=PATIENT)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def keys(client: Client) -> list[bytes]:
    return client.namespace.block_keys(TOKENS, BLOCK_TOKENS)


def test_leading_blocks_have_the_node_that_holds_them(
    node: NodeProcess, writer: Client, elsewhere: Path
) -> None:
    assert all(writer.put_blocks(TOKENS, [b"kv"] * 3))
    word = node.directory.announcement()
    assert word is not None
    with locator(node, elsewhere) as found:
        for asked in (keys(writer), b"".join(keys(writer))):
            run = found.leading(asked)
            assert run == [Holder("node", word.host)] * 3
            assert run.short is MissReason.ABSENT
        with pytest.raises(UsageError, match="must have 32 bytes each"):
            found.leading(b"k" * 33)


def test_holders_are_told_by_runs_too() -> None:
    one, other = Holder("one", "h"), Holder("other", "h")
    holders = Holders(MissReason.ABSENT)
    assert (HolderRuns.of(holders), HolderRuns.of(holders).blocks) == ([], 0)
    holders += [one, one, other, one]
    runs = HolderRuns.of(holders)
    assert runs == [HolderRun(one, 2), HolderRun(other, 1), HolderRun(one, 1)]
    assert (runs.blocks, runs.short) == (4, MissReason.ABSENT)


def test_a_whole_prompt_is_not_short(node: NodeProcess, writer: Client, elsewhere: Path) -> None:
    writer.put_blocks(TOKENS, [b"kv"] * 4)
    with locator(node, elsewhere) as found:
        assert found.leading(keys(writer)).short is None
        assert found.leading([]) == []


def test_more_keys_than_one_batch_are_one_run(
    node: NodeProcess, writer: Client, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locator_module, "BATCH_KEYS_MAX", 2)
    writer.put_blocks(TOKENS, [b"kv"] * 3)
    with locator(node, elsewhere) as found:
        assert len(found.leading(keys(writer))) == 3


def test_blocks_of_a_dead_node_have_no_holder(
    node: NodeProcess, writer: Client, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_directory, "NODE_BELIEVED_S", 0.0)
    writer.put_blocks(TOKENS, [b"kv"] * 4)
    with locator(node, elsewhere) as found:
        word = node.directory.announcement()
        assert word is not None
        node.kill()
        # Its records stay; its announcement would vanish in its own time.
        with closing(open_index(node.redis.url, key_prefix=node.key_prefix)) as index:
            index.withdraw(word.node_id)
        wait_until(lambda: not found.leading(keys(writer)), "the old records have no holder")
        assert found.leading(keys(writer)).short is MissReason.NODE_DEAD


def test_an_index_that_is_away_is_an_empty_run_in_time(elsewhere: Path) -> None:
    with RedisServer() as redis, Locator(redis.url, run_dir=elsewhere) as found:
        redis.kill()
        started = time.monotonic()
        run = found.leading([b"k" * 32])
        assert run == []
        assert run.short in (MissReason.INDEX_ERROR, MissReason.DEADLINE, MissReason.BREAKER_OPEN)
        assert time.monotonic() - started < 10


def asks(locator: Locator, index: MemoryIndex) -> None:
    """Have it ask that index."""
    locator._index = locator._nodes._index = index  # type: ignore[assignment]


def located(
    tmp_path: Path, present: dict[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, MissReason | None]:
    """How many of `count` keys have a holder, and why not more, with records of the keys
    `present`: the epoch in each. The node there is has epoch 2; keys are asked for by twos."""
    monkeypatch.setattr(locator_module, "BATCH_KEYS_MAX", 2)
    names = [bytes([i]) * 32 for i in range(count)]
    index = MemoryIndex()
    index.announce(7, announcement(node_id=7, epoch=2).pack(), 60.0)
    index.publish(
        [
            (names[i], pack_record(names[i], Location(7, epoch, 0, i, 1, 0, 10, 0)))
            for i, epoch in present.items()
        ]
    )
    with Locator("redis://127.0.0.1:1", run_dir=tmp_path) as locator:
        asks(locator, index)
        holders = locator.leading(names)
    return len(holders), holders.short


@pytest.mark.parametrize("hole", range(5))
def test_a_run_ends_at_its_first_hole_wherever_that_is(
    tmp_path: Path, hole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = {i: 2 for i in range(5) if i != hole}
    assert located(tmp_path, present, 5, monkeypatch) == (hole, MissReason.ABSENT)


@pytest.mark.parametrize("epoch", [1, 3])
def test_another_start_of_a_node_holds_nothing(
    tmp_path: Path, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = {0: 2, 1: 2, 2: epoch, 3: 2}
    assert located(tmp_path, present, 4, monkeypatch) == (2, MissReason.NODE_DEAD)


def test_with_a_signing_key_an_unsigned_record_has_no_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its node is one of ours."""
    secret = "a signing key of this tenant"
    signer = RecordSigner(secret.encode(), "kv:default")
    names = [bytes([i]) * 32 for i in range(3)]
    records = [pack_record(name, Location(7, 2, 0, 0, 1, 0, 10, 0)) for name in names]
    index = MemoryIndex()
    index.announce(7, signer.announcement(announcement(node_id=7, epoch=2).pack()), 60.0)
    signed = [signer.signed(*pair) for pair in zip(names, records, strict=True)]
    index.publish(list(zip(names, [signed[0], records[1], signed[2]], strict=True)))
    with Locator("redis://127.0.0.1:1", run_dir=tmp_path, signing_key=secret) as locator:
        asks(locator, index)
        assert len(locator.leading(names)) == 1


def test_a_damaged_record_has_no_holder(tmp_path: Path) -> None:
    name = b"k" * 32
    record = pack_record(name, Location(7, 2, 0, 0, 1, 0, 10, 0))
    index = MemoryIndex()
    index.announce(7, announcement(node_id=7, epoch=2).pack(), 60.0)
    index.publish([(name, record[:-1] + bytes([record[-1] ^ 1]))])
    with Locator("redis://127.0.0.1:1", run_dir=tmp_path) as locator:
        asks(locator, index)
        run = locator.leading([name])
    assert (run, run.short) == ([], MissReason.NODE_DEAD)


@pytest.mark.parametrize("end", [Locator.close, Locator.__exit__])
def test_the_limits_given_are_those_of_its_index_which_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Locator], None]
) -> None:
    opened: list[Limits] = []
    closed: list[None] = []

    def open_index(url: str, *, limits: Limits, **_: object) -> object:
        opened.append(limits)
        return SimpleNamespace(index=MemoryIndex(), close=lambda: closed.append(None))

    monkeypatch.setattr(locator_module, "open_guarded", open_index)
    limits = Limits(redis_timeout_s=3.0)
    found = Locator("redis://127.0.0.1:1", run_dir=tmp_path, limits=limits)
    assert opened == [limits]
    assert closed == []
    end(found)
    assert closed == [None]
