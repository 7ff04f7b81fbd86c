"""Two tenants on one host and one Redis: neither reads, evicts or forges what is the other's.

Each has a user of the machine, a key prefix, users in Redis and a node of its own, whose
size is its quota (docs/decisions/0020).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from other_users import ALICE, BOB, NodeOf, needs_root, run_as
from redis_servers import RedisServer, free_port

from kvstore.index.redis.acl import AclRole, acl_rules, password_hash

PASSWORD = "a-password-of-some-length"
pytestmark = needs_root


class Tenant(NamedTuple):
    uid: int
    key_prefix: str
    run_dir: Path
    client_url: str
    node: NodeOf

    @property
    def where(self) -> tuple[str, str, str]:
        return self.client_url, self.key_prefix, str(self.run_dir)

    def files(self) -> list[str]:
        word = self.node.directory.announcement()
        assert word is not None
        return [word.data_path, word.head_path, str(self.node.directory.socket)]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
def tenants(server: RedisServer) -> Iterator[tuple[Tenant, Tenant]]:
    alice, bob = _start(server, ALICE, "kv:alice"), _start(server, BOB, "kv:bob")
    with alice.node, bob.node:
        yield alice, bob
    for tenant in (alice, bob):
        shutil.rmtree(tenant.run_dir, ignore_errors=True)


def _start(server: RedisServer, uid: int, key_prefix: str) -> Tenant:
    urls = {}
    for role in AclRole:
        user = f"{key_prefix}-{role}"
        rules = acl_rules(role, key_prefix, password_hash(PASSWORD)).split()
        server.admin().execute_command("ACL", "SETUSER", user, *rules)
        quoted = user.replace(":", "%3A")
        urls[role] = f"redis://{quoted}:{PASSWORD}@127.0.0.1:{server.port}"
    run_dir = Path(tempfile.mkdtemp(prefix="kvn-"))
    options = ["--url", urls[AclRole.NODE], "--key-prefix", key_prefix]
    node = NodeOf(uid, run_dir, *options, "--size", "4MiB")
    return Tenant(uid, key_prefix, run_dir, urls[AclRole.CLIENT], node)


SAVE = """
url, prefix, run_dir, count = args
with Client(url, key_prefix=prefix, run_dir=run_dir, limits=PATIENT) as client:
    stored = [bool(client.put(f"k{i}", bytes([i % 256]) * 50_000)) for i in range(count)]
    print(json.dumps([all(stored), client.stats()["node"]["evicted"]]))
"""
LOAD = """
url, prefix, run_dir, count = args
with Client(url, key_prefix=prefix, run_dir=run_dir, limits=PATIENT) as client:
    hits = sum(client.get(f"k{i}") == bytes([i % 256]) * 50_000 for i in range(count))
    print(json.dumps([hits, client.stats()["node"]["evicted"], client.stats()["missed"]]))
"""
INTRUDE = """
own_url, own_run_dir, prefix, run_dir, *files = args
index = open_index(own_url, key_prefix=prefix, timeout_s=5, publish_timeout_s=5)
key = Namespace.named("default").value_key("k1")
def client_of(run_dir, prefix):
    return Client(own_url, key_prefix=prefix, run_dir=run_dir, limits=PATIENT)
with client_of(own_run_dir, prefix) as client:
    print(json.dumps({
        "redis": [
            raised(lambda: index.match([key])),
            raised(lambda: index.publish([KeyRecord(key, bytes(44))])),
            raised(lambda: index.remove([KeyRecord(key, bytes(44))])),
            raised(lambda: index.nodes()),
        ],
        "files": [raised(lambda: os.open(path, os.O_RDONLY)) for path in files],
        "socket": raised(lambda: socket.socket(socket.AF_UNIX).connect(files[-1])),
        "run_dir": raised(lambda: client_of(run_dir, prefix)),
        "get": client.get("k1"),
        "put": str(client.put("k1", b"forged")),
    }))
"""


def test_a_tenant_that_fills_its_node_evicts_nothing_of_another(
    tenants: tuple[Tenant, Tenant],
) -> None:
    alice, bob = tenants
    assert run_as(alice.uid, SAVE, *alice.where, 20) == [True, 0]
    stored, evicted = run_as(bob.uid, SAVE, *bob.where, 300)
    assert stored
    assert evicted > 100
    assert run_as(alice.uid, LOAD, *alice.where, 20) == [20, 0, {}]


def test_a_tenant_reaches_nothing_of_another(tenants: tuple[Tenant, Tenant]) -> None:
    alice, bob = tenants
    assert run_as(alice.uid, SAVE, *alice.where, 5) == [True, 0]
    own = (bob.client_url, str(bob.run_dir))
    did = run_as(bob.uid, INTRUDE, *own, alice.key_prefix, str(alice.run_dir), *alice.files())
    assert [said for said in did["redis"] if "lacks a right" not in said] == []
    refused = [*did["files"], did["socket"]]
    assert [said for said in refused if not said.startswith("PermissionError")] == []
    assert "must belong to user" in did["run_dir"]
    assert did["get"] is None
    assert "no memory node" in did["put"]
    assert run_as(alice.uid, LOAD, *alice.where, 5) == [5, 0, {}]
