"""Real nodes and clients on hosts of their own (network namespaces): over TCP, cut, paused, back.

What every test claims beside its name: no byte is wrong, no call takes longer than its
deadlines, and what was broken heals by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
from redis_servers import wait_until

from kvstore.testing.hosts import SWITCH, Hosts, why_not
from kvstore.testing.stopping import stop

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TIMEOUT_S = 1.0
"""Of Redis and of a read from another host, each."""
HANG_S = 15.0
"""A call may ask Redis, its sentinel of a node, and two nodes; and the machine is busy."""
AT_ONCE_S = 0.2
"""What a call takes (median) while the way is known to be down, on a busy machine."""
HEALED_S = 30.0

WORKER = """
import json, sys, time
from hashlib import blake2b
from kvstore import Client, Limits
def content(i, size):
    return (blake2b(str(i).encode(), digest_size=32).digest() * (size // 32 + 1))[:size]
timeout_s = float(sys.argv[1])
client = Client(limits=Limits(redis_timeout_s=timeout_s, stream_timeout_s=timeout_s,
                              request_timeout_s=10))
for line in sys.stdin:
    op, start, stop, size = json.loads(line)
    begun = time.monotonic()
    if op == "put":
        answer = [client.put(f"k{i}", content(i, size)).status for i in range(start, stop)]
        answer = sum(status in ("stored", "exists") for status in answer)
    elif op == "get":
        got = client.get_many([f"k{i}" for i in range(start, stop)])
        wrong = [i for i, v in zip(range(start, stop), got)
                 if v is not None and v != content(i, size)]
        answer = "WRONG" if wrong else sum(v is not None for v in got)
    elif op == "each":
        answer = []
        for i in range(start, stop):
            at = time.monotonic()
            value = client.get(f"k{i}")
            assert value in (None, content(i, size)), i
            answer.append(time.monotonic() - at)
    else:
        answer = client.stats()["transports"]
    print(json.dumps([answer, time.monotonic() - begun]), flush=True)
"""


class HostClient:
    """A client in a process on one host."""

    def __init__(self, hosts: Hosts, places: cluster.Places, host: str) -> None:
        self._process = hosts.popen(
            host,
            [sys.executable, "-c", WORKER, str(TIMEOUT_S)],
            env=places.environment(hosts, host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, op: str, start: int = 0, stop: int = 0, size: int = 100_000) -> Any:
        """The answer; fails when it took longer than any deadline allows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([op, start, stop, size]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait(10)}"
        answer, took_s = json.loads(line)
        assert answer != "WRONG"
        assert took_s < HANG_S * max(1, (stop - start) // 20 if op != "get" else 1)
        return answer

    def put(self, start: int, stop: int, size: int = 100_000) -> int:
        return int(self.call("put", start, stop, size))

    def get(self, start: int, stop: int, size: int = 100_000) -> int:
        """How many are hits."""
        return int(self.call("get", start, stop, size))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Apart:
    """Hosts a and b with a node each, c without one, Redis on the switch."""

    def __init__(self, root: Path) -> None:
        self.hosts = Hosts(3)
        self.places = cluster.Places(f"test-{os.getpid()}", root)
        self.hosts.start()
        try:
            self.redis = cluster.start_redis(self.hosts, self.places)
            self.nodes = {host: self.start_node(host) for host in ("a", "b")}
            self.clients = {h: HostClient(self.hosts, self.places, h) for h in self.hosts.names}
        except BaseException:
            self.hosts.close()
            raise

    def start_node(self, host: str) -> cluster.Service:
        node = cluster.start_node(self.hosts, self.places, host, "64MiB")
        cluster.wait_ready(node)
        return node

    def healed(self, host: str, start: int, stop: int) -> None:
        wait_until(
            lambda: self.clients[host].get(start, stop) == stop - start, "the way back", HEALED_S
        )

    def close(self) -> None:
        for host in self.hosts.names:
            self.hosts.resume(host)
        for client in self.clients.values():
            client.close()
        cluster.stop([self.redis, *self.nodes.values()])
        self.hosts.close()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    made = Apart(tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


NEXT = iter(range(0, 1_000_000, 1000))


@pytest.mark.parametrize("size", [1, 5_000, 300_000, 4 << 20])
def test_what_one_host_saves_the_others_read_over_tcp(apart, size):
    first = next(NEXT)
    count = 3 if size > MIB else 20
    assert apart.clients["a"].put(first, first + count, size) == count
    assert apart.clients["b"].get(first, first + count, size) == count
    assert apart.clients["c"].get(first, first + count, size) == count
    assert apart.clients["b"].call("stats")["stream_hits"] >= count


MIB = 1 << 20


def test_a_host_without_a_node_saves_to_another_ones(apart):
    first = next(NEXT)
    assert apart.clients["c"].put(first, first + 20) == 20
    assert apart.clients["a"].get(first, first + 20) == 20
    assert apart.clients["b"].get(first, first + 20) == 20


def test_the_command_line_gets_what_another_host_saved(apart, tmp_path):
    value = tmp_path / "value"
    value.write_bytes(os.urandom(100_000))

    def kv(host: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "kvstore.cli", *arguments]
        return subprocess.run(
            apart.hosts.command(host, command),
            env=apart.places.environment(apart.hosts, host),
            capture_output=True,
            timeout=60,
        )

    for host, key, others in (("a", "of a", "bc"), ("c", "of c, which has no node", "a")):
        assert kv(host, "put", key, str(value)).stdout.strip() == b"stored"
        for other in others:
            assert kv(other, "get", key).stdout == value.read_bytes()


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "requests only"])
def test_a_partition_costs_a_deadline_then_misses_at_once_and_heals(apart, one_way):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 40) == 40
    apart.hosts.cut("b", "a", one_way=one_way)
    try:
        assert apart.clients["b"].get(first, first + 20) == 0
        waits = sorted(apart.clients["b"].call("each", first + 20, first + 40))
        assert waits[len(waits) // 2] < AT_ONCE_S
        assert apart.clients["c"].get(first, first + 20) == 20, "others are not concerned"
    finally:
        apart.hosts.join("b", "a")
    apart.healed("b", first, first + 40)


def test_answers_that_get_lost_cost_a_deadline_then_misses_at_once_and_heal(apart):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 40) == 40
    assert apart.clients["b"].get(first, first + 1) == 1  # connected
    apart.hosts.cut("a", "b", one_way=True)
    try:
        assert apart.clients["b"].get(first + 1, first + 20) == 0
        waits = sorted(apart.clients["b"].call("each", first + 20, first + 40))
        assert waits[len(waits) // 2] < AT_ONCE_S
    finally:
        apart.hosts.join("a", "b")
    apart.healed("b", first, first + 40)


def test_a_paused_host_costs_a_deadline_then_misses_at_once_and_heals(apart):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 40) == 40
    stop(apart.nodes["a"].pid)
    try:
        assert apart.clients["b"].get(first, first + 20) == 0
        waits = sorted(apart.clients["b"].call("each", first + 20, first + 40))
        assert waits[len(waits) // 2] < AT_ONCE_S
        assert apart.clients["b"].put(first + 40, first + 45) == 5, "its own node is there"
    finally:
        apart.nodes["a"].send(signal.SIGCONT)
    apart.healed("b", first, first + 45)


def test_a_host_cut_off_from_all_serves_itself_and_comes_back(apart):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 20) == 20
    with apart.hosts.isolated("a"):
        assert apart.clients["b"].get(first, first + 20) == 0
        assert apart.clients["a"].get(first, first + 20) == 20
        assert apart.clients["a"].put(first + 20, first + 25) == 5
    apart.healed("b", first, first + 25)


def test_redis_cut_off_from_one_host_concerns_no_other(apart):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 20) == 20
    apart.hosts.cut("b", SWITCH)
    try:
        assert apart.clients["b"].get(first, first + 20) == 0
        assert apart.clients["c"].get(first, first + 20) == 20
        assert apart.clients["b"].put(first + 20, first + 25) == 5, "told to Redis later"
        assert apart.clients["b"].get(first + 20, first + 25) == 5
    finally:
        apart.hosts.join("b", SWITCH)
    apart.healed("b", first, first + 20)
    apart.healed("c", first + 20, first + 25)


def test_a_host_whose_node_was_killed_is_misses_and_serves_again_when_it_is_back(apart):
    first = next(NEXT)
    assert apart.clients["a"].put(first, first + 20) == 20
    assert apart.clients["b"].get(first, first + 10) == 10
    apart.nodes["a"].end(signal.SIGKILL)
    assert apart.clients["b"].get(first, first + 20) == 0
    apart.nodes["a"] = apart.start_node("a")
    assert apart.clients["a"].put(first, first + 20) == 20
    apart.healed("b", first, first + 20)
