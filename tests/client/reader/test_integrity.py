"""Flipped bytes, forged records, salted keys: all of them misses, counted by reason."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import flip
from redis_servers import RedisServer, wait_until
from stores import NodeProcess, node_stats

from kvstore import Client, MissReason, Namespace, UsageError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index
from kvstore.protocol.control import Op
from kvstore.record import RecordSigner

SECRET = "thirty-two random characters.."
SIZES = (100, 40_000, 1_000_000)
"""In the request itself, and into a slot."""


@pytest.fixture
def careful(node: NodeProcess) -> Iterator[Client]:
    with Client(**node.client_options, verify="always") as client:
        yield client


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_flipped_bit_is_a_miss_and_the_node_drops_the_block(
    node: NodeProcess, careful: Client, size_bytes: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    value = rng.randbytes(size_bytes)
    assert careful.put("k", value)
    assert careful.get("k") == value
    flip(careful, careful.namespace.value_key("k"), rng)
    assert careful.get("k") is None
    assert careful.stats()["missed"]["corrupt"] >= 1
    wait_until(lambda: node_stats(careful)["corrupt"] == 1, "the node dropped it")
    assert not careful.exists("k")
    missing = careful.explain_key("k").first_missing
    assert missing is not None
    assert missing.reason is MissReason.CORRUPT
    # Nobody is served it any more, whether they check or not, and it can be stored anew.
    with Client(**node.client_options) as careless:
        assert careless.get("k") is None
    assert careful.put("k", value)
    assert careful.get("k") == value


def test_a_bit_flipped_in_the_file_of_a_node_that_was_down_is_a_miss_too(
    node: NodeProcess, careful: Client
) -> None:
    values = {f"k{size}": random.Random(size).randbytes(size) for size in SIZES}
    assert all(careful.put_many(values))
    data, _ = node.segment_files()
    node.kill()
    with data.open("r+b") as file:  # never truncated: the client maps it
        at = file.read().index(values["k40000"]) + 5
        file.seek(at)
        file.write(bytes([values["k40000"][5] ^ 1]))
    node.start()
    wait_until(lambda: careful.get("k100") is not None, "its blocks are there again")
    assert careful.get_many(list(values)) == [values["k100"], None, values["k1000000"]]
    assert careful.stats()["missed"]["corrupt"] >= 1
    wait_until(lambda: node_stats(careful)["corrupt"] == 1, "the node dropped it")


def test_every_way_of_reading_sees_it(node: NodeProcess, careful: Client) -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(5)
    array = numpy.arange(50_000, dtype="<f4").reshape(100, 500)
    out = bytearray(array.nbytes)

    def damaged() -> str:
        key = f"k{rng.random()}"
        assert careful.put(key, array)
        flip(careful, careful.namespace.value_key(key), rng)
        return key

    assert careful.get(damaged()) is None
    assert careful.get(damaged(), out=out) is None
    assert careful.get_many([damaged()]) == [None]
    assert not careful.pin(damaged())
    raw_key = careful.namespace.value_key(damaged())
    (found,) = careful.session.lookup([raw_key])
    assert found is not None
    assert careful.session.view(found) is None
    wait_until(lambda: node_stats(careful)["corrupt"] == 5, "the node dropped them all")


def test_a_client_that_lies_about_damage_drops_nothing(node: NodeProcess, careful: Client) -> None:
    value = bytes(50_000)
    assert careful.put("k", value)
    control = careful.session.writer.link().control
    control.say(Op.SUSPECT, careful.namespace.value_key("k"))
    assert node_stats(careful)["corrupt"] == 0
    assert careful.get("k") == value


def test_a_block_without_a_checksum_is_a_miss_for_who_verifies_and_stays(
    node: NodeProcess, careful: Client, client: Client
) -> None:
    assert client.put("k", b"v" * 50_000)
    assert careful.get("k") is None
    assert "corrupt" not in careful.stats()["missed"]
    assert client.get("k") == b"v" * 50_000


# --- signed records ---------------------------------------------------------


@pytest.fixture
def signing_node(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[NodeProcess]:
    """A node that has its key from a file."""
    (tmp_path / "key").write_text(f"{SECRET}\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("KVSTORE_SIGNING_KEY_FILE", str(tmp_path / "key"))
    with NodeProcess(redis_server) as process:
        monkeypatch.delenv("KVSTORE_SIGNING_KEY_FILE")
        yield process


def test_records_signed_with_the_same_key_are_found(signing_node: NodeProcess) -> None:
    with (
        Client(**signing_node.client_options, signing_key=SECRET) as writer,
        Client(**signing_node.client_options, signing_key=SECRET) as reader,
    ):
        assert writer.put("k", b"v" * 1000)
        (record,) = writer.session.index.lookup([writer.namespace.value_key("k")])
        assert len(record) == 60
        assert reader.get("k") == b"v" * 1000
        assert reader.stats()["missed"] == {}
        with writer.pin("k") as pinned:
            assert bytes(pinned.buffer) == b"v" * 1000


def test_a_client_without_a_key_reads_signed_records(signing_node: NodeProcess) -> None:
    """So that nodes can be given the key first, and clients one by one."""
    with Client(**signing_node.client_options) as client:
        assert client.put("k", b"v")
    with Client(**signing_node.client_options) as reader:
        assert reader.get("k") == b"v"


@pytest.mark.parametrize("key", ["", "another secret of some length"])
def test_a_record_with_a_wrong_or_no_signature_is_a_miss(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("KVSTORE_SIGNING_KEY", key)
    with NodeProcess(redis_server) as node:
        monkeypatch.delenv("KVSTORE_SIGNING_KEY")
        with (
            Client(**node.client_options, block_tokens=4) as writer,
            Client(**node.client_options, signing_key=SECRET, block_tokens=4) as reader,
        ):
            assert writer.put("k", b"v" * 50_000)
            keys = reader.namespace.block_keys(range(8), 4)
            assert all(writer.put_blocks(list(range(8)), [b"b"] * 2))
            assert reader.get("k") is None
            assert reader.session.match(keys).short is MissReason.BAD_SIGNATURE
            assert reader.session.lookup(keys) == [None, None]
            assert reader.match_prefix(list(range(8))).blocks == 0
            missing = reader.explain_key("k").first_missing
            assert missing is not None
            assert missing.reason is MissReason.BAD_SIGNATURE
            assert reader.stats()["missed"] == {"bad-signature": 6}


def test_a_forged_record_leads_nowhere(signing_node: NodeProcess) -> None:
    """Somebody writes into Redis: a copied signature fits no other key, nor another tenant's."""
    index = open_index(
        signing_node.redis.url, key_prefix=signing_node.key_prefix, timeout_s=5, publish_timeout_s=5
    )
    with Client(**signing_node.client_options, signing_key=SECRET) as client:
        client.put_many([("a", b"A" * 1000), ("b", b"B" * 1000)])
    with Client(**signing_node.client_options, signing_key=SECRET) as client:
        a, b, c = (client.namespace.value_key(name) for name in "abc")
        wait_until(lambda: None not in index.lookup([a, b]), "their own records are there")
        (of_a,) = index.lookup([a])
        theirs = RecordSigner(SECRET.encode(), "kv:another").signed(b, of_a[:44])
        index.publish([KeyRecord(b, theirs), KeyRecord(c, of_a)])
        assert client.get("b") is None
        assert client.get("c") is None
        assert client.get("a") == b"A" * 1000
        assert client.stats()["missed"]["bad-signature"] == 2
    index.close()


# --- salted keys ------------------------------------------------------------


def test_tenants_with_other_salts_do_not_find_each_others_prompts(node: NodeProcess) -> None:
    options = {**node.client_options, "block_tokens": 4}
    tokens = list(range(16))
    with (
        Client(**options, salt=f"{SECRET} of a") as a,
        Client(**options, salt=f"{SECRET} of b") as b,
        Client(**options) as unsalted,
        Client(**options, salt=f"{SECRET} of a") as also_a,
    ):
        assert all(a.put_blocks(tokens, [b"x" * 100] * 4))
        assert also_a.match_prefix(tokens).blocks == 4
        assert b.match_prefix(tokens).blocks == unsalted.match_prefix(tokens).blocks == 0
        for other in (b, unsalted):
            missing = other.explain(tokens).first_missing
            assert missing is not None
            assert missing.reason is MissReason.SALT
            assert SECRET not in str(missing)


def test_the_salt_comes_from_the_environment_too(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(**node.client_options, salt=SECRET) as one:
        assert one.put("k", b"v")
    monkeypatch.setenv("KVSTORE_SALT", SECRET)
    with Client(**node.client_options) as other:
        assert other.get("k") == b"v"


def test_a_salt_for_a_ready_namespace_is_refused(node: NodeProcess) -> None:
    with pytest.raises(UsageError, match="salt="):
        Client(**node.client_options, namespace=Namespace({"model": "m"}), salt=SECRET)
