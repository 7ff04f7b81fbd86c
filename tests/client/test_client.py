"""`Client` against a real node process and a real Redis."""

import asyncio
import os
import random

import pytest
from batch_readers import READERS, LeavesAll, Meddled, reader_of
from damage import flip
from own_python import holds_in_child
from redis_servers import wait_until
from stores import SIZE_BYTES, node_stats

from kvstore import AsyncClient, Client, Namespace, PutStatus, UsageError
from kvstore.client.reader import Place
from kvstore.segment import batch_read

MIB = 1 << 20


def fresh(node, **options):
    return Client(**{**node.client_options, **options})


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 32 << 10, (32 << 10) + 1, MIB, 4 * MIB])
def test_bytes_of_any_size_come_back_to_another_client(node, client, size):
    value = os.urandom(size)
    assert client.put("k", value).status is PutStatus.STORED
    with fresh(node) as other:
        assert other.get("k") == value
        assert other.get("k") == value  # from where it was seen before
    assert client.get(b"k") == value


def test_a_put_says_stored_and_then_exists(client):
    assert client.put("k", b"1").status is PutStatus.STORED
    assert client.put("k", b"1").status is PutStatus.EXISTS
    assert client.put("k", b"2").status is PutStatus.DIFFERS
    assert client.get("k") == b"1"


def test_a_miss_is_none(client):
    assert client.get("absent") is None
    assert client.get_many(["absent", "also"]) == [None, None]
    assert not client.pin("absent")
    assert not client.exists("absent")
    assert not client.delete("absent")
    assert client.match_prefix(range(1000)).tokens == 0


def test_put_many_and_get_many_keep_their_order(client):
    values = {f"k{i}": os.urandom(10 + i * 40_000) for i in range(12)}
    assert all(client.put_many(values))
    keys = [*values, "absent"]
    assert client.get_many(keys) == [*values.values(), None]
    assert client.get_many(list(reversed(keys))) == [None, *reversed(values.values())]


def test_put_many_takes_pairs_and_says_what_happened_to_each(client):
    client.put("old", b"1")
    results = client.put_many(
        [("old", b"2"), ("new", b"3"), ("new", b"4"), ("big", bytes(65 * MIB))]
    )
    assert [r.status for r in results] == [
        PutStatus.DIFFERS,
        PutStatus.STORED,
        PutStatus.DIFFERS,
        PutStatus.REJECTED,
    ]
    assert "size_bytes" in results[3].reason


def test_a_batch_larger_than_the_pool_is_stored_by_evicting(client):
    results = client.put_many((f"k{i}", bytes([i]) * MIB) for i in range(100))
    assert [r for r in results if not r] == []
    assert node_stats(client)["evicted"] > 30
    assert client.get("k99") == bytes([99]) * MIB


def test_a_value_larger_than_the_node_is_rejected_with_the_limit(client):
    result = client.put("k", bytes(SIZE_BYTES + 1))
    assert result.status is PutStatus.REJECTED
    assert str(SIZE_BYTES) in result.reason
    assert client.get("k") is None


def test_memoryviews_bytearrays_and_strided_buffers_are_values(client):
    client.put("a", bytearray(b"abc"))
    client.put("m", memoryview(b"0123456789")[::2])
    assert client.get("a") == b"abc"
    assert client.get("m") == b"02468"


@pytest.mark.parametrize("size", [100, 100_000])
def test_out_receives_the_bytes_and_may_be_larger(client, size):
    value = os.urandom(size)
    client.put("k", value)
    out = bytearray(size + 10)
    view = client.get("k", out=out)
    assert bytes(view) == value
    assert out[:size] == value
    assert out[size:] == bytes(10)
    outs = [bytearray(size), bytearray(size)]
    got = client.get_many(["k", "absent"], out=outs)
    assert got[1] is None
    assert outs[0] == value


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_out_too_small_is_refused_with_both_sizes_and_left_unchanged(client, size):
    client.put("k", bytes([7]) * size)
    out = bytearray(size - 1)
    with pytest.raises(UsageError, match=rf"out='{size - 1} bytes'.*{size}"):
        client.get("k", out=out)
    assert out == bytes(size - 1)


@pytest.mark.parametrize("out", [b"read only" * 20, "text", 5, [1, 2]])
def test_an_out_that_is_no_writable_buffer_is_refused(client, out):
    client.put("k", bytes(100))
    with pytest.raises(UsageError, match=r"^out="):
        client.get("k", out=out)


@pytest.mark.parametrize("key", [None, 5, "", b"", "x" * 5000, ["k"]])
def test_a_key_of_the_wrong_type_or_size_is_refused_by_every_call(client, key):
    for call in (
        lambda: client.put(key, b"x"),
        lambda: client.get(key),
        lambda: client.put_many([("good", b"1"), (key, b"x")]),
        lambda: client.get_many([key]),
        lambda: client.exists(key),
        lambda: client.delete(key),
        lambda: client.pin(key),
    ):
        with pytest.raises(UsageError, match=r"^key="):
            call()
    assert client.get("good") is None


@pytest.mark.parametrize("value", [None, 5, "text", [1], object()])
def test_a_value_without_bytes_is_refused(client, value):
    with pytest.raises(UsageError, match=r"^value="):
        client.put("k", value)


def test_namespaces_do_not_see_each_other(node):
    bf16 = Namespace({"model": "m", "shape": "8x128", "dtype": "bfloat16"})
    fp16 = Namespace({"model": "m", "shape": "8x128", "dtype": "float16"})
    with fresh(node, namespace=bf16) as one, fresh(node, namespace=fp16) as other:
        one.put("k", b"1")
        one.put_blocks(range(256), [b"block"])
        assert other.get("k") is None
        assert other.match_prefix(range(256)).blocks == 0
        assert other.put("k", b"2").status is PutStatus.STORED
        assert one.get("k") == b"1"


def test_blocks_are_found_by_the_tokens_they_were_computed_from(node, client):
    tokens = list(range(1000))
    blocks = [os.urandom(50_000) for _ in range(3)]
    assert all(client.put_blocks(tokens, blocks))
    with fresh(node) as other:
        match = other.match_prefix([*tokens, 5, 6])
        assert (match.tokens, match.blocks) == (768, 3)
        out = [bytearray(50_000) for _ in range(3)]
        assert other.get_blocks(tokens, out) == 3
        assert out == blocks
        assert other.get_blocks([*tokens[:300], 9999, *tokens[301:]], out) == 1


def test_more_blocks_than_the_tokens_fill_are_refused(client):
    with pytest.raises(UsageError, match=r"^blocks="):
        client.put_blocks(range(300), [b"1", b"2"])


def test_a_match_is_the_leading_run_even_when_later_blocks_are_there(client):
    tokens = list(range(1024))
    client.put_blocks(tokens, [b"0", b"1", b"2", b"3"])
    keys = client.namespace.block_keys(tokens, 256)
    client.session.writer.drop([keys[1]])
    assert client.match_prefix(tokens).blocks == 1


def test_a_value_that_was_pinned_can_be_got_afterwards(client):
    """The pin's view is released with it; the place that a get remembers is not."""
    client.put("k", b"v" * 1000)
    client.pin("k").close()
    assert client.get("k") == b"v" * 1000


def test_a_pin_is_a_read_only_view_that_survives_eviction_and_deletion(client):
    value = os.urandom(MIB)
    client.put("k", value)
    with client.pin("k") as pinned:
        assert pinned.buffer.readonly
        client.put_many((f"x{i}", bytes(MIB)) for i in range(100))
        assert client.delete("k")
        assert client.get("k") is None
        client.put_many((f"y{i}", bytes(MIB)) for i in range(100))
        assert pinned.buffer == value
    assert node_stats(client)["pinned"] == 0


def test_a_closed_pin_leaves_the_value_readable(client):
    """Found by the simulation: the reader remembers the place that the pin was in."""
    client.put("k", b"value")
    client.pin("k").close()
    assert client.get("k") == b"value"


def test_a_block_that_cannot_be_believed_is_not_left_pinned(node, client):
    """The node signs nothing, and this client reads only what is signed."""
    assert client.put("k", b"v" * 1000)
    with fresh(node, signing_key="a secret of some length") as wary:
        assert not wary.pin("k")
        assert node_stats(client)["pinned"] == 0


def test_a_pin_of_a_client_that_closes_ends(node, client):
    with fresh(node) as other:
        other.put("k", bytes(MIB))
        other.session.pin([other.namespace.value_key("k")])
        assert node_stats(client)["pinned"] == 1
    wait_until(lambda: node_stats(client)["pinned"] == 0, "the goodbye is heard")


def test_a_deleted_value_can_be_put_again(client):
    client.put("k", b"1")
    assert client.delete("k")
    assert client.get("k") is None
    assert client.put("k", b"2").status is PutStatus.STORED
    assert client.get("k") == b"2"


def test_a_place_seen_before_is_a_miss_once_its_slot_was_reused(node, client):
    with fresh(node) as reader:
        client.put("k", bytes([1]) * MIB)
        assert reader.get("k") == bytes([1]) * MIB
        client.put_many((f"x{i}", bytes([2]) * MIB) for i in range(120))
        assert reader.get("k") is None


def test_a_block_that_was_moved_is_a_hit_at_its_new_place(node, client):
    """Also for who remembers the old one, and before anything else is asked."""
    count = node_stats(client)["capacity_bytes"] // MIB
    kept = {f"k{i}": bytes([i % 251]) * MIB for i in range(count)}
    client.put_many(list(kept.items()))
    with fresh(node) as reader:
        assert reader.get_many(list(kept)) == list(kept.values())
        for i in range(0, count, 2):
            assert client.retain(f"k{i}", 60, f"tenant {i % 4}")
            del kept[f"k{i + 1}"]
        assert client.put("large", b"l" * 2 * MIB)
        assert node_stats(client)["moved"] == 1
        assert reader.get_many(list(kept)) == list(kept.values())
        assert all(reader.get(key) == value for key, value in kept.items())


@pytest.mark.parametrize("kind", ["bytes", "out", "array", "tensor", "array into out"])
def test_a_block_that_changes_while_it_is_copied_is_a_miss(node, client, monkeypatch, kind):
    """Rule 4, whatever the value is read as."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(1000, dtype="<i4")
    value = array if "array" in kind else array.tobytes()
    if kind == "tensor":
        value = pytest.importorskip("torch").from_numpy(array)
    out = bytearray(array.nbytes) if kind == "out" else None
    if kind == "array into out":
        out = numpy.zeros_like(array)
    with fresh(node) as reader:
        assert client.put("k", value)
        assert reader.get("k") is not None
        valid = Place.valid

        def reused(place):
            client.delete("k")
            return valid(place)

        monkeypatch.setattr(Place, "valid", reused)
        monkeypatch.setattr(batch_read, "READER", LeavesAll())
        assert reader.get("k", out=out) is None


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_block_that_changes_while_a_batch_is_copied_is_a_miss(
    node, client, monkeypatch, name, into
):
    with fresh(node) as reader:
        values = {f"k{i}": bytes([i]) * 1000 for i in range(3)}
        assert all(client.put_many(values))
        monkeypatch.setattr(batch_read, "READER", reader_of(name))
        outs = [bytearray(1000) for _ in values] if into else None
        assert list(map(bytes, reader.get_many(list(values), out=outs))) == list(values.values())
        monkeypatch.setattr(batch_read, "READER", Meddled(lambda: client.delete("k1")))
        got = reader.get_many(list(values), out=outs)
        assert got[1] is None
        assert [bytes(got[0]), bytes(got[2])] == [values["k0"], values["k2"]]
        assert reader.stats()["client"]["misses"] == 1
        assert reader.stats()["client"]["hits"] == 5


def test_reads_keep_a_block_from_being_evicted(node, client):
    """Readers tell the node what they used: a block read all the time outlives the rest."""
    client.put("hot", bytes(MIB))
    with fresh(node) as reader:
        for i in range(400):
            client.put(f"cold{i}", bytes(MIB))
            assert reader.get("hot") is not None, f"evicted after {i} puts"
            reader.session.writer._touch_at = 0.0  # do not wait for the next time


def test_stats_count_what_happened(client):
    client.put("k", bytes(1000))
    client.get("k")
    client.get("absent")
    stats = client.stats()
    assert stats["client"]["hits"] == 1
    assert stats["client"]["hit_bytes"] == 1000
    assert stats["client"]["misses"] == 1
    assert stats["client"]["stored"] == 1
    assert stats["node"]["blocks"] == 1


def test_asyncio_has_the_same_calls(node):
    async def talk():
        async with AsyncClient(**node.client_options) as client:
            assert await client.put("k", b"v")
            values = await asyncio.gather(*(client.get("k") for _ in range(20)))
            assert values == [b"v"] * 20
            assert all(await client.put_many({"a": b"1", "b": b"2"}))
            assert await client.get_many(["a", "b", "c"]) == [b"1", b"2", None]
            assert await client.exists("a")
            await client.put_blocks(range(256), [b"block"])
            assert (await client.match_prefix(range(256))).blocks == 1
            out = [bytearray(5)]
            assert await client.get_blocks(range(256), out) == 1
            with await client.pin("k") as pinned:
                assert pinned.buffer == b"v"
            assert await client.delete("k")
            assert (await client.stats())["node"]["blocks"] == 3

    asyncio.run(talk())


def test_every_public_call_of_the_client_is_there_for_asyncio():
    def names(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    assert names(Client) == names(AsyncClient)


def test_threads_share_one_client(client):
    from concurrent.futures import ThreadPoolExecutor

    def work(worker):
        for i in range(40):
            value = bytes([worker]) * (1000 + i * 3000)
            assert client.put(f"{worker}-{i}", value)
            assert client.get(f"{worker}-{i}") in (value, None)
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_a_client_carried_over_a_fork_refuses_to_speak_for_its_parent(client):
    client.put("k", b"1")

    def refused():
        with pytest.raises(UsageError, match="fork"):
            client.put("x", b"2")
        return True

    assert holds_in_child(refused)
    assert client.put("y", b"3")


def test_an_out_for_the_value_that_is_there_now_fits_whatever_was_there_before(client, node):
    with Client(**node.client_options) as other:
        client.put("k", b"1" * 100)
        assert other.get("k") == b"1" * 100
        client.delete("k")
        client.put("k", b"2" * 50)
        assert bytes(other.get("k", out=bytearray(50))) == b"2" * 50
        with pytest.raises(UsageError, match="out"):
            other.get("k", out=bytearray(49))


def test_what_put_many_stored_in_a_full_node_is_there(node, client):
    """Each small value took the place of the one before it, while large ones that nobody uses
    stayed."""
    large = {f"large/{i}": bytes(MIB) for i in range(2 * SIZE_BYTES // MIB)}
    for key, value in large.items():
        assert client.put(key, value)
    small = {f"small/{i}": i.to_bytes(4, "little") * 1024 for i in range(1024)}
    names = list(small)
    for begin in range(0, len(names), 32):
        some = names[begin : begin + 32]
        assert all(client.put_many({name: small[name] for name in some}))
    assert client.get_many(names) == list(small.values())


def counted(client):
    """What its node has heard of its clients, without what is 0."""
    names = ("asked_tokens", "hit_tokens", "missed_tokens:absent", "missed_tokens:corrupt")
    names += ("client_hits", "client_misses", "client_hit_bytes")
    node = client.stats()["node"]
    return {name: node[name] for name in names if node.get(name)}


def test_a_node_hears_what_its_clients_found_and_missed(node, client):
    """Once, and for tokens and values each."""
    with fresh(node, block_tokens=4) as reads:
        reads.put_blocks(range(8), [b"a" * 100, b"b" * 100])
        assert reads.get_blocks(range(12), [bytearray(100) for _ in range(3)]) == 2
        wait_until(lambda: counted(client), "it was told", 10)
        reads.put("k", b"value")
        assert [reads.get("k"), reads.get("none")] == [b"value", None]
        assert reads.get_many(["k", "none"]) == [b"value", None]
    wait_until(lambda: counted(client).get("client_misses") == 3, "the rest at its end", 10)
    assert counted(client) == {
        "asked_tokens": 12,
        "hit_tokens": 8,
        "missed_tokens:absent": 4,
        "client_hits": 4,
        "client_misses": 3,
        "client_hit_bytes": 210,
    }


def test_a_node_hears_why_blocks_that_are_there_were_missed(node, client):
    with fresh(node, block_tokens=4, verify="always") as reads:
        reads.put_blocks(range(8), [b"a" * 50_000, b"b" * 50_000])
        first, _ = reads.namespace.block_keys(range(8), 4)
        flip(reads, first, random.Random(1))
        assert reads.get_blocks(range(8), [bytearray(50_000) for _ in range(2)]) == 0
    wait_until(lambda: counted(client), "it was told", 10)
    one_each = {"client_hits": 1, "client_misses": 1, "client_hit_bytes": 50_000}
    assert counted(client) == {"asked_tokens": 8, "missed_tokens:corrupt": 8, **one_each}
