"""Which announcements of nodes in the index are believed."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from each_input import each
from redis_servers import RedisServer, wait_until
from stores import PATIENT, NodeProcess, announcement

from kvstore import Client
from kvstore.index.announced import announced_node, announced_nodes
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.index import open_index
from kvstore.record import RecordSigner
from kvstore.spi import Locator
from kvstore.transport.stream.security import StreamSecurity

KEY, SECRET = "a signing key of this tenant", "a secret that both sides know"
SIGNER = RecordSigner(KEY.encode(), "kv:default")
WORD = announcement(node_id=7, transports={"stream": "tcp://there:7400"})
SIGNED = SIGNER.announcement(WORD.pack())
ELSEWHERE = dataclasses.replace(WORD, transports={"stream": "tcp://elsewhere:7400"})


def seen(raw: bytes, signer: RecordSigner | None, node_id: int = 7) -> object:
    index = MemoryIndex()
    index.announce(node_id, raw, 10.0)
    word = announced_node(index, node_id, signer)
    assert announced_nodes(index, signer) == ({} if word is None else {node_id: word})
    return word


def test_what_was_signed_is_believed_and_read_by_those_without_the_key_too() -> None:
    assert seen(SIGNED, SIGNER) == WORD
    assert seen(SIGNED, None) == WORD
    assert seen(WORD.pack(), None) == WORD
    assert json.loads(SIGNED)["signature"]


@each(
    "raw",
    [
        WORD.pack(),
        SIGNED.replace(b"there", b"her3e"),
        SIGNED[:-3] + bytes([SIGNED[-3] ^ 1]) + SIGNED[-2:],
        ELSEWHERE.pack()[:-1] + SIGNED[len(WORD.pack()) - 1 :],
        RecordSigner(b"a signing key of another", "kv:default").announcement(WORD.pack()),
        RecordSigner(KEY.encode(), "kv:other").announcement(WORD.pack()),
        b"",
        b"}",
        SIGNED[-52:],
    ],
    ids=range(9),
)
def test_with_a_signing_key_nothing_else_counts(raw: bytes) -> None:
    assert seen(raw, SIGNER) is None


@pytest.mark.parametrize("signer", [SIGNER, None])
def test_an_announcement_under_another_nodes_id_does_not_count(signer: RecordSigner | None) -> None:
    assert seen(SIGNED, signer, node_id=8) is None


def test_a_false_address_in_redis_is_not_gone_to(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"KVSTORE_SECRET": SECRET, "KVSTORE_SIGNING_KEY": KEY}
    run_dir = tmp_path / "elsewhere"
    run_dir.mkdir(mode=0o700)
    options = ("--listen", "127.0.0.1:0")
    with NodeProcess(redis_server, options=options, environment=environment) as node:
        with Client(**node.client_options, signing_key=KEY) as writer:
            assert writer.put("k", b"value")
        where = {**node.client_options, "run_dir": run_dir, "limits": PATIENT, "signing_key": KEY}
        with Client(**where, security=StreamSecurity(secret=SECRET.encode())) as reader:
            assert reader.get("k") == b"value"
            (word,) = announced_nodes(reader.session.index, None).values()
            node.signal(signal.SIGSTOP)  # it does not say otherwise
            forged = dataclasses.replace(word, transports={"stream": "tcp://127.0.0.1:9"})
            index = open_index(redis_server.url, key_prefix=node.key_prefix)
            index.announce(word.node_id, forged.pack(), 60.0)
            remote = reader.session.remote
            wait_until(lambda: not reader.exists("k"), "it is not believed")
            assert remote.directory.get(word.node_id).announcement is None
            index.close()


def test_a_locator_with_a_signing_key_believes_signed_records_and_nodes_only(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    environment = {"KVSTORE_SIGNING_KEY": KEY}
    tokens = list(range(32))
    with NodeProcess(redis_server, environment=environment) as node:
        with Client(**node.client_options, block_tokens=16, signing_key=KEY) as writer:
            assert all(writer.put_blocks(tokens, [b"kv"] * 2))
            keys = writer.namespace.block_keys(tokens, 16)
        for key, count in ((KEY, 2), ("a signing key of another tenant", 0)):
            with Locator(
                node.redis.url,
                key_prefix=node.key_prefix,
                run_dir=tmp_path,
                limits=PATIENT,
                signing_key=key,
            ) as locator:
                assert len(locator.leading(keys)) == count
