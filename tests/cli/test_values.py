from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import numpy
import pytest
from each_input import each
from places import COMMAND, REPOSITORY, Place, clean_env, wait_until
from redis_servers import RedisServer
from stores import NodeThread

from kvstore import Client, Namespace
from kvstore.cli.commands import get, stat
from kvstore.cli.store import LIMITS

VALUE = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def client(store: Place):
    url = f"unix://{store.run_dir}/redis/redis.sock"
    with Client(url, run_dir=store.run_dir, limits=LIMITS) as client:
        yield client


def test_standard_input_comes_back_on_standard_output(store: Place) -> None:
    put = store.kv("put", "stdin", stdin=VALUE)
    assert (put.returncode, put.stdout, put.stderr) == (0, b"stored\n", b"")
    got = store.kv("get", "stdin")
    assert (got.returncode, got.stdout, got.stderr) == (0, VALUE, b"")


def test_a_file_comes_back_as_a_file_and_a_second_put_leaves_it(store: Place) -> None:
    source, target = store.run_dir / "in", store.run_dir / "out"
    source.write_bytes(VALUE)
    assert store.here("put", "file", str(source)).stdout == b"stored\n"
    assert store.here("put", "file", str(source)).stdout == b"exists\n"
    other = store.here("put", "file", "-", stdin=b"other")
    assert (other.returncode, other.stdout, b"another value" in other.stderr) == (1, b"", True)
    assert store.here("get", "file", "-o", str(target)).stdout == b""
    assert target.read_bytes() == VALUE
    assert store.here("put", "file", "-", "--replace", stdin=b"other").stdout == b"stored\n"
    assert store.here("get", "file").stdout == b"other"


def test_nothing_comes_back_as_nothing(store: Place) -> None:
    assert store.here("put", "empty").returncode == 0
    got = store.here("get", "empty")
    assert (got.returncode, got.stdout) == (0, b"")


def test_namespaces_are_apart_and_a_miss_says_so(store: Place) -> None:
    assert store.here("put", "apart", "--namespace", "mine", stdin=b"1").returncode == 0
    got = store.here("get", "apart")
    assert (got.returncode, got.stdout, got.stderr) == (3, b"", b"kvstore: apart: miss\n")
    assert store.here("get", "apart", "--namespace", "mine").stdout == b"1"


def test_an_array_comes_back_as_its_bytes_and_a_note(store: Place, client: Client) -> None:
    array = numpy.arange(6, dtype="<f4").reshape(2, 3)
    assert client.put("array", array)
    got = store.here("get", "array")
    assert got.stdout == array.tobytes()
    note = b"kvstore: array: raw bytes of a numpy array, dtype <f4, shape (2, 3)\n"
    assert (got.returncode, got.stderr) == (0, note)


def test_a_value_that_is_replaced_while_it_is_copied_is_a_miss(
    store: Place, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied may be of either, or of both."""
    assert client.put("torn", VALUE)

    def copied(buffer: memoryview) -> bytes:
        value = bytes(buffer)
        assert client.put("torn", b"another", replace=True)
        return value

    monkeypatch.setattr(get, "bytes", copied, raising=False)
    got = store.here("get", "torn")
    assert (got.returncode, got.stdout, got.stderr) == (3, b"", b"kvstore: torn: miss\n")
    monkeypatch.undo()
    assert store.here("get", "torn").stdout == b"another"


def test_what_is_too_large_is_refused_with_the_limit(store: Place) -> None:
    ran = store.here("put", "large", stdin=bytes((16 << 20) + 1))
    assert ran.returncode == 1
    assert b"large: not stored: size_bytes=16777217: must be 1 to 16777216" in ran.stderr


def test_a_file_that_is_not_there_is_told(store: Place) -> None:
    ran = store.here("put", "a", "/nonexistent")
    assert ran.returncode == 2
    assert (
        ran.stderr == b"kvstore: file='/nonexistent': cannot be read: No such file or directory\n"
    )


def test_a_miss_and_a_store_that_cannot_be_asked_have_their_own_exit_codes(store: Place) -> None:
    assert store.here("get", "nowhere").returncode == 3
    away = store.here("get", "nowhere", "--url", "redis://127.0.0.1:1")
    assert (away.returncode, b"miss" in away.stderr) == (1, False)
    for help_of in (("--help",), ("get", "--help")):
        assert "3" in store.kv(*help_of).stdout.decode().partition("Exit codes: ")[2]


def test_ls_shows_the_blocks_of_this_host(store: Place, client: Client) -> None:
    namespace = Namespace.named("listed")
    for name in ("a", "b"):
        assert store.here("put", name, "--namespace", "listed", stdin=b"12345").returncode == 0
    rows = json.loads(store.here("ls", "--namespace", "listed", "--json").stdout)
    assert {row["key"] for row in rows} == {namespace.value_key(k).hex() for k in ("a", "b")}
    for row in rows:
        assert (row["size_bytes"], row["pins"], row["node"]) == (5, 0, "node-0")
        assert row["namespace_id"] == f"{namespace.id:08x}"
        assert (row["namespace"], row["kind"]) == ({"name": "listed"}, "bytes")
        assert 0 <= row["idle_s"] <= row["age_s"] < 60
    assert sorted(row["name"] for row in rows) == ["a", "b"]
    some = store.kv("ls", "--namespace", "listed", "--limit", "1")
    head, line = some.stdout.decode().splitlines()
    assert head.split() == ["KEY", "KIND", "SIZE", "AGE", "USED", "NAMESPACE", "PINS", "NODE"]
    key, kind, *size, _, _, named, pins, node = line.split()
    assert key in ("a", "b")
    assert (kind, size, named, pins, node) == ("bytes", ["5", "B"], "listed", "0", "node-0")
    assert some.stderr == b"kvstore: there are more blocks than --limit 1: ask for more\n"


def test_ls_fits_80_columns_and_shows_keys_as_they_are_not_as_a_terminal_obeys(
    store: Place, client: Client
) -> None:
    namespace = f"long-{'n' * 60}"
    keys = ("k" * 200, "evil\x1b[31m\n")
    options = {"run_dir": store.run_dir, "namespace": namespace, "limits": LIMITS}
    with Client(client.session.url, **options) as writer:
        assert all(writer.put_many(dict.fromkeys(keys, b"1")))
        assert all(writer.put_blocks(range(512), [bytes(100), bytes(100)]))
    lines = store.kv("ls", "--namespace", namespace).stdout.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 5
    (evil,) = [line for line in lines if line.startswith("evil")]
    assert evil.startswith(r"evil\x1b[31m\n")
    rows = json.loads(store.here("ls", "--namespace", namespace, "--json").stdout)
    assert {row["name"] for row in rows} == {*keys, None}
    assert sorted(row["kind"] for row in rows) == ["block", "block", "bytes", "bytes"]


def test_ls_says_what_a_restarted_node_does_not_know(place: Place) -> None:
    with RedisServer() as redis:
        node = place.node("--url", redis.url)
        options = {"run_dir": place.run_dir, "limits": LIMITS}
        with Client(redis.url, **options) as client:
            assert client.put("k", b"1")
        node.end(signal.SIGKILL)
        place.node("--url", redis.url)
        (row,) = json.loads(place.here("ls", "--json").stdout)
        assert (row["name"], row["age_s"], row["idle_s"], row["namespace"]) == (None,) * 4
        line = place.here("ls").stdout.decode().splitlines()[1]
        assert line.split()[0].removesuffix("…") in row["key"]
        with Client(redis.url, **options) as client:  # whoever puts it again says so again
            assert client.put("k", b"1")
        (row,) = json.loads(place.here("ls", "--json").stdout)
        assert (row["name"], row["namespace"]) == ("k", {"name": "default"})
        assert (row["age_s"], row["idle_s"] < 60) == (None, True)


def test_ls_shows_pins(store: Place, client: Client) -> None:
    assert client.put("pinned", b"1")
    with client.pin("pinned"):
        rows = json.loads(store.here("ls", "--json").stdout)
    key = client.namespace.value_key("pinned").hex()
    assert [row["pins"] for row in rows if row["key"] == key] == [1]


def test_stat_tells_of_nodes_totals_and_lookups(store: Place, client: Client) -> None:
    before = json.loads(store.here("stat", "--json").stdout)
    assert client.put("counted", bytes(1000))
    assert client.get("counted") is not None
    assert client.get("not there") is None
    found = json.loads(store.here("stat", "--json").stdout)
    (node,) = found["nodes"]
    assert (node["name"], node["local"], node["announced"]) == ("node-0", True, True)
    assert node["capacity_bytes"] == 16 << 20
    totals, old = found["local_totals"], before["local_totals"]
    assert totals["blocks"] == node["stats"]["blocks"] == old["blocks"] + 1
    assert totals["block_bytes"] == old["block_bytes"] + 1000
    assert totals["stored"] == old["stored"] + 1
    assert found["index"]["lookup_hits"] > before["index"]["lookup_hits"]
    # Redis counts misses of whoever asks, the node among them.
    assert found["index"]["lookup_misses"] > before["index"]["lookup_misses"]
    lines = store.kv("stat").stdout.decode().splitlines()
    head, row, _, counted, counts, *rest = lines
    assert head.split() == ["NODE", "HOST", "STATE", "SIZE", "USED"]
    assert row.split()[0] == "node-0"
    assert "on this host  16 MiB" in row
    told = dict(zip(counted.split(), counts.split(), strict=True))
    assert told["BLOCKS"] == str(node["stats"]["blocks"])
    assert any(line.startswith("key lookups") for line in rest)
    assert max(map(len, lines)) <= 80


def test_stat_fits_80_columns_whatever_nodes_and_hosts_are_called() -> None:
    numbers = dict.fromkeys((*stat.SUMMED, "recovered", "recovery_dropped"), 10**9)
    node = {
        "name": "n" * 32,
        "host": "h" * 60,
        "local": True,
        "announced": False,
        "error": "",
        "capacity_bytes": 1023 << 30,
        "stats": {**numbers, "quarantined": 10**6},
    }
    index = {"redis": "redis://r:6379", "key_prefix": "kv:x", "error": "away"}
    nodes = [node, {**node, "name": "m"}]
    found = {"index": index, "nodes": nodes, "local_totals": numbers, "other_versions": []}
    lines = stat._text(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("nnn") and "…" in line for line in lines)


def test_stat_tells_what_nodes_of_other_hosts_hold_as_of_their_heartbeat(place: Place) -> None:
    with RedisServer() as redis, NodeThread(redis, size_bytes=8 << 20) as away:
        with Client(**away.client_options) as client:
            assert client.put("k", bytes(10_000))
        command = ("stat", "--url", redis.url, "--key-prefix", f"kv:{away.run_dir.name}")

        def heard() -> dict[str, Any]:
            (node,) = json.loads(place.here(*command, "--json").stdout)["nodes"]
            return node

        wait_until(lambda: (heard()["stats"] or {}).get("blocks") == 1, "a heartbeat says it")
        assert (heard()["local"], heard()["stats"]["stored"]) == (False, 1)
        lines = place.here(*command).stdout.decode().splitlines()
    assert dict(zip(lines[3].split(), lines[4].split(), strict=True))["STORED"] == "1"
    assert "elsewhere  8 MiB" in lines[1]


def test_stat_of_one_node_asks_nobody_else(store: Place) -> None:
    away = ("--url", "redis://127.0.0.1:1")
    ran = store.kv("stat", "--node", "node-0", "--json", *away)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["capacity_bytes"] == 16 << 20
    lines = store.kv("stat", "--node", "node-0", *away).stdout.decode().splitlines()
    assert dict(line.split() for line in lines)["capacity_bytes"] == str(16 << 20)
    other = store.kv("stat", "--node", "node-9")
    assert other.returncode == 1
    assert other.stderr.startswith(b"kvstore: no node node-9 runs here: `kvstore stat` lists")


def test_a_closed_pipe_is_no_traceback(store: Place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "stat", "--run-dir", str(store.run_dir)]
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=clean_env(), stdout=writer, stderr=subprocess.PIPE, timeout=30
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


@each(
    ("command", "redirected", "said"),
    [
        (("get", "closed"), ">&-", "output='-': standard output is closed: give -o FILE"),
        (("put", "closed"), "<&-", "file='-': standard input is closed: name a file"),
        (("explain", "--tokens", "-"), "<&-", "tokens='-': standard input is closed: name a file"),
        (("acl", "--passwords", "-"), "<&-", "passwords='-': standard input is closed: name a"),
        (("get", "closed"), ">/dev/full", "[Errno 28] No space left on device"),
        (("stat",), ">/dev/full", "[Errno 28] No space left on device"),
        (("ls",), ">/dev/full", "[Errno 28] No space left on device"),
        (("config",), ">/dev/full", "[Errno 28] No space left on device"),
    ],
)
def test_a_stream_that_is_full_or_closed_is_told_in_one_line(
    store: Place, command: tuple[str, ...], redirected: str, said: str
) -> None:
    assert store.here("put", "closed", stdin=VALUE).returncode == 0
    env = clean_env(KVSTORE_RUN_DIR=str(store.run_dir))
    shell = ["sh", "-c", f'exec "$@" {redirected}', "sh", *COMMAND, *command]
    done = subprocess.run(shell, env=env, cwd=REPOSITORY, stderr=subprocess.PIPE, check=False)
    lines = done.stderr.decode().splitlines()
    assert done.returncode in (1, 2)
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"kvstore: {said}")


def test_ls_shows_every_key_in_a_locale_that_lacks_its_letters(store: Place) -> None:
    with Client(run_dir=store.run_dir, namespace="letters") as client:
        assert client.put("gr\u00fc\u00dfe \u4f60", b"x")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = store.kv("ls", "--namespace", "letters", env=ascii_only)
    assert ran.returncode == 0, ran.stderr
    assert b"gr\\xfc\\xdfe \\u4f60" in ran.stdout
