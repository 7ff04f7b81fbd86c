"""Why a block is missing when something is dead, hangs, is damaged or was closed.

One test for each such reason, with real nodes and real Redis; the reasons of a store
in which all is well are in test_client_explain.py.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from explain_parts import BLOCK_TOKENS, TOKENS, fresh, save, why
from redis_servers import RedisServer, wait_until
from stores import PATIENT, NodeProcess

from kvstore import Client, Explanation, Limits, MissReason
from kvstore.index.redis.key_space import KeySpace
from kvstore.record import pack_record
from kvstore.types import Location


def test_a_killed_node(node):
    with fresh(node) as client:
        save(client)
        node.kill()
        wait_until(
            lambda: why_or_none(client.explain(TOKENS)) is MissReason.NODE_DEAD,
            "the dead node's segment to be dropped",
        )
        missing = why(client.explain(TOKENS))
        assert missing.block == 0
        assert "which had it" in missing.detail


def why_or_none(explanation: Explanation) -> MissReason | None:
    return explanation.first_missing.reason if explanation.first_missing else None


def test_a_node_that_was_killed_and_started_again_empty(node):
    with fresh(node) as client:
        save(client)
        node.kill()
        node.forget()
        node.start()
    with fresh(node) as client:
        missing = why(client.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.NODE_DEAD, "node")
        assert "was started anew since" in missing.detail


def test_a_node_of_another_run_directory_is_out_of_reach(node, redis_server):
    with NodeProcess(redis_server) as other, fresh(node) as saver:
        save(saver)
        with fresh(other, key_prefix=node.key_prefix) as client:
            missing = why(client.explain(TOKENS))
            assert (missing.reason, missing.node) == (MissReason.OUT_OF_REACH, "node")


def test_a_stopped_redis_is_a_deadline_and_then_an_open_breaker():
    with (
        RedisServer() as redis,
        NodeProcess(redis) as node,
        fresh(node, limits=Limits(redis_timeout_s=0.05)) as client,
    ):
        redis.signal(signal.SIGSTOP)
        try:
            assert client.get("x") is None
            assert client.stats()["missed"] == {"deadline": 1}
            assert why(client.explain(TOKENS)).reason is MissReason.BREAKER_OPEN
            counts = client.stats()
        finally:
            redis.signal(signal.SIGCONT)
        assert counts["missed"]["breaker-open"] >= 1
        assert counts["explained"] == {"breaker-open": 1}


def test_a_redis_that_is_gone_is_an_index_error():
    with RedisServer() as redis, NodeProcess(redis) as node, fresh(node) as client:
        redis.kill()
        assert why(client.explain(TOKENS)).reason is MissReason.INDEX_ERROR


def test_a_match_from_elsewhere_says_that_the_blocks_are_out_of_reach(node):
    with fresh(node) as client:
        save(client, blocks=2)
        keys = client.namespace.block_keys(TOKENS, BLOCK_TOKENS)
        node.redis.admin().flushall()
    with fresh(node) as client, fresh(node, run_dir=node.run_dir / "other") as elsewhere:
        wait_until(lambda: client.session.index.match(keys[:2]), "the refill")
        assert elsewhere.session.match(keys).short is MissReason.OUT_OF_REACH


def test_a_block_the_index_lost_is_told_as_such():
    """Redis forgets one key by itself (its own eviction): no node hears of that."""
    signing_key = "thirty-two random characters.."
    signed = {"environment": {"KVSTORE_SIGNING_KEY": signing_key}}
    with (
        RedisServer() as redis,
        NodeProcess(redis, **signed) as node,
        fresh(node, signing_key=signing_key) as saver,
    ):
        save(saver)
        key = saver.namespace.block_keys(TOKENS, BLOCK_TOKENS)[0]
        redis.admin().delete(KeySpace(node.key_prefix).redis_key(key))
        # It has no segment mapped, and maps none that no signed record names: it asks the index.
        with fresh(node, signing_key=signing_key) as client:
            missing = why(client.explain(TOKENS))
            assert (missing.reason, missing.node) == (MissReason.NOT_INDEXED, "node")


def test_a_record_that_leads_to_another_block_or_nowhere(node):
    with fresh(node) as client:
        save(client, blocks=1, tokens=range(1000, 1016))
        word = node.directory.announcement()
        assert word is not None
        key = client.namespace.block_keys(TOKENS, BLOCK_TOKENS)[0]
        record = pack_record(key, Location(word.node_id, word.epoch, 0, 0, 1, 0, 1000, 0))
        redis_key = KeySpace(node.key_prefix).redis_key(key)
        node.redis.admin().set(redis_key, record)
        assert why(client.explain(TOKENS)).reason is MissReason.LOAD_FAILED
        node.redis.admin().set(redis_key, record[:-1] + bytes([record[-1] ^ 1]))
        missing = why(client.explain(TOKENS))
        assert missing.reason is MissReason.INDEX_ERROR
        assert "damaged" in missing.detail


def test_a_node_that_hangs_delays_the_answer_by_one_deadline_and_is_named(node):
    limits = replace(PATIENT, request_timeout_s=0.3)
    with fresh(node, limits=limits) as client:
        client.put("k", b"1")
        node.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            missing = client.explain_key("other").first_missing
            assert time.monotonic() - started < 3.0
        finally:
            node.signal(signal.SIGCONT)
        assert missing is not None
        assert missing.reason is MissReason.ABSENT
        assert "node did not answer" in missing.detail


def test_without_a_node_nobody_can_say(redis_server, tmp_path):
    run_dir = tmp_path / "run"
    with Client(redis_server.url, run_dir=run_dir, key_prefix="kv:nobody") as client:
        missing = client.explain_key("k").first_missing
        assert missing is not None
        assert missing.reason is MissReason.ABSENT
        assert "there is no node to ask" in missing.detail
