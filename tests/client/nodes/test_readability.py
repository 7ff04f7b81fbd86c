"""What a reader cannot read is not found by it, and it is told why: real nodes, both ends with
secrets, certificates and memory of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, NodeThread
from tls_certificate import certificate
from two_hosts import LISTEN, SECRET, SECURITY, client_of, listening_node

from kvstore import Client, Explanation, MissReason, PutStatus
from kvstore.cli.checks import reach
from kvstore.cli.checks.base import Context, Level
from kvstore.cli.checks.machine import leftovers
from kvstore.cli.commands.stat import collect
from kvstore.node.stream import server
from kvstore.nodedir import NodeDir
from kvstore.transport.stream.security import StreamSecurity

TOKENS = list(range(1024))
BLOCKS = [bytes([i]) * 5000 for i in range(4)]
OTHER = b"another secret altogether"
ROUNDS = 100


def save(client: Client) -> None:
    assert client.put("k", b"v" * 1000).status is PutStatus.STORED
    assert all(client.put_blocks(TOKENS, BLOCKS))


def blocks_of(client: Client) -> int:
    """How many blocks are promised; each promise is kept."""
    found = client.match_prefix(TOKENS).blocks
    assert client.get_blocks(TOKENS, [bytearray(5000) for _ in BLOCKS]) == found
    return found


def reads_all(client: Client) -> bool:
    return blocks_of(client) == len(BLOCKS) and client.get("k") == b"v" * 1000


def finds_nothing_for(client: Client, reason: MissReason) -> str:
    """What `client` says of what is there: the same in every way."""
    wait_until(lambda: client.match_prefix(TOKENS).blocks == 0, "the cause is learned")
    keys = client.namespace.block_keys(TOKENS, 256)
    assert client.session.match(keys).short is reason
    looked = client.session.lookup(keys)
    assert (list(looked), looked.short) == ([None] * 4, reason)
    assert not client.exists("k")
    assert client.get("k") is None
    explanation: Explanation = client.explain(TOKENS)
    assert explanation.hit_tokens == 0
    for missing in (explanation.first_missing, client.explain_key("k").first_missing):
        assert missing is not None
        assert missing.reason is reason, missing
    return str(explanation.first_missing)


@contextmanager
def lookups_cost_at_most(client: Client, round_trips: int) -> Iterator[None]:
    """Of the index: a lookup that leaves something out asks nobody else."""
    index, asked = client.session.index, list[Any]()
    plain = {name: getattr(index, name) for name in ("match", "lookup")}

    def counted(call: Any, keys: Any) -> Any:
        asked.append(keys)
        return call(keys)

    for name, call in plain.items():
        setattr(index, name, partial(counted, call))
    yield
    for name, call in plain.items():
        setattr(index, name, call)
    assert len(asked) <= round_trips


# --- checksums --------------------------------------------------------------------


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as node:
        yield node


@pytest.fixture
def never(node: NodeProcess) -> Iterator[Client]:
    with Client(**node.client_options) as client:
        yield client


@pytest.fixture
def always(node: NodeProcess) -> Iterator[Client]:
    with Client(**node.client_options, verify="always") as client:
        yield client


def test_blocks_without_a_checksum_are_not_found_by_who_reads_none(
    never: Client, always: Client
) -> None:
    save(never)
    assert blocks_of(always) == 0
    said = finds_nothing_for(always, MissReason.UNREADABLE_NO_CHECKSUM)
    assert "without a checksum" in said
    with lookups_cost_at_most(always, 1):
        always.match_prefix(TOKENS)
    assert always.stats()["missed"]["unreadable-no-checksum"] > 0
    assert reads_all(never)


@pytest.mark.parametrize("way", ["put", "replace", "put_many", "reserve"])
def test_a_save_with_checksums_replaces_them_once_and_both_can_read(
    never: Client, always: Client, way: str
) -> None:
    save(never)
    stored = {never: 0, always: 0}
    for _ in range(ROUNDS):
        for client in (always, never):
            if way == "reserve":
                results = _saved_as_connectors_do(client)
            elif way == "put_many":
                results = [*client.put_many({"k": b"v" * 1000, "l": b"w"})][:1]
            else:
                results = [client.put("k", b"v" * 1000, replace=way == "replace")]
            stored[client] += sum(r.status is PutStatus.STORED for r in results)
            assert all(results)
    expected = len(BLOCKS) if way == "reserve" else 1
    assert stored == {never: 0, always: expected}
    if way == "reserve":
        assert blocks_of(always) == blocks_of(never) == len(BLOCKS)
    else:
        assert always.get("k") == never.get("k") == b"v" * 1000
        assert always.explain_key("k").reason is None


def _saved_as_connectors_do(client: Client) -> list[Any]:
    keys = client.namespace.block_keys(TOKENS, 256)
    answers = client.session.reserve(keys, 5000, client.namespace.id)
    granted = [answer for answer in answers if not hasattr(answer, "status")]
    for one, block in zip(granted, BLOCKS, strict=False):
        one.buffer[:] = block
    return client.session.commit(granted) if granted else list(answers)


# --- secrets, certificates, transports ----------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(certificate, key) of this address, of another one, and of another authority."""
    names = {"ours": "127.0.0.1", "for another name": "192.0.2.1", "theirs": "127.0.0.1"}
    base = tmp_path_factory.mktemp("tls")
    return {who: certificate(base / who, name) for who, name in names.items()}


def of_node(files: tuple[Path, Path], **more: Any) -> dict[str, Any]:
    security = StreamSecurity(secret=SECURITY.secret, tls_cert=files[0], tls_key=files[1], **more)
    return {"security": security}


WRONG: dict[str, tuple[str | None, MissReason, str]] = {
    "another secret": (None, MissReason.UNREADABLE_SECRET, "KVSTORE_SECRET"),
    "no secret": (None, MissReason.UNREADABLE_SECRET, "KVSTORE_SECRET"),
    "no CA": ("ours", MissReason.UNREADABLE_TLS, "KVSTORE_TLS_CA"),
    "a CA and a plain node": (None, MissReason.UNREADABLE_TLS, "KVSTORE_TLS_CA"),
    "another CA": ("ours", MissReason.UNREADABLE_TLS, "certificate"),
    "a certificate for another name": ("for another name", MissReason.UNREADABLE_TLS, "not valid"),
    "no certificate of its own": ("ours", MissReason.UNREADABLE_TLS, "certificate"),
    "transports": (None, MissReason.UNREADABLE_TRANSPORTS, "KVSTORE_TRANSPORTS"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_who_is_not_served_finds_nothing_and_is_told_why_and_others_are_served(
    redis_server: RedisServer, elsewhere: Path, tls: dict[str, tuple[Path, Path]], wrong: str
) -> None:
    served, reason, word = WRONG[wrong]
    ca = None if served is None else tls[served][0]
    right: dict[str, Any] = {"security": StreamSecurity(secret=SECURITY.secret, tls_ca=ca)}
    demanded: dict[str, Any] = {"tls_ca": tls["theirs"][0]} if "of its own" in wrong else {}
    options: dict[str, Any] = {
        "another secret": {"security": StreamSecurity(secret=OTHER)},
        "no secret": {"security": StreamSecurity()},
        "no CA": {"security": SECURITY},
        "a CA and a plain node": {
            "security": StreamSecurity(secret=SECURITY.secret, tls_ca=tls["ours"][0])
        },
        "another CA": {"security": StreamSecurity(secret=SECURITY.secret, tls_ca=tls["theirs"][0])},
        "transports": {**right, "transports": ("shm",)},
    }.get(wrong, right)
    settings: dict[str, Any] = {"listen": ("127.0.0.1", 0), "size_bytes": 8 * MIB}
    settings |= {"security": SECURITY} if served is None else of_node(tls[served], **demanded)
    with NodeThread(redis_server, **settings) as node:
        with client_of(node) as writer:
            save(writer)
        with client_of(node, elsewhere, **options) as client:
            assert word in finds_nothing_for(client, reason)
            with lookups_cost_at_most(client, 1):
                assert client.match_prefix(TOKENS).blocks == 0
            health = client.health()
            assert not health, "it can neither read nor save"
            assert str(reason) in str(health)
            rejected = client.put("other", b"v")
            assert not rejected
            assert str(reason) in rejected.reason
        if wrong not in ("a certificate for another name", "no certificate of its own"):
            with client_of(node, elsewhere, **right) as other:
                assert reads_all(other)
                assert other.explain_key("k").reason is None
                assert other.health()


def test_who_only_looks_up_learns_it_too_and_doctor_and_stat_say_it(
    far: NodeProcess, writer: Client, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine's scheduler: its workers are those who read."""
    save(writer)
    monkeypatch.setenv("KVSTORE_SECRET", OTHER.decode())
    with client_of(far, elsewhere, security=None) as client:
        wait_until(lambda: client.match_prefix(TOKENS).blocks == 0, "it is learned")
    for secret, level in ((OTHER.decode(), Level.FAIL), (SECRET, Level.OK)):
        monkeypatch.setenv("KVSTORE_SECRET", secret)
        (found,) = reach.look(Context(far.redis.url, far.key_prefix, elsewhere))
        assert found.level is level
        assert ("unreadable-secret" in found.found) is (level is Level.FAIL)
        (shown,) = collect(far.redis.url, far.key_prefix, elsewhere)["nodes"]
        assert ("unreadable-secret" in shown["unreadable"]) is (level is Level.FAIL)


def test_who_may_not_use_the_memory_of_its_own_host_is_told_so(never: Client) -> None:
    save(never)
    run_dir, prefix = never.session.run_dir, never.session.key_prefix
    with Client(
        never.session.url, run_dir=run_dir, key_prefix=prefix, transports=("stream",)
    ) as client:
        assert "shm" in finds_nothing_for(client, MissReason.UNREADABLE_TRANSPORTS)
        assert not client.health()
        assert "unreadable-transports" in client.put("other", b"v").reason


def test_a_node_that_has_no_room_is_named_and_found_again_when_it_has(
    redis_server: RedisServer, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"listen": ("127.0.0.1", 0), "security": SECURITY, "size_bytes": 8 * MIB}
    with NodeThread(redis_server, **settings) as node, client_of(node) as writer:
        save(writer)
        monkeypatch.setattr(server, "share", lambda most, one_in: 0)
        with client_of(node, elsewhere) as client:
            assert "hung up" in finds_nothing_for(client, MissReason.UNREADABLE_REFUSED)
            monkeypatch.setattr(server, "share", lambda most, one_in: 9)
            wait_until(lambda: client.match_prefix(TOKENS).blocks == 4, "it has room")
            assert reads_all(client)
            assert client.explain_key("k").reason is None


def test_the_next_start_of_the_node_is_believed_anew(
    redis_server: RedisServer, elsewhere: Path
) -> None:
    with listening_node(redis_server) as node:
        with client_of(node) as writer:
            save(writer)
        with client_of(node, elsewhere, security=StreamSecurity(secret=OTHER)) as client:
            finds_nothing_for(client, MissReason.UNREADABLE_SECRET)
            node.kill()
            node.environment["KVSTORE_SECRET"] = OTHER.decode()
            node.start()
            wait_until(lambda: client.match_prefix(TOKENS).blocks == 4, "it serves this client")
            assert reads_all(client)


def test_two_who_cannot_read_each_others_nodes_take_the_record_once_each(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Neither has a node on its own host; the index has one record for a key."""
    mine, yours = StreamSecurity(secret=OTHER), SECURITY
    with (
        listening_node(redis_server) as first,
        NodeProcess(
            redis_server,
            options=LISTEN,
            environment={"KVSTORE_SECRET": OTHER.decode()},
            key_prefix=first.key_prefix,
        ),
        client_of(first, tmp_path / "a", security=yours) as one,
        client_of(first, tmp_path / "b", security=mine) as two,
    ):
        stored = {one: 0, two: 0}
        for client in (one, two):
            assert client.put("k", b"v").status is PutStatus.STORED
            wait_until(lambda c=client: c.get("k") == b"v", "it is known who can be read")
        for _ in range(ROUNDS):
            for client in (one, two):
                result = client.put("k", b"v")
                assert result
                stored[client] += result.status is PutStatus.STORED
        assert stored == {one: 1, two: 1}
        assert [client.get("k") for client in (one, two)].count(b"v") == 1


# --- memory --------------------------------------------------------------------------


@contextmanager
def hidden(paths: list[Path]) -> Iterator[None]:
    """As for a process with another /dev/shm."""
    for path in paths:
        path.rename(path.with_name(f"{path.name}.hidden"))
    try:
        yield
    finally:
        for path in paths:
            path.with_name(f"{path.name}.hidden").rename(path)


def test_memory_that_cannot_be_opened_is_named_and_found_again_when_it_can(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.upkeep.LOOK_EVERY_S", 600.0)  # for the node it is there
    with (
        NodeThread(redis_server, size_bytes=8 * MIB) as node,
        Client(**node.client_options) as owner,
        Client(**node.client_options) as client,
    ):
        save(owner)
        word = NodeDir(node.run_dir, "node").announcement()
        assert word is not None
        context = Context(redis_server.url, word.key_prefix, node.run_dir)
        with hidden([Path(word.data_path), Path(word.head_path)]):
            said = finds_nothing_for(client, MissReason.UNREADABLE_UNMAPPED)
            assert "No such file" in said
            for _ in range(2):
                assert "No such file" in client.put("other", b"v").reason
            health = client.health()
            assert not health
            assert "unreadable-unmapped" in health.nodes["node"]
            assert owner.health(), "it has the memory"
            (found,) = reach.look(context)
            assert found.level is Level.FAIL
            assert "the node is well" in found.do
            assert [f for f in leftovers(context) if f.level is Level.FAIL] == []
            (shown,) = collect(redis_server.url, word.key_prefix, node.run_dir)["nodes"]
            assert "unreadable-unmapped" in shown["unreadable"]
        wait_until(lambda: client.match_prefix(TOKENS).blocks == 4, "it is mapped")
        assert reads_all(client)
        wait_until(lambda: bool(client.put("other", b"v")), "it saves again")
        assert client.health()


CHILD = """
import resource, sys
from pathlib import Path
from kvstore import Client, Limits
url, run_dir, prefix = sys.argv[1:]
import kvstore.segment.attached
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
with Client(url, run_dir=Path(run_dir), key_prefix=prefix, limits=Limits(redis_timeout_s=5.0)) as c:
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
    print(c.get("k"), c.explain_key("k").first_missing, bool(c.health()), c.put("l", b"v").reason)
"""


def test_a_process_without_room_for_the_memory_says_so(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server, size=256 * MIB) as node:
        with Client(**node.client_options) as client:
            save(client)
        where = (redis_server.url, str(node.run_dir), node.key_prefix)
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, *where], capture_output=True, text=True, timeout=60
        )
        assert ran.stdout.startswith("None unreadable-unmapped: "), ran
        assert ran.stdout.count("Cannot allocate memory") == 2
        assert " False segment of node node: " in ran.stdout


# --- health ---------------------------------------------------------------------------


def test_health_is_false_once_the_node_that_there_was_has_ended(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server) as node, Client(**node.client_options) as client:
        assert client.get("k") is None
        assert client.health()
        node.kill()
        wait_until(lambda: not client.health(), "it had a node, and has none")
        assert "it has ended" in str(client.health())
        node.start()
        wait_until(lambda: bool(client.health()), "it has one again")


def test_a_node_of_another_host_that_cannot_be_read_is_text_while_there_is_one_here(
    redis_server: RedisServer, far: NodeProcess
) -> None:
    with (
        NodeProcess(redis_server, key_prefix=far.key_prefix) as here,
        client_of(here, security=StreamSecurity(secret=OTHER)) as client,
    ):
        health = client.health()
        assert health
        assert dict(health.nodes) == {"node": ""}
        assert "unreadable-secret" in str(health)
        assert str(health).startswith("healthy")
