"""Every reason that `explain` gives is produced here for real: real nodes, real Redis.

One test for each reason of a store in which all is well, in one file so that a missing
one shows; those of trouble are in test_client_explain_trouble.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

from explain_parts import BLOCK_TOKENS, FIELDS, TOKENS, fresh, save, why
from redis_servers import wait_until
from stores import MIB, PATIENT, NodeProcess, node_stats

from kvstore import Explanation, MissReason, Namespace
from kvstore.client.explanation import ABSENT_FIELD, FieldDifference, ago
from kvstore.index.open import open_guarded
from kvstore.index.redis.key_space import KeySpace
from kvstore.node import Node, NodeConfig
from kvstore.nodedir import NodeDir


def spread(node: NodeProcess) -> None:
    """Wait until what was withdrawn is out of the index."""
    admin = node.redis.admin()

    def settled() -> bool:
        with fresh(node) as client:
            return node_stats(client)["removals_pending"] == 0

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
        assert client.explain_key("k").first_missing is None
        missing = client.explain_key("other").first_missing
        assert missing is not None
        assert missing.reason is MissReason.NEVER_STORED


# --- what left -----------------------------------------------------------------


def test_evicted_by_pressure_says_by_which_node_and_when(redis_server):
    with NodeProcess(redis_server, size=4 * MIB) as node, fresh(node) as client:
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
    with NodeProcess(redis_server, size=4 * MIB) as node, fresh(node) as client:
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


def test_a_load_that_failed_because_the_slot_was_reused_is_counted(redis_server):
    with NodeProcess(redis_server, size=1 * MIB) as node, fresh(node) as client:
        client.put("k", os.urandom(900_000))
        with fresh(node) as reader:
            assert reader.get("k") is not None  # from now on remembered
            client.put("other", os.urandom(900_000))
            assert reader.get("k") is None
            assert reader.stats()["missed"] == {"load-failed": 1}
            missing = reader.explain_key("k").first_missing
            assert missing is not None
            assert missing.reason is MissReason.EVICTED


def test_deleted(node):
    with fresh(node) as client:
        client.put("k", b"1")
        client.delete("k")
        missing = client.explain_key("k").first_missing
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
    with NodeProcess(redis_server, size=1 * MIB) as node, fresh(node) as client:
        held = client.namespace.block_keys(range(1000, 2000), 100)
        # Kept until the end: what nobody has any more is given back.
        taken = client.session.reserve(held, 300_000, client.namespace.id)
        results = client.put_blocks(TOKENS, [os.urandom(300_000)])
        assert taken
        assert not results[0]
        missing = why(client.explain(TOKENS))
        assert (missing.reason, missing.node) == (MissReason.REFUSED, "node")


def test_only_the_last_so_many_departures_are_remembered_and_it_says_how_far_back(
    redis_server, monkeypatch
):
    """A node's own limit is 32768; the same code with a limit of 2 is quicker to fill."""
    with NodeProcess(redis_server) as place:
        monkeypatch.setattr("kvstore.core.blocks.GONE_KEYS_MAX", 2)
        prefix = f"{place.key_prefix}-2"
        opened = open_guarded(
            redis_server.url, key_prefix=prefix, run_dir=place.run_dir, limits=PATIENT
        )
        config = NodeConfig(
            run_dir=place.run_dir, name="small", size_bytes=MIB, key_prefix=prefix, limits=PATIENT
        )
        with Node(config, opened.index), fresh(place, key_prefix=prefix) as client:
            client.put_many(dict.fromkeys("abc", b"1"))
            for name in "abc":
                client.delete(name)
            reasons = [client.explain_key(name).first_missing for name in "abc"]
            assert [m and m.reason for m in reasons] == [
                MissReason.NEVER_STORED,
                MissReason.DELETED,
                MissReason.DELETED,
            ]
            assert "as far back as they remember" in str(reasons[0])
            assert str(reasons[0]).endswith("is not known any more")
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
        missing = client.explain_key("k").first_missing
        assert missing is not None
        assert missing.differing_fields == (FieldDifference("name", "mine", "yours"),)


def test_a_namespace_too_large_to_tell_of_costs_only_its_explanation(node):
    huge = Namespace({**FIELDS, "note": "x" * 5000})
    with fresh(node) as client, fresh(node, namespace=huge) as saver:
        save(saver)
        assert saver.explain(TOKENS).hit_tokens == 64
        assert why(client.explain(TOKENS)).reason is MissReason.NEVER_STORED


# --- asking ------------------------------------------------------------------------


def test_asking_leaves_nothing_at_the_node(node):
    with fresh(node) as client:
        client.put("k", b"1")
        client.explain(TOKENS)
    leases = NodeDir(node.run_dir, "node").leases
    wait_until(lambda: not list(leases.iterdir()), "the leases to be gone")
