"""The rights that `kvstore acl` gives are those that the code needs, and no more."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import redis
from contract.index import scanned
from each_input import each
from redis_servers import RedisCluster, RedisServer, free_port
from stores import MIB, PATIENT

from kvstore import Client
from kvstore.cli import main
from kvstore.cli.checks import redis as redis_check
from kvstore.cli.checks.base import Context, Level
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.base import KeyRecord
from kvstore.index.open import open_guarded
from kvstore.index.redis.acl import (
    COMMANDS,
    SCRIPTS,
    TRANSACTIONS,
    AclRole,
    acl_rules,
    password_hash,
)
from kvstore.index.redis.index import RedisIndex, open_index
from kvstore.index.redis.key_space import KeySpace
from kvstore.node import Node, NodeConfig

TENANT, OTHER, NESTED = "kv:a", "kv:b", "kv:a:b"
PASSWORD = "a-password-of-some-length"
RECORDS = [KeyRecord(bytes([i]) * 32, b"record") for i in range(3)]
KEYS = [key for key, _ in RECORDS]
ON_CLUSTER = {"cluster|slots", "asking"}
CONTAINERS = ("script", "cluster", "client")


def user_of(role: AclRole, tenant: str) -> str:
    return f"{tenant.replace(':', '-')}-{role}"


def add_users(server: RedisServer) -> None:
    """The commands that `kvstore acl` prints, for three tenants."""
    for tenant in (TENANT, OTHER, NESTED):
        for role in AclRole:
            rules = acl_rules(role, tenant, password_hash(PASSWORD)).split()
            server.admin().execute_command("ACL", "SETUSER", user_of(role, tenant), *rules)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        add_users(server)
        yield server


def url_of(where: str, role: AclRole, tenant: str = TENANT) -> str:
    scheme, _, hosts = where.partition("://")
    return f"{scheme}://{user_of(role, tenant)}:{PASSWORD}@{hosts}"


def tcp(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


def index_of(
    server: RedisServer, role: AclRole, tenant: str = TENANT, prefix: str = ""
) -> RedisIndex:
    url = url_of(tcp(server), role, tenant)
    return open_index(url, key_prefix=prefix or tenant, timeout_s=5, publish_timeout_s=5)


class Monitor:
    """What MONITOR shows of some servers, by the user who sent it."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self._servers = servers
        self._seen: list[tuple[RedisServer, str, str]] = []
        self._users: dict[tuple[int, str], str] = {}
        self._monitors = [server.admin().monitor() for server in servers]
        for monitor in self._monitors:
            monitor.__enter__()
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in zip(servers, self._monitors, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, server: RedisServer, monitor: redis.client.Monitor) -> None:
        for said in monitor.listen():
            words = str(said["command"]).lower().split()
            if words == ["ping", "the-end"]:
                return
            if said["client_type"] == "lua" or words[0] == "auth":
                continue  # a script's own are its caller's; AUTH is everybody's
            name = "|".join(words[:2]) if words[0] in CONTAINERS else words[0]
            self._seen.append((server, f"{said['client_address']}:{said['client_port']}", name))

    def note_users(self) -> None:
        """Say whose the open connections are."""
        for server in self._servers:
            for line in server.admin().client_list():
                self._users[id(server), line["addr"]] = line["user"]

    def close(self) -> None:
        for server in self._servers:
            server.admin().execute_command("PING", "the-end")
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def sent_by(self, user: str) -> set[str]:
        return {
            name
            for server, address, name in self._seen
            if self._users.get((id(server), address)) == user
        }


@contextmanager
def a_node(url: str, run_dir: Path) -> Iterator[Node]:
    config = NodeConfig(run_dir=run_dir, key_prefix=TENANT, size_bytes=4 * MIB, limits=PATIENT)
    opened = open_guarded(url, key_prefix=TENANT, run_dir=run_dir, limits=PATIENT)
    with closing(opened), Node(config, opened.index) as node:
        yield node


def run_everything(where: str, servers: list[RedisServer], monitor: Monitor, run_dir: Path) -> None:
    """Everything that a node, a client and the command line do with an index."""
    for server in servers:
        server.admin().script_flush()
    with (
        a_node(url_of(where, AclRole.NODE), run_dir) as node,
        Client(
            url_of(where, AclRole.CLIENT), key_prefix=TENANT, run_dir=run_dir, limits=PATIENT
        ) as client,
    ):
        assert all(client.put_many([(f"k{i}", b"v" * 1000) for i in range(40)]))
        assert client.get_many([f"k{i}" for i in range(40)]) == [b"v" * 1000] * 40
        assert client.get("absent") is None
        assert client.explain_key("absent").first_missing is not None
        assert client.explain([1] * 512).first_missing is not None
        assert client.match_prefix([1] * 512).blocks == 0
        assert client.delete("k1")
        with client.pin("k2"):
            pass
        index = client.session.index
        index.ping()
        assert list(index.nodes()) == [node.announcement.node_id]
        node.index.ping()  # as its circuit breaker does
        assert node.index.node(node.announcement.node_id) is not None
        assert node.index.renew(node.announcement.node_id, 5)
        node.index.remove([KeyRecord(bytes(32), b"absent")])
        monitor.note_users()
    assert node.core.blocks.outbox.forgotten == 0


def test_a_client_and_a_node_send_what_their_profiles_list(
    server: RedisServer, tmp_path: Path
) -> None:
    monitor = Monitor([server])
    run_everything(f"{tcp(server)}/1", [server], monitor, tmp_path)
    monitor.close()
    for role in (AclRole.CLIENT, AclRole.NODE):
        assert monitor.sent_by(user_of(role, TENANT)) == set(COMMANDS[role]) - ON_CLUSTER


def test_on_a_cluster_too(tmp_path: Path) -> None:
    with closing(RedisCluster()) as cluster:
        for server in cluster.nodes:
            add_users(server)
        monitor = Monitor(cluster.nodes)
        run_everything(cluster.url, cluster.nodes, monitor, tmp_path)
        monitor.close()
    for role in (AclRole.CLIENT, AclRole.NODE):
        # ASKING is for slots that move, SELECT for a db that a cluster does not have. MONITOR
        # does not show CLUSTER SLOTS, without which nothing above would have worked.
        needed = set(COMMANDS[role]) - {"asking", "select", "cluster|slots"}
        assert monitor.sent_by(user_of(role, TENANT)) == needed


def test_an_operator_can_run_every_command_that_looks(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_node(url_of(tcp(server), AclRole.NODE), tmp_path):
        where = ["--url", url_of(tcp(server), AclRole.OPERATOR), "--key-prefix", TENANT]
        where += ["--run-dir", str(tmp_path)]
        for words in (["stat"], ["ls"], ["explain", "--key", "k"]):
            assert main([*words, *where]) == 0, capsys.readouterr()
        assert main(["get", "absent", *where]) == 3
        findings = redis_check.look(Context(where[1], TENANT, tmp_path))
        assert Level.FAIL not in [finding.level for finding in findings]
        assert not any("allow this user" in (finding.do or "") for finding in findings)


def test_a_node_with_scripts_removes_its_records_by_one(server: RedisServer) -> None:
    rules = acl_rules(AclRole.NODE, TENANT, password_hash(PASSWORD), scripts=True).split()
    server.admin().execute_command("ACL", "SETUSER", "scripts", *rules)
    url = f"redis://scripts:{PASSWORD}@127.0.0.1:{server.port}"
    monitor = Monitor([server])
    with closing(open_index(url, key_prefix=TENANT, timeout_s=5, publish_timeout_s=5)) as index:
        index.publish(RECORDS)
        assert index.remove([*RECORDS[:2], KeyRecord(KEYS[2], b"another")]) == 2
        assert index.lookup(KEYS) == [None, None, RECORDS[2].record]
        index.remove(RECORDS)
        monitor.note_users()
    monitor.close()
    assert set(SCRIPTS) <= monitor.sent_by("scripts")
    assert not {f"+{name}" for name in TRANSACTIONS} & set(rules)


def test_a_node_lists_records_only_where_it_was_given_the_right_to(server: RedisServer) -> None:
    node = index_of(server, AclRole.NODE)
    node.publish(RECORDS)
    with pytest.raises(IndexUnavailableError, match=r"lacks a right.*scan"):
        node.scan((0, 0))
    rules = acl_rules(AclRole.NODE, TENANT, password_hash(PASSWORD), sweep=True).split()
    server.admin().execute_command("ACL", "SETUSER", "sweeps", *rules)
    url = f"redis://sweeps:{PASSWORD}@127.0.0.1:{server.port}"
    with closing(open_index(url, key_prefix=TENANT, timeout_s=5, publish_timeout_s=5)) as index:
        assert scanned(index) == dict(RECORDS)
        index.remove(RECORDS)
    node.close()


@pytest.mark.parametrize("role", [AclRole.CLIENT, AclRole.OPERATOR])
def test_nobody_but_nodes_is_given_scripts_or_a_list_of_keys(role: AclRole) -> None:
    assert acl_rules(role, TENANT, None, sweep=True) == acl_rules(role, TENANT, None)
    assert acl_rules(role, TENANT, None, scripts=True) == acl_rules(role, TENANT, None)


def refused(server: RedisServer, role: AclRole, *words: object) -> bool:
    """Whether the user lacks the right to send this."""
    user = redis.Redis(
        port=server.port, username=user_of(role, TENANT), password=PASSWORD, socket_timeout=10
    )
    with user:
        try:
            user.execute_command(*words)
        except redis.exceptions.ResponseError as e:
            # "not allowed": switched off in the server's configuration, for everybody.
            nopermission = isinstance(e, redis.exceptions.NoPermissionError)
            return nopermission or "NOPERM" in str(e) or "command not allowed" in str(e)
    return False


@pytest.mark.parametrize("role", list(AclRole))
def test_nobody_may_do_what_is_not_listed(server: RedisServer, role: AclRole) -> None:
    """Every command the server knows, but those that are listed and AUTH, which all may send."""
    known = arguments_of_every_command(server)
    listed = {*COMMANDS[role], "auth", "hello", "reset", "quit"}
    allowed = [
        name
        for name in sorted(known.keys() - listed)
        if not refused(server, role, *name.split("|"), *[f"{TENANT}:epoch"] * known[name])
    ]
    assert allowed == []


def arguments_of_every_command(server: RedisServer) -> dict[str, int]:
    """As many as each takes at least: its rights come before its sense. A command that has
    subcommands (since Redis 7) is none by itself: its rights are theirs, "client|kill"."""
    found = {}
    for name, about in server.admin().execute_command("COMMAND").items():
        parts = about.get("subcommands") or ()
        if not parts:
            found[str(name).lower()] = abs(about["arity"]) - 1
        for part in parts:
            found[part[0].decode().lower()] = abs(part[1]) - 2
    return found


def test_a_client_only_reads(server: RedisServer) -> None:
    """By the server's own word: no command that may change a key."""
    about = server.admin().execute_command("COMMAND")
    for name in COMMANDS[AclRole.CLIENT]:
        flags = about[name.partition("|")[0]]["flags"]
        assert "write" not in flags, name
    node, client = index_of(server, AclRole.NODE), index_of(server, AclRole.CLIENT)
    node.publish(RECORDS)
    for call in (
        lambda: client.publish([KeyRecord(key, b"forged") for key in KEYS]),
        lambda: client.remove(RECORDS),
        lambda: client.announce(1, b"forged", 60),
        lambda: client.withdraw(1),
        client.incarnation,
    ):
        with pytest.raises(IndexUnavailableError, match="lacks a right"):
            call()
    assert node.match(KEYS) == client.match(KEYS) == [b"record"] * 3
    node.remove(RECORDS)
    node.close()
    client.close()


@each("role", list(AclRole))
@each("prefix", [OTHER, NESTED])
def test_another_tenants_keys_are_out_of_reach(
    server: RedisServer, role: AclRole, prefix: str
) -> None:
    """Also those of one whose prefix begins with ours."""
    theirs = index_of(server, AclRole.NODE, prefix)
    theirs.publish(RECORDS)
    theirs.announce(1, b"here", 60)
    intruder = index_of(server, role, TENANT, prefix)
    for call in (
        lambda: intruder.match(KEYS),
        lambda: intruder.node(1),
        lambda: intruder.publish(RECORDS),
        lambda: intruder.remove(RECORDS),
        lambda: intruder.announce(1, b"forged", 60),
    ):
        with pytest.raises(IndexUnavailableError, match="lacks a right"):
            call()
    assert theirs.match(KEYS) == [b"record"] * 3
    theirs.remove(RECORDS)
    theirs.close()
    intruder.close()


def test_an_aclfile_is_what_redis_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "--key-prefix", TENANT, "--format", "file"]) == 0
    said = capsys.readouterr()
    with tempfile.NamedTemporaryFile("w", suffix=".acl") as file:
        file.write(said.out)
        file.flush()
        with RedisServer("--aclfile", file.name, port=free_port()) as server:
            user, password = said.err.splitlines()[1].split()
            index = open_index(
                f"redis://{user}:{password}@127.0.0.1:{server.port}", key_prefix=TENANT, timeout_s=5
            )
            assert index.match(KEYS) == []
            index.close()


def test_a_password_is_in_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "--key-prefix", TENANT]) == 0
    said = capsys.readouterr()
    passwords = [line.split()[1] for line in said.err.splitlines()[1:]]
    assert len(passwords) == len(AclRole)
    for password in passwords:
        assert password not in said.out
        assert password_hash(password) in said.out


def test_passwords_can_be_given_and_kept(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "passwords").write_text(f"client {PASSWORD}\n")
    wanted = ["acl", "--key-prefix", TENANT, "--role", "client"]
    assert main([*wanted, "--passwords", str(tmp_path / "passwords")]) == 0
    said = capsys.readouterr()
    assert password_hash(PASSWORD) in said.out
    assert said.err == ""
    assert main([*wanted, "--keep-passwords"]) == 0
    words = capsys.readouterr().out.replace('"', "").split()
    server.admin().execute_command(*words)
    index = index_of(server, AclRole.CLIENT)
    index.ping()
    index.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--key-prefix", "a b"], "key_prefix="),
        (["--user", "no space"], "user="),
        (["--passwords", "/nowhere"], "passwords="),
        (["--format", "file", "--keep-passwords"], "format="),
    ],
)
def test_wrong_words_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["acl", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_bad_password_line_is_named_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("s3cret-without-a-role", "client short-s3cret"):
        (tmp_path / "passwords").write_text(text)
        assert main(["acl", "--passwords", str(tmp_path / "passwords")]) == 2
        said = capsys.readouterr().err
        assert "line 1" in said
        assert "s3cret" not in said


def test_a_hash_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="64 lower-case hex digits"):
        acl_rules(AclRole.CLIENT, TENANT, PASSWORD)


@pytest.mark.parametrize("tail", [":epoch:1", ":epoch:1:x", ":epoch:9abc", ":x:epoch:0"])
def test_a_prefix_that_a_shorter_ones_patterns_reach_is_refused(tail: str) -> None:
    with pytest.raises(UsageError, match=r"^key_prefix=.*may write there"):
        acl_rules(AclRole.NODE, f"kv:alice{tail}", None)


@each("tail", ["", ":epoch", ":epoch:x", ":node", ":nodes", ":node:1", "2", ":b"])
def test_no_key_under_a_prefix_matches_a_pattern_of_another(tail: str) -> None:
    tenant, other = "kv:alice", f"kv:alice{tail or ':c'}"
    space = KeySpace(other)
    keys = [space.epoch_key, space.nodes_key, space.node_key(2**64 - 1), space.redis_key(bytes(32))]
    keys += [space.epoch_key + b":16383"]
    rules = acl_rules(AclRole.NODE, tenant, None)
    patterns = [word[1:] for word in rules.split() if word.startswith("~")]
    for key in keys:
        # Redis' own globs know no other wildcards than these patterns have.
        assert not [p for p in patterns if fnmatchcase(key.decode("latin-1"), p)], key
