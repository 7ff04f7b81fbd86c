"""Another user of this host is another host: two real users, and what each is told."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from other_users import ALICE, BOB, READERS, NodeOf, needs_root, run_as
from redis_servers import RedisServer, free_port

pytestmark = needs_root
PREFIX = "kv:users"
SECRET = "of Bob and of his friends"
LISTEN = ["--listen", "127.0.0.1:0"]

WORDS = """
import time
from kvstore.transport.stream.security import StreamSecurity
TOKENS = list(range(1024))
BLOCKS = [bytes([i]) * 5000 for i in range(4)]
def client_of(url, run_dir, secret, transports=None):
    security = StreamSecurity(secret=secret.encode() if secret else None)
    return Client(url, key_prefix="kv:users", run_dir=run_dir, limits=PATIENT, security=security,
                  transports=transports)
"""
SAVE = """
url, run_dir, secret = args
with client_of(url, run_dir, secret) as client:
    stored = [client.put("k", b"v" * 1000), *client.put_blocks(TOKENS, BLOCKS)]
    print(json.dumps([all(stored), client.stats()["transports"]["shm_hits"]]))
"""
READ = """
url, run_dir, secret, transports = args
with client_of(url, run_dir, secret, transports) as client:
    give_up_at = time.monotonic() + 10
    while client.match_prefix(TOKENS).blocks and client.get("k") is None:
        assert time.monotonic() < give_up_at  # the cause is learned by a probe beside
        time.sleep(0.05)
    keys = client.namespace.block_keys(TOKENS, 256)
    outs = [bytearray(5000) for _ in BLOCKS]
    got = client.get("k")
    print(json.dumps({
        "get": None if got is None else len(got),
        "blocks": client.get_blocks(TOKENS, outs),
        "match": [len(client.session.match(keys)), client.session.match(keys).short],
        "lookup": client.session.lookup(keys).short,
        "explain": str(client.explain(TOKENS).first_missing),
        "explain_key": str(client.explain_key("k").first_missing),
        "health": [bool(client.health()), str(client.health())],
        "pin": raised(lambda: client.pin("k")),
        "put": [bool(client.put("other", b"w")), client.put("other", b"w").reason],
        "missed": client.stats()["missed"],
        "transports": client.stats()["transports"],
        "mappings": len(client.session.mappings()),
        "maps": Path("/proc/self/maps").read_text(),
    }))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@contextmanager
def bobs_node(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, *options: str, secret: str = ""
) -> Iterator[tuple[str, str]]:
    """The URL of Redis, and the run directory of a node that has some values."""
    run_dir, url = Path(tempfile.mkdtemp(prefix="kvn-")), f"redis://127.0.0.1:{server.port}"
    server.admin().flushall()
    words = ["--url", url, "--key-prefix", PREFIX, "--size", "16MiB", "--group", str(READERS)]
    with monkeypatch.context() as environment:
        environment.delenv("KVSTORE_SECRET", raising=False)
        if secret:
            environment.setenv("KVSTORE_SECRET", secret)
        node = NodeOf(BOB, run_dir, *words, *options, groups=[READERS])
    with node:
        saved = run_as(BOB, WORDS + SAVE, url, str(run_dir), secret, groups=[READERS])
        assert saved == [True, 0]
        yield url, str(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)


def read_as(uid: int, where: tuple[str, str], secret: str, transports: Any = None) -> Any:
    words = (*where, secret, transports)
    did = run_as(uid, WORDS + READ, *words, groups=[READERS])
    assert f"kvstore-{BOB}" not in did.pop("maps")
    assert did["mappings"] == did["transports"]["shm_hits"] == 0
    return did


def assert_nothing_is_found(did: Any, reason: str, remedy: str) -> None:
    """The same is said in every way."""
    assert (did["get"], did["blocks"]) == (None, 0)
    assert (did["match"], did["lookup"]) == ([0, reason], reason)
    assert set(did["missed"]) == {reason}
    for name in ("explain", "explain_key"):
        assert did[name].startswith(f"{reason}: "), did[name]
        assert remedy in did[name]
    assert not did["health"][0]
    stored, why = did["put"]
    assert not stored
    assert reason in why
    assert remedy in why


def test_who_knows_the_secret_reads_and_saves_by_the_stream_as_from_another_host(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bobs_node(server, monkeypatch, *LISTEN, secret=SECRET) as where:
        for uid in (ALICE, 0):
            did = read_as(uid, where, SECRET)
            assert (did["get"], did["blocks"], did["match"][0]) == (1000, 4, 4)
            assert did["transports"]["stream_hits"] >= 5
            assert did["explain"] == did["explain_key"] == "None"
            assert did["health"][0]
            assert did["put"][0]
            assert "only `get` reaches it from here" in did["pin"]


LACKS: dict[str, tuple[list[str], str, str, Any, str]] = {
    "no listener": ([], "", SECRET, None, "--listen"),
    "no secret": (LISTEN, SECRET, "", None, "KVSTORE_SECRET"),
    "no stream": (LISTEN, SECRET, SECRET, ["shm"], "KVSTORE_TRANSPORTS"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_stream_lacks_is_a_reason_of_its_own_with_the_remedy(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    options, secret, its, transports, remedy = LACKS[lack]
    with bobs_node(server, monkeypatch, *options, secret=secret) as where:
        for uid in (ALICE, 0) if lack == "no listener" else (ALICE,):
            did = read_as(uid, where, its, transports)
            assert_nothing_is_found(did, "other-user", remedy)
            assert "other-user" in did["health"][1]
            assert "other-user" in did["pin"]


def test_another_secret_is_told_as_from_another_host(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bobs_node(server, monkeypatch, *LISTEN, secret=SECRET) as where:
        did = read_as(ALICE, where, "another one altogether")
    assert did["match"][1] == did["lookup"] == "unreadable-secret"
    assert "unreadable-secret" in did["put"][1]


def test_without_redis_nothing_of_another_user_is_found_and_it_is_said(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bobs_node(server, monkeypatch, *LISTEN, secret=SECRET) as (_, run_dir):
        did = read_as(ALICE, ("redis://127.0.0.1:1", run_dir), SECRET)
        assert_nothing_is_found(did, "other-user", "KVSTORE_URL")
        none = run_as(
            ALICE,
            WORDS + "print(json.dumps(raised(lambda: client_of(None, *args))))",
            *(run_dir, SECRET),
            groups=[READERS],
        )
        assert none.startswith("UsageError: KVSTORE_URL=None: other-user: ")


def test_who_does_not_share_the_run_directory_is_told_the_same(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is known by the index alone."""
    own = Path(tempfile.mkdtemp(prefix="kva-"))
    own.chmod(0o700)
    shutil.chown(own, ALICE, ALICE)
    with bobs_node(server, monkeypatch) as (url, _):
        did = read_as(ALICE, (url, str(own)), SECRET)
        assert_nothing_is_found(did, "other-user", "--listen")
    shutil.rmtree(own)


LOOK = """
from contextlib import redirect_stderr, redirect_stdout
import io
from kvstore.cli.checks import reach
from kvstore.cli.checks.base import Context
import kvstore.cli.commands.stat, kvstore.cli.commands.ls, kvstore.cli.commands.explain
url, run_dir = args
def said(*words):
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = main([*words, "--url", url, "--key-prefix", "kv:users", "--run-dir", run_dir])
    return [code, out.getvalue()]
(found,) = reach.look(Context(url, "kv:users", Path(run_dir)))
print(json.dumps({
    "stat": said("stat"), "one": said("stat", "--node", "node"), "ls": said("ls"),
    "explain": said("explain", "--key", "absent"), "doctor": [found.level.name, found.found],
}))
"""


def test_commands_of_root_and_of_the_group_ask_the_node_by_its_control_socket(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bobs_node(server, monkeypatch) as where:
        for uid in (ALICE, 0):
            did = run_as(uid, LOOK, *where, groups=[READERS])
            assert [did[name][0] for name in ("stat", "one", "ls", "explain")] == [0] * 4, did
            assert "other-user" in did["stat"][1]
            assert "stored" in did["one"][1]
            assert did["ls"][1].count("\n") == 6
            assert "never-stored" in did["explain"][1]
            level, found = did["doctor"]
            assert level == "WARN"
            assert "other-user" in found
