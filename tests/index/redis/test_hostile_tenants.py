"""Two tenants of one Redis, with the users that `kvstore acl` prints: one tries to keep the other
from its work. Most of it is refused; what is not is named in docs/security.md, and what it costs
and what an operator sets against it is shown here."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from each_input import each
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_servers import RedisServer, free_port, wait_until
from stores import MIB, PATIENT

from kvstore import Client
from kvstore.cli import main
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.open import open_guarded
from kvstore.index.redis.acl import AclRole, acl_rules
from kvstore.index.redis.key_space import KeySpace
from kvstore.node import Node, NodeConfig

VICTIM, HOSTILE = "kv:victim", "kv:hostile"
PASSWORD = "a-password-of-some-length"
VALUE = b"v" * 1000
OWN_KEY = f"{HOSTILE}:epoch"
THEIR_KEY = f"{VICTIM}:epoch"
ENDLESS = "while true do end"
CONNECTIONS_MAX = 40


def add_users(server: RedisServer, tmp_path: Path, capsys: Any, *options: str) -> None:
    """What an operator does: `kvstore acl` for both, its lines to redis-cli."""
    passwords = tmp_path / "passwords"
    passwords.write_text("".join(f"{role} {PASSWORD}\n" for role in AclRole))
    for tenant in (VICTIM, HOSTILE):
        its = options if tenant == HOSTILE else ()
        assert main(["acl", "--key-prefix", tenant, "--passwords", str(passwords), *its]) == 0
        for line in capsys.readouterr().out.splitlines():
            server.admin().execute_command(*shlex.split(line))


@pytest.fixture
def server(tmp_path: Path, capsys: Any) -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        add_users(server, tmp_path, capsys)
        yield server


def user(tenant: str, role: AclRole) -> str:
    return f"{tenant.replace(':', '-')}-{role}"


def connection(server: RedisServer, role: AclRole) -> redis.Redis:
    """The hostile tenant's own client of Redis."""
    return redis.Redis(
        port=server.port,
        username=user(HOSTILE, role),
        password=PASSWORD,
        socket_timeout=10,
        retry=Retry(NoBackoff(), 0),
    )


def url(server: RedisServer, role: AclRole) -> str:
    return f"redis://{user(VICTIM, role)}:{PASSWORD}@127.0.0.1:{server.port}"


def options(run_dir: Path) -> dict[str, Any]:
    return {"key_prefix": VICTIM, "run_dir": run_dir, "limits": PATIENT}


@contextmanager
def victim(server: RedisServer, run_dir: Path) -> Iterator[tuple[Node, Client]]:
    run_dir.mkdir(mode=0o700)
    opened = open_guarded(
        url(server, AclRole.NODE), key_prefix=VICTIM, run_dir=run_dir, limits=PATIENT
    )
    config = NodeConfig(run_dir=run_dir, key_prefix=VICTIM, size_bytes=4 * MIB, limits=PATIENT)
    try:
        with (
            Node(config, opened.index) as node,
            Client(url(server, AclRole.CLIENT), **options(run_dir)) as client,
        ):
            yield node, client
    finally:
        opened.close()


def works_on_its_host(client: Client, name: str) -> bool:
    return bool(client.put(name, VALUE)) and client.get(name) == VALUE


def is_published(admin: redis.Redis, client: Client, name: str) -> bool:
    return bool(admin.exists(KeySpace(VICTIM).redis_key(client.namespace.value_key(name))))


ATTACKS = [
    ("EVAL", ENDLESS, 0),
    ("EVALSHA", "0" * 40, 0),
    ("EVAL_RO", ENDLESS, 0),
    ("SCRIPT", "LOAD", ENDLESS),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() end)"),
    ("FCALL", "f", 0),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("SORT", OWN_KEY, "BY", f"{VICTIM}:*", "GET", THEIR_KEY),
    ("OBJECT", "FREQ", THEIR_KEY),
    ("DUMP", THEIR_KEY),
    ("EXPIRE", THEIR_KEY, 0),
    ("RENAME", THEIR_KEY, OWN_KEY),
    ("COPY", THEIR_KEY, OWN_KEY),
    ("MIGRATE", "127.0.0.1", 1, THEIR_KEY, 0, 1),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "PAUSE", 100_000),
    ("CLIENT", "LIST"),
    ("CLIENT", "NO-EVICT", "ON"),
    ("CONFIG", "SET", "maxclients", 1),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "REWRITE"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", 0, 1),
    ("MOVE", OWN_KEY, 1),
    ("SUBSCRIBE", VICTIM),
    ("PSUBSCRIBE", "*"),
    ("SSUBSCRIBE", VICTIM),
    ("PUBLISH", VICTIM, "x"),
    ("PUBSUB", "CHANNELS"),
    ("DEBUG", "SLEEP", 100),
    ("MONITOR",),
    ("SHUTDOWN", "NOSAVE"),
    ("SAVE",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("REPLICAOF", "127.0.0.1", 1),
    ("FAILOVER",),
    ("CLUSTER", "RESET"),
    ("ACL", "SETUSER", user(HOSTILE, AclRole.NODE), "allcommands"),
    ("ACL", "LIST"),
    ("MODULE", "LOAD", "/x.so"),
    ("SLOWLOG", "GET"),
    ("LATENCY", "RESET"),
    ("MEMORY", "USAGE", THEIR_KEY),
    ("BLPOP", THEIR_KEY, 0),
    ("XREAD", "BLOCK", 0, "STREAMS", THEIR_KEY, "$"),
    ("WAIT", 1, 0),
]


@pytest.mark.parametrize("role", list(AclRole))
def test_what_would_stop_another_tenant_or_show_its_keys_is_refused(
    server: RedisServer, tmp_path: Path, role: AclRole
) -> None:
    done = []
    with victim(server, tmp_path / "v") as (_, client), connection(server, role) as hostile:
        assert works_on_its_host(client, "k")
        for words in ATTACKS:
            try:
                hostile.execute_command(*words)
            except redis.exceptions.NoPermissionError:
                continue
            except redis.exceptions.ResponseError as e:
                # Of a later version of Redis, or switched off for everybody (DEBUG, MODULE).
                if re.search("unknown command|command not allowed", str(e), re.IGNORECASE):
                    continue
            done.append(words)
        assert done == []
        wait_until(
            lambda: is_published(server.admin(), client, "k"), "the victim's block is published"
        )
        client.ping()


THEIRS = [
    ("GET", THEIR_KEY),
    ("MGET", OWN_KEY, THEIR_KEY),
    ("SET", THEIR_KEY, "x"),
    ("MSET", OWN_KEY, "x", THEIR_KEY, "x"),
    ("DEL", OWN_KEY, THEIR_KEY),
    ("WATCH", THEIR_KEY),
    ("SADD", f"{VICTIM}:nodes", "0" * 16),
    ("SREM", f"{VICTIM}:nodes", "0" * 16),
    ("SMEMBERS", f"{VICTIM}:nodes"),
]


@pytest.mark.parametrize("role", list(AclRole))
def test_what_is_listed_ends_at_the_own_keys_alone_or_in_a_transaction(
    server: RedisServer, role: AclRole
) -> None:
    server.admin().set(THEIR_KEY, "theirs")
    for words in THEIRS:
        with connection(server, role) as hostile:
            with pytest.raises(redis.exceptions.NoPermissionError):
                hostile.execute_command(*words)
            if role is AclRole.NODE and words[0] != "WATCH":
                with hostile.client() as one:
                    one.execute_command("MULTI")
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        one.execute_command(*words)
                    with suppress(redis.exceptions.ResponseError):
                        one.execute_command("EXEC")  # aborted: nothing of it is done
    assert server.admin().get(THEIR_KEY) == b"theirs"
    assert not server.admin().exists(OWN_KEY)


@each("wild", ["kv:*", "kv:victi?", "kv:[uv]ictim", "kv:\\victim", "kv:{a}", ""])
def test_a_prefix_that_is_a_pattern_is_refused(wild: str) -> None:
    for role in AclRole:
        with pytest.raises(UsageError, match=r"^key_prefix="):
            acl_rules(role, wild, None)


def test_with_scripts_one_tenant_stops_all_but_what_they_have_on_their_hosts(
    tmp_path: Path, capsys: Any
) -> None:
    """Why the right to scripts is not given unless it is asked for."""
    with RedisServer(port=free_port()) as server:
        add_users(server, tmp_path, capsys, "--scripts")
        with victim(server, tmp_path / "v") as (_, client), connection(server, AclRole.NODE) as one:
            assert works_on_its_host(client, "before")
            sha = one.script_load(ENDLESS)
            with connection(server, AclRole.NODE) as asks:
                run = threading.Thread(target=lambda: suppressed(asks, sha))
                run.start()
                wait_until(lambda: is_busy(server), "the script runs")
                with pytest.raises(IndexUnavailableError):
                    client.session.index.ping()
                assert works_on_its_host(client, "during")
                assert client.get("before") == VALUE
                server.admin().script_kill()
                run.join(20)
            wait_until(
                lambda: is_published(server.admin(), client, "during"),
                "what waited is published",
                30,
            )


def suppressed(asks: redis.Redis, sha: str) -> None:
    with suppress(redis.exceptions.RedisError):
        asks.evalsha(sha, 0)


def is_busy(server: RedisServer) -> bool:
    try:
        server.admin().ping()
    except redis.exceptions.ResponseError as e:
        return "BUSY" in str(e)
    return False


@pytest.mark.parametrize("proved", [True, False], ids=["a tenant's", "without a password"])
def test_who_takes_all_connections_keeps_others_from_new_ones_only_while_it_has_them(
    tmp_path: Path, capsys: Any, proved: bool
) -> None:
    """Redis counts connections of everybody in one `maxclients`: docs/security.md."""
    with RedisServer("--maxclients", str(CONNECTIONS_MAX), port=free_port()) as server:
        add_users(server, tmp_path, capsys)
        admin = server.admin(single_connection_client=True)
        with closing(admin), victim(server, tmp_path / "v") as (_, client):
            assert works_on_its_host(client, "before")
            taken: list[redis.Redis] = []
            with suppress(redis.exceptions.RedisError):
                while len(taken) < 2 * CONNECTIONS_MAX:
                    one = redis.Redis(
                        port=server.port,
                        username=user(HOSTILE, AclRole.CLIENT) if proved else None,
                        password=PASSWORD if proved else None,
                        single_connection_client=True,
                        retry=Retry(NoBackoff(), 0),
                    )
                    taken.append(one)
            assert len(taken) < CONNECTIONS_MAX
            assert works_on_its_host(client, "during")  # its connections of before go on
            wait_until(lambda: is_published(admin, client, "during"), "its block is published")
            with Client(url(server, AclRole.CLIENT), **options(tmp_path / "v")) as late:
                assert late.get("during") == VALUE  # of its own host
                with pytest.raises(IndexUnavailableError):
                    late.session.index.ping()
                for one in taken:
                    one.close()
                wait_until(lambda: pings(late), "a later client is let in")


def pings(client: Client) -> bool:
    try:
        client.session.index.ping()
    except IndexUnavailableError:
        return False
    return True


def test_who_fills_the_memory_stops_publishing_and_nothing_of_the_own_host(
    tmp_path: Path, capsys: Any
) -> None:
    """Redis has no quota for a user: docs/security.md."""
    limit = ("--maxmemory", "24mb", "--maxmemory-policy", "noeviction")
    with RedisServer(*limit, port=free_port()) as server:
        add_users(server, tmp_path, capsys)
        with victim(server, tmp_path / "v") as (_, client):
            assert works_on_its_host(client, "before")
            with connection(server, AclRole.NODE) as hostile:
                filled: list[str] = []

                def full() -> bool:
                    fill(hostile, filled)
                    assert works_on_its_host(client, f"during-{len(filled)}")
                    return "it is full" in str(client.health())

                wait_until(full, "health says that Redis is full", 30)
                assert client.put("last", VALUE)
                assert client.get("before") == VALUE
                hostile.delete(*filled)
            what = "what waited is published"
            wait_until(lambda: is_published(server.admin(), client, "last"), what, 30)


def fill(hostile: redis.Redis, filled: list[str]) -> None:
    """Until Redis takes no more, not even little."""
    for size_bytes in (MIB, MIB >> 6, 16):
        with suppress(redis.exceptions.OutOfMemoryError):
            while True:
                filled.append(f"{HOSTILE}:node:{len(filled):016x}")
                hostile.set(filled[-1], bytes(size_bytes))


def test_who_asks_and_never_reads_loses_its_connection_where_the_operator_says_so(
    tmp_path: Path, capsys: Any
) -> None:
    """Answers that wait count in no `maxmemory`: with the setting of docs/security.md they end."""
    limit = ("--client-output-buffer-limit", "normal 16mb 0 0")
    with RedisServer(*limit, port=free_port()) as server:
        add_users(server, tmp_path, capsys)
        with connection(server, AclRole.NODE) as hostile:
            # Valkey 9 answers longer values (16 KiB) without a copy, which is then no memory.
            hostile.set(OWN_KEY, bytes(15 * 1024))
            one = hostile.connection_pool.get_connection()
            one.send_packed_command([b"".join(one.pack_command("MGET", *[OWN_KEY] * 300))] * 40)
            name = user(HOSTILE, AclRole.NODE)

            def waiting() -> list[dict[str, str]]:
                its = [c for c in server.admin().client_list() if c["user"] == name]
                return [c for c in its if int(c["omem"]) > 4 * MIB]

            wait_until(lambda: not waiting(), "it is closed")
            assert server.admin().info("stats")["client_output_buffer_limit_disconnections"] >= 1
