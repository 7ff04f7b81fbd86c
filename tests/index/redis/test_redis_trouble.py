"""Bad luck: what a RedisIndex does when Redis is not there, hangs, dies or holds odd things."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
from contract.index import every_call
from redis_servers import RedisCluster, RedisSentinel, RedisServer, free_port, stopped, wait_until

from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import RedisIndex, open_index
from kvstore.index.redis.key_space import KeySpace
from kvstore.limits import BATCH_KEYS_MAX, REDIS_ARGS_MAX

KEYS = [os.urandom(32) for _ in range(3)]
RECORDS = [KeyRecord(key, b"record") for key in KEYS]


SPACE = KeySpace("kv:default")
"""What is in Redis under the prefix that an index has by default."""


@pytest.fixture
def server():
    with RedisServer() as server:
        yield server


def all_fail(index: RedisIndex, within_s: float) -> None:
    for name, call in every_call(index, RECORDS).items():
        begun = time.monotonic()
        with pytest.raises(IndexUnavailableError):
            call()
        took_s = time.monotonic() - begun
        assert took_s < within_s, f"{name} took {took_s} s"


@pytest.mark.parametrize("form", ["redis://127.0.0.1:{}", "redis+cluster://127.0.0.1:{}"])
def test_no_server_at_that_port_fails_every_call_at_once(form: str) -> None:
    all_fail(open_index(form.format(free_port())), within_s=0.5)


def test_no_sentinel_there_fails_every_call_at_once() -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/main"
    all_fail(open_index(url), within_s=0.5)


def test_a_service_that_sentinel_does_not_know_is_said(redis_sentinel) -> None:
    index = open_index(redis_sentinel.url.replace("/main", "/other"), timeout_s=5)
    with pytest.raises(IndexUnavailableError, match="none of them knows"):
        index.ping()


def test_no_socket_there_fails_every_call_at_once(tmp_path) -> None:
    all_fail(open_index(f"unix://{tmp_path}/none.sock"), within_s=0.5)


def test_redis_that_starts_later_is_found(tmp_path) -> None:
    with RedisServer() as server:
        server.kill()
        index = open_index(server.url, timeout_s=5)
        with pytest.raises(IndexUnavailableError):
            index.ping()
        server.start()
        assert index.match(KEYS) == []
        index.close()


def test_a_hanging_redis_fails_every_call_within_its_time_out(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=0.05, publish_timeout_s=0.1)
    wait_until(lambda: answers(index), "one call gets through")
    with stopped(server):
        all_fail(index, within_s=0.6)
    wait_until(lambda: answers(index), "it answers again")
    index.close()


def answers(index: RedisIndex) -> bool:
    try:
        index.ping()
    except IndexUnavailableError:
        return False
    return True


def test_the_time_out_is_kept_to_the_millisecond(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=0.2)
    with stopped(server):
        begun = time.monotonic()
        with pytest.raises(IndexUnavailableError, match="did not answer within 200 ms"):
            index.match(KEYS)
        assert 0.19 < time.monotonic() - begun < 0.6
    index.close()


def test_a_late_answer_is_never_taken_for_that_of_a_later_call(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=0.1, publish_timeout_s=5, lookup_links_max=1)
    index.publish([KeyRecord(KEYS[0], b"zero"), KeyRecord(KEYS[1], b"one")])
    with stopped(server), pytest.raises(IndexUnavailableError):
        index.match(KEYS[:1])
    wait_until(lambda: answers(index), "it answers again")
    assert index.match(KEYS[1:2]) == [b"one"]
    index.close()


def test_a_killed_redis_fails_at_once_and_a_restarted_one_is_used_at_once(
    server: RedisServer,
) -> None:
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    index.publish(RECORDS)
    before = index.incarnation()
    assert len(index.match(KEYS)) == 3
    server.kill()
    all_fail(index, within_s=1.0)
    server.start()
    assert index.match(KEYS) == []
    index.publish(RECORDS)
    assert index.incarnation() != before
    index.close()


def test_a_kept_connection_that_the_server_closed_is_opened_again_unnoticed(
    server: RedisServer,
) -> None:
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    index.publish(RECORDS)
    for _ in range(3):
        assert len(index.match(KEYS)) == 3
        assert index.remove(RECORDS) == 3
        index.publish(RECORDS)
        server.admin().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    index.close()


def test_a_call_of_several_commands_survives_a_connection_that_was_closed(
    server: RedisServer,
) -> None:
    records = [KeyRecord(os.urandom(32), b"r") for _ in range(2 * REDIS_ARGS_MAX)]
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    index.publish(RECORDS)
    for _ in range(3):
        server.admin().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        index.publish(records)
        assert len(index.match([key for key, _ in records])) == len(records)
        server.admin().flushall()
    index.close()


def test_a_call_of_several_commands_to_a_hanging_redis_ends_within_its_time_out(
    server: RedisServer,
) -> None:
    records = [KeyRecord(os.urandom(32), b"r" * 40) for _ in range(BATCH_KEYS_MAX)]
    index = open_index(server.url, timeout_s=5, publish_timeout_s=0.2)
    with stopped(server):
        begun = time.monotonic()
        with pytest.raises(IndexUnavailableError, match="did not answer within 200 ms"):
            index.publish(records)
        assert time.monotonic() - begun < 2
    index.close()


def test_keys_of_another_redis_type_are_misses_and_are_left_alone(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    admin = server.admin()
    index.publish(RECORDS)
    name = SPACE.redis_key(KEYS[1])
    admin.delete(name)
    admin.rpush(name, b"list")
    admin.rpush(SPACE.node_key(5), b"list")
    admin.hset(SPACE.node_key(6), b"a", b"b")
    assert index.lookup(KEYS) == [b"record", None, b"record"]
    assert index.node(5) is None
    assert index.nodes() == {}
    assert index.remove(RECORDS) == 2
    assert admin.type(name) == b"list"
    index.close()


def test_an_epoch_key_of_another_type_is_an_error_and_not_an_epoch(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    server.admin().rpush("kv:default:epoch", b"list")
    with pytest.raises(IndexUnavailableError, match="WRONGTYPE"):
        index.incarnation()
    index.close()


def test_foreign_values_come_back_as_they_are_for_the_record_check_to_refuse(
    server: RedisServer,
) -> None:
    index = open_index(server.url, timeout_s=5)
    server.admin().set(SPACE.redis_key(KEYS[0]), b"x" * 5000)
    assert index.match(KEYS) == [b"x" * 5000]
    index.close()


def test_scripts_that_were_flushed_are_loaded_again(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
    for _ in range(2):
        index.publish(RECORDS)
        server.admin().script_flush()
        assert index.remove(RECORDS) == 3
    index.close()


def test_commands_never_have_more_arguments_than_the_limit(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=10, publish_timeout_s=10)
    records = [KeyRecord(os.urandom(8) + b"%024d" % i, b"r") for i in range(4 * REDIS_ARGS_MAX)]
    with server.admin().monitor() as monitor:
        index.publish(records)
        keys = [key for key, _ in records]
        assert len(index.match(keys)) == len(index.lookup(keys)) == len(records)
        assert index.remove(records) == len(records)
        arguments: dict[str, list[int]] = {}
        while sum(arguments.get("EVALSHA", [])) < 2 * len(records):
            name, _, rest = monitor.next_command()["command"].partition(" ")
            count = rest.count("kv:default:{")
            arguments.setdefault(name, []).append(
                {"MSET": 1 + 2 * count, "EVALSHA": 3 + 2 * count}.get(name, 1 + count)
            )
    index.close()
    assert {"MSET", "MGET", "EVALSHA"} <= set(arguments)
    for name in ("MSET", "MGET", "EVALSHA"):
        assert REDIS_ARGS_MAX - 4 < max(arguments[name]) <= REDIS_ARGS_MAX, name


def test_more_threads_than_connections_wait_no_longer_than_the_time_out(
    server: RedisServer,
) -> None:
    index = open_index(server.url, timeout_s=0.2, lookup_links_max=1)
    index.ping()
    link = index._read.links_for(0).take(time.monotonic() + 5)
    begun = time.monotonic()
    with pytest.raises(IndexUnavailableError, match="all 1 connections were in use"):
        index.match(KEYS)
    assert 0.19 < time.monotonic() - begun < 1.0
    index._read.links_for(0).give(link)
    assert index.match(KEYS) == []
    index.close()


def test_a_forked_child_and_its_parent_never_share_a_connection(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=10, publish_timeout_s=10)
    index.publish(RECORDS)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if all(index.match(KEYS) == [b"record"] * 3 for _ in range(200)):
                    status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert all(index.match(KEYS) == [b"record"] * 3 for _ in range(200))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert index.match(KEYS) == [b"record"] * 3
    index.close()


def test_after_close_calls_say_so(server: RedisServer) -> None:
    index = open_index(server.url, timeout_s=5)
    index.ping()
    index.close()
    with pytest.raises(IndexUnavailableError, match="closed"):
        index.match(KEYS)


def test_a_cluster_with_a_hanging_shard_answers_for_the_others() -> None:
    with closing(RedisCluster()) as cluster:
        for server in cluster.nodes:
            server.admin().config_set("cluster-require-full-coverage", "no")
        index = open_index(cluster.url, timeout_s=0.5, publish_timeout_s=5)
        keys = [os.urandom(32) for _ in range(30)]
        index.publish([KeyRecord(key, b"r") for key in keys])
        with stopped(cluster.nodes[2]):
            away = [SPACE.slot(key) // 5462 == 2 for key in keys]
            assert 0 < sum(away) < len(keys)
            index.lookup(keys)  # pays for finding out
            begun = time.monotonic()
            found = index.lookup(keys)
            assert time.monotonic() - begun < 0.4
            assert found == [None if lost else b"r" for lost in away]
            assert [index.match([key]) == [] for key in keys] == away
            lost = index.publish([KeyRecord(key, b"new") for key in keys])
            assert {key for key, _ in lost} == {
                key for key, lost in zip(keys, away, strict=True) if lost
            }
            index.ping()
        wait_until(lambda: index.lookup(keys).count(None) == 0, "the shard is asked again")
        index.close()


def test_slots_that_move_to_another_shard_are_followed(redis_cluster: RedisCluster) -> None:
    index = open_index(redis_cluster.url, timeout_s=10, publish_timeout_s=10)
    key = os.urandom(32)
    index.publish([KeyRecord(key, b"r")])
    slot, name = SPACE.slot(key), SPACE.redis_key(key)
    old = redis_cluster.nodes[slot // 5462]
    new = next(node for node in redis_cluster.nodes if node is not old)
    ids = {n: n.admin().execute_command("CLUSTER MYID").decode() for n in (old, new)}
    new.admin().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
    old.admin().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
    old.admin().execute_command("MIGRATE", "127.0.0.1", new.port, name, 0, 5000)
    assert index.match([key]) == [b"r"]  # ASK
    for node in (new, old):
        node.admin().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
    assert index.match([key]) == [b"r"]  # MOVED
    assert index.remove([KeyRecord(key, b"r")]) == 1
    index.close()


def test_a_master_that_became_a_replica_is_left_for_the_one_that_sentinel_names() -> None:
    with RedisServer(port=free_port()) as one, RedisServer(port=free_port()) as two:
        conf = one.directory / "sentinel.conf"
        conf.write_text(f"sentinel monitor main 127.0.0.1 {one.port} 1\n")
        with RedisServer(port=free_port(), args=(str(conf), "--sentinel")) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
            index = open_index(url, timeout_s=5, publish_timeout_s=5)
            index.publish(RECORDS)
            before = index.incarnation()
            assert len(index.match(KEYS)) == 3
            one.admin().execute_command("REPLICAOF", "127.0.0.1", two.port)
            sentinel.admin().execute_command("SENTINEL", "REMOVE", "main")
            sentinel.admin().execute_command(
                "SENTINEL", "MONITOR", "main", "127.0.0.1", two.port, 1
            )
            with pytest.raises(IndexUnavailableError, match="READONLY"):
                index.publish(RECORDS)
            index.publish(RECORDS)
            assert index.match(KEYS) == [b"record"] * 3
            assert index.incarnation() != before
            assert two.admin().get(SPACE.redis_key(KEYS[0])) == b"record"
            index.close()


def test_sentinels_that_hang_leave_time_for_the_next(redis_sentinel: RedisSentinel) -> None:
    """Two of three hang: a whole time-out for each would leave none for the one that answers."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in silent]
        hosts.append(f"127.0.0.1:{redis_sentinel.sentinel.port}")
        index = open_index(f"redis+sentinel://{','.join(hosts)}/main", timeout_s=1.0)
        begun = time.monotonic()
        assert index.match([os.urandom(32)]) == []
        assert time.monotonic() - begun < 1.0
        index.close()


def test_opening_an_index_connects_to_nothing() -> None:
    code = (
        "import socket; socket.socket.connect = None\n"
        "from kvstore.index.redis.index import open_index\n"
        "open_index('redis://u:p@example.invalid:1/3').close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_shard_that_is_away_changes_no_incarnation_until_it_is_back_without_its_keys() -> None:
    with closing(RedisCluster()) as cluster:
        for server in cluster.nodes:
            server.admin().config_set("cluster-require-full-coverage", "no")
        index = open_index(cluster.url, timeout_s=5, publish_timeout_s=5)
        before = index.incarnation()
        cluster.nodes[1].kill()
        assert index.incarnation() == before
        cluster.nodes[1].start()
        wait_until(lambda: index.incarnation() != before, "the shard's new incarnation")
        index.close()


def test_a_cluster_without_any_shard_is_unavailable() -> None:
    with closing(RedisCluster()) as cluster:
        index = open_index(cluster.url, timeout_s=2, publish_timeout_s=2)
        index.publish(RECORDS)
        for server in cluster.nodes:
            server.kill()

        def unavailable() -> bool:
            try:
                index.lookup([os.urandom(32) for _ in range(50)])
            except IndexUnavailableError:
                return True
            return False

        wait_until(unavailable, "every shard is found away")
        with pytest.raises(IndexUnavailableError):
            index.ping()
        index.close()
