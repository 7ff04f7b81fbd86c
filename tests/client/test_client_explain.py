"""Every reason that `explain` gives is produced here for real: real nodes, real Redis.

One test for each reason there is, in one file so that a missing one shows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, PATIENT, NodeProcess

from kvstore import Client, Explanation, Limits, Missing, MissReason, Namespace
from kvstore.client.explanation import ABSENT_FIELD, FieldDifference, ago, differences, listed
from kvstore.core.record import pack_record
from kvstore.index.open import open_guarded
from kvstore.index.redis_wire import KeySpace
from kvstore.node import Node, NodeConfig
from kvstore.nodedir import NodeDir
from kvstore.types import Location

TOKENS = range(64)
BLOCK_TOKENS = 16
FIELDS = {"model": "m", "dtype": "bfloat16", "layers": 4}


def fresh(node: NodeProcess, **options: object) -> Client:
    merged = {"namespace": Namespace(FIELDS), "block_tokens": BLOCK_TOKENS, **node.client_options}
    return Client(**{**merged, **options})


def save(client: Client, blocks: int = 4, tokens: range = TOKENS, size: int = 1000) -> None:
    assert all(client.put_blocks(tokens, [os.urandom(size) for _ in range(blocks)]))


def why(explanation: Explanation) -> Missing:
    assert explanation.first_missing is not None
    return explanation.first_missing


def spread(node: NodeProcess) -> None:
    """Wait until what was withdrawn is out of the index."""
    admin = node.redis.admin()

    def settled() -> bool:
        with fresh(node) as client:
            return client.stats()["node"]["removals_pending"] == 0

    wait_until(settled, "removals are through")
    admin.close()


# --- what is there, and what never was --------------------------------------


def test_what_is_all_there_needs_no_reason(node):
    with fresh(node) as client:
        save(client)
        explanation = client.explain(TOKENS)
        assert explanation == Explanation(possible_tokens=64, hit_tokens=64)
        assert str(explanation) == "64 of 64 tokens hit"
        assert client.stats()["explained"] == {}


def test_never_stored(node):
    with fresh(node) as client:
        save(client, blocks=2)
        explanation = client.explain(TOKENS)
        assert (explanation.possible_tokens, explanation.hit_tokens) == (64, 32)
        missing = why(explanation)
        assert (missing.block, missing.reason) == (2, MissReason.NEVER_STORED)
        assert "never stored at node since it started" in missing.detail
        assert str(explanation).startswith("32 of 64 tokens hit; block 2: never-stored: ")
        assert client.stats()["explained"] == {"never-stored": 1}


def test_tokens_that_fill_no_block(node):
    with fresh(node) as client:
        missing = why(client.explain(range(BLOCK_TOKENS - 1)))
        assert missing.reason is MissReason.TOO_SHORT
        assert "15 tokens do not fill one block of 16" in missing.detail


def test_a_plain_value_is_explained_by_its_key(node):
    with fresh(node) as client:
        client.put("k", b"1")
        assert client.explain_key("k") is None
        missing = client.explain_key("other")
        assert missing is not None
        assert missing.reason is MissReason.NEVER_STORED


# --- what left -----------------------------------------------------------------


def test_evicted_by_pressure_says_by_which_node_and_when(redis_server):
    with NodeProcess(redis_server, size=4 * MIB, arena=1 * MIB) as node, fresh(node) as client:
        save(client, blocks=1, size=200_000)
        for i in range(30):
            assert client.put(f"pressure{i}", os.urandom(200_000))
        spread(node)
        missing = why(client.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.EVICTED, "node")
        assert missing.age_s is not None
        assert 0 <= missing.age_s < 60
        assert f"node node evicted it to make room, {ago(missing.age_s)} ago" in missing.detail


def test_a_stale_record_of_an_evicted_block_is_explained_all_the_same(redis_server):
    with NodeProcess(redis_server, size=4 * MIB, arena=1 * MIB) as node, fresh(node) as client:
        save(client, blocks=1, size=200_000)
        key = client.namespace.block_keys(TOKENS, BLOCK_TOKENS)[0]
        (record,) = client.session.index.lookup([key])
        for i in range(30):
            assert client.put(f"pressure{i}", os.urandom(200_000))
        spread(node)
        admin = node.redis.admin()
        admin.set(KeySpace(node.key_prefix).redis_key(key), record)
        missing = why(client.explain(TOKENS))
        assert missing.reason is MissReason.EVICTED


def test_deleted(node):
    with fresh(node) as client:
        client.put("k", b"1")
        client.delete("k")
        missing = client.explain_key("k")
        assert missing is not None
        assert (missing.reason, missing.node) == (MissReason.DELETED, "node")


def test_cleared(node):
    with fresh(node) as client:
        save(client)
        client.session.clear(client.namespace.id)
        assert why(client.explain(TOKENS)).reason is MissReason.CLEARED


def test_a_block_that_is_being_written_and_one_that_was_given_back(node):
    with fresh(node) as client, fresh(node) as reader:
        key = client.namespace.block_keys(TOKENS, BLOCK_TOKENS)[0]
        reservations = client.session.reserve([key], 50_000, client.namespace.id)
        missing = why(reader.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.BEING_WRITTEN, "node")
        client.session.abort(reservations)  # type: ignore[arg-type]
        assert why(reader.explain(TOKENS)).reason is MissReason.NOT_COMMITTED


WRITER = """
import sys, time
from pathlib import Path
from kvstore import Client, Limits, Namespace
c = Client(sys.argv[1], key_prefix=sys.argv[2], run_dir=Path(sys.argv[3]), block_tokens=16,
           limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0))
key = c.namespace.block_keys(range(64), 16)[0]
c.session.reserve([key], 50_000, c.namespace.id)
print("reserved", flush=True)
time.sleep(60)
"""


def test_the_writer_died(node):
    arguments = [node.redis.url, node.key_prefix, str(node.run_dir)]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"reserved\n"
        writer.kill()
    with fresh(node, namespace="default") as client:
        wait_until(
            lambda: why(client.explain(TOKENS)).reason is MissReason.NOT_COMMITTED,
            "the writer's death to be noticed",
        )
        assert "its writer died" in why(client.explain(TOKENS)).detail


def test_refused_for_lack_of_space(redis_server):
    with NodeProcess(redis_server, size=1 * MIB, arena=1 * MIB) as node, fresh(node) as client:
        held = client.namespace.block_keys(range(1000, 2000), 100)
        client.session.reserve(held, 300_000, client.namespace.id)
        results = client.put_blocks(TOKENS, [os.urandom(300_000)])
        assert not results[0]
        missing = why(client.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.REFUSED, "node")


def test_only_the_last_so_many_departures_are_remembered_and_it_says_how_far_back(redis_server):
    """A node's own limit is 32768; the same code with a limit of 2 is quicker to fill."""
    with NodeProcess(redis_server) as place:
        limits = replace(PATIENT, gone_keys=2)
        prefix = f"{place.key_prefix}-2"
        opened = open_guarded(
            redis_server.url, key_prefix=prefix, run_dir=place.run_dir, limits=limits
        )
        config = NodeConfig(
            run_dir=place.run_dir, name="small", size_bytes=MIB, key_prefix=prefix, limits=limits
        )
        with Node(config, opened.index), fresh(place, key_prefix=prefix) as client:
            client.put_many(dict.fromkeys("abc", b"1"))
            for name in "abc":
                client.delete(name)
            reasons = [client.explain_key(name) for name in "abc"]
            assert [m and m.reason for m in reasons] == [
                MissReason.NEVER_STORED,
                MissReason.DELETED,
                MissReason.DELETED,
            ]
            assert "as far back as they remember" in str(reasons[0])
        opened.close()


# --- other fields ----------------------------------------------------------------


def test_the_same_tokens_under_one_other_field(node):
    other = Namespace({**FIELDS, "dtype": "float16"})
    with fresh(node) as client, fresh(node, namespace=other) as saver:
        save(saver)
        missing = why(client.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.DIFFERENT_FINGERPRINT, "node")
        assert missing.differing_fields == (FieldDifference("dtype", "bfloat16", "float16"),)
        assert "the same tokens are there under other fields" in missing.detail
        assert "dtype: 'bfloat16' asked, 'float16' there" in missing.detail


def test_the_namespace_with_fewest_differences_is_named(node):
    near = Namespace({**FIELDS, "dtype": "float16"})
    far = Namespace({**FIELDS, "dtype": "int8", "layers": 5, "quantisation": "q"})
    with (
        fresh(node) as client,
        fresh(node, namespace=far) as one,
        fresh(node, namespace=near) as two,
    ):
        save(one)
        save(two)
        assert [d.field for d in why(client.explain(TOKENS)).differing_fields] == ["dtype"]


def test_nothing_of_ours_is_there_and_the_nearest_differs(node):
    other = Namespace({**FIELDS, "layers": 5})
    with fresh(node) as client, fresh(node, namespace=other) as saver:
        save(saver, tokens=range(1000, 1064))
        missing = why(client.explain(TOKENS))
        assert missing.reason is MissReason.DIFFERENT_FINGERPRINT
        assert missing.differing_fields == (FieldDifference("layers", 4, 5),)
        assert "nothing is there with these fields" in missing.detail


def test_another_models_namespace_is_no_reason(node):
    other = Namespace({f"field{i}": i for i in range(9)})
    with fresh(node) as client, fresh(node, namespace=other) as saver:
        save(saver, tokens=range(1000, 1064))
        assert why(client.explain(TOKENS)).reason is MissReason.NEVER_STORED


def test_another_salt(node):
    salted = Namespace({**FIELDS, "salt": "tenant-a"})
    with fresh(node) as client, fresh(node, namespace=salted) as saver:
        save(saver)
        missing = why(client.explain(TOKENS))
        assert missing.reason is MissReason.SALT
        assert missing.differing_fields == (FieldDifference("salt", ABSENT_FIELD, "tenant-a"),)


def test_another_block_size(node):
    with fresh(node, block_tokens=32) as client, fresh(node) as saver:
        save(saver)
        missing = why(client.explain(TOKENS))
        assert missing.reason is MissReason.DIFFERENT_FINGERPRINT
        assert missing.differing_fields == (FieldDifference("block_tokens", 32, 16),)


def test_a_value_under_another_namespace_is_found_by_its_key(node):
    with fresh(node, namespace="mine") as client, fresh(node, namespace="yours") as saver:
        saver.put("k", b"1")
        missing = client.explain_key("k")
        assert missing is not None
        assert missing.differing_fields == (FieldDifference("name", "mine", "yours"),)


def test_a_namespace_too_large_to_tell_of_costs_only_its_explanation(node):
    huge = Namespace({**FIELDS, "note": "x" * 5000})
    with fresh(node) as client, fresh(node, namespace=huge) as saver:
        save(saver)
        assert saver.explain(TOKENS).hit_tokens == 64
        assert why(client.explain(TOKENS)).reason is MissReason.NEVER_STORED


# --- trouble -----------------------------------------------------------------------


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


def test_a_match_says_why_it_is_short(node):
    with fresh(node) as client:
        save(client, blocks=2)
        keys = client.namespace.block_keys(TOKENS, BLOCK_TOKENS)
        assert client.session.match(keys[:2]).short is None
        assert client.session.match(keys).short is MissReason.ABSENT
        assert client.session.match(keys, timeout_s=0.0).short is MissReason.DEADLINE
        node.redis.admin().flushall()
    with fresh(node) as client, fresh(node, run_dir=node.run_dir / "other") as elsewhere:
        wait_until(lambda: client.session.match(keys[:2]), "the refill")
        assert elsewhere.session.match(keys).short is MissReason.OUT_OF_REACH


def test_a_block_the_index_lost_is_told_as_such():
    """Redis forgets one key by itself (its own eviction): no node hears of that."""
    with RedisServer() as redis, NodeProcess(redis) as node, fresh(node) as saver:
        save(saver)
        key = saver.namespace.block_keys(TOKENS, BLOCK_TOKENS)[0]
        redis.admin().delete(KeySpace(node.key_prefix).redis_key(key))
        with fresh(node) as client:  # it has no segment mapped, so it asks the index
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
        node.redis.admin().set(redis_key, record[:-1] + b"?")
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
            missing = client.explain_key("other")
            assert time.monotonic() - started < 3.0
        finally:
            node.signal(signal.SIGCONT)
        assert missing is not None
        assert missing.reason is MissReason.ABSENT
        assert "node did not answer" in missing.detail


def test_without_a_node_nobody_can_say(redis_server, tmp_path):
    run_dir = tmp_path / "run"
    with Client(redis_server.url, run_dir=run_dir, key_prefix="kv:nobody") as client:
        missing = client.explain_key("k")
        assert missing is not None
        assert missing.reason is MissReason.ABSENT
        assert "there is no node to ask" in missing.detail


def test_a_load_that_failed_because_the_slot_was_reused_is_counted(redis_server):
    with NodeProcess(redis_server, size=1 * MIB, arena=1 * MIB) as node, fresh(node) as client:
        client.put("k", os.urandom(900_000))
        with fresh(node) as reader:
            assert reader.get("k") is not None  # from now on remembered
            client.put("other", os.urandom(900_000))
            assert reader.get("k") is None
            assert reader.stats()["missed"] == {"load-failed": 1}
            missing = reader.explain_key("k")
            assert missing is not None
            assert missing.reason is MissReason.EVICTED


def test_a_closed_client_says_so(node):
    client = fresh(node)
    client.close()
    missing = why(client.explain(TOKENS))
    assert missing.reason is MissReason.INDEX_ERROR
    assert "was closed" in missing.detail


def test_asking_leaves_nothing_at_the_node(node):
    with fresh(node) as client:
        client.put("k", b"1")
        client.explain(TOKENS)
    leases = NodeDir(node.run_dir, "node").leases
    wait_until(lambda: not list(leases.iterdir()), "the leases to be gone")


# --- words -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(0.04, "0.0 s"), (3.21, "3.2 s"), (119, "119.0 s"), (300, "5 min"), (9000, "2 h")],
)
def test_ages_are_told_in_the_unit_that_fits(age_s, text):
    assert ago(age_s) == text


def test_differences_are_listed_by_name_and_the_first_few_of_many():
    fields = differences({f"f{i:02}": i for i in range(20)}, {"f00": 0})
    assert len(fields) == 19
    assert listed(fields).endswith("and 11 more")
    assert differences({"a": 1}, {"a": 1}) == ()
    assert differences({"a": None}, {}) == (FieldDifference("a", None, ABSENT_FIELD),)


def test_an_explanation_as_plain_data():
    missing = Missing(
        block=2,
        reason=MissReason.DIFFERENT_FINGERPRINT,
        detail="d",
        differing_fields=(FieldDifference("dtype", "a", "b"),),
    )
    explanation = Explanation(
        possible_tokens=64, hit_tokens=32, first_missing=missing, local_tokens=16, request_id="r1"
    )
    assert str(explanation) == (
        "request r1: 32 of 64 tokens hit, 16 more were in the engine; "
        "block 2: different-fingerprint: d"
    )
    assert explanation.as_dict()["first_missing"] == {
        "block": 2,
        "reason": "different-fingerprint",
        "detail": "d",
        "node": "",
        "age_s": None,
        "differing_fields": {"dtype": {"asked": "a", "there": "b"}},
    }
