from __future__ import annotations

import json
import os
import subprocess

import numpy
import pytest
from places import COMMAND, REPOSITORY, Place, clean_env

from kvstore import Client, Namespace
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
    assert store.here("put", "file", "-", stdin=b"other").stdout == b"exists\n"
    assert store.here("get", "file", "-o", str(target)).stdout == b""
    assert target.read_bytes() == VALUE


def test_nothing_comes_back_as_nothing(store: Place) -> None:
    assert store.here("put", "empty").returncode == 0
    got = store.here("get", "empty")
    assert (got.returncode, got.stdout) == (0, b"")


def test_namespaces_are_apart_and_a_miss_says_so(store: Place) -> None:
    assert store.here("put", "apart", "--namespace", "mine", stdin=b"1").returncode == 0
    got = store.here("get", "apart")
    assert (got.returncode, got.stdout, got.stderr) == (1, b"", b"kvstore: apart: miss\n")
    assert store.here("get", "apart", "--namespace", "mine").stdout == b"1"


def test_an_array_comes_back_as_its_bytes_and_a_note(store: Place, client: Client) -> None:
    array = numpy.arange(6, dtype="<f4").reshape(2, 3)
    assert client.put("array", array)
    got = store.here("get", "array")
    assert got.stdout == array.tobytes()
    note = b"kvstore: array: raw bytes of a numpy array, dtype <f4, shape (2, 3)\n"
    assert (got.returncode, got.stderr) == (0, note)


def test_what_is_too_large_is_refused_with_the_limit(store: Place) -> None:
    ran = store.here("put", "large", stdin=bytes((1 << 20) + 1))
    assert ran.returncode == 1
    assert b"large: not stored: size_bytes=1048577: must be 1 to 1048576" in ran.stderr


def test_a_file_that_is_not_there_is_told(store: Place) -> None:
    ran = store.here("put", "a", "/nonexistent")
    assert ran.returncode == 2
    assert (
        ran.stderr == b"kvstore: file='/nonexistent': cannot be read: No such file or directory\n"
    )


def test_ls_shows_the_blocks_of_this_host(store: Place, client: Client) -> None:
    namespace = Namespace.named("listed")
    for name in ("a", "b"):
        assert store.here("put", name, "--namespace", "listed", stdin=b"12345").returncode == 0
    rows = json.loads(store.here("ls", "--namespace", "listed", "--json").stdout)
    assert {row["key"] for row in rows} == {namespace.value_key(k).hex() for k in ("a", "b")}
    for row in rows:
        assert (row["size_bytes"], row["pins"], row["node"]) == (5, 0, "node-0")
        assert row["namespace_id"] == f"{namespace.id:08x}"
    some = store.kv("ls", "--namespace", "listed", "--limit", "1")
    head, line = some.stdout.decode().splitlines()
    assert head.split() == ["KEY", "BYTES", "NAMESPACE", "PINS", "NODE"]
    assert line.split()[1:] == ["5", f"{namespace.id:08x}", "0", "node-0"]
    assert some.stderr == b"kvstore: there are more; --limit is 1\n"


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
    assert found["index"]["lookup_misses"] == before["index"]["lookup_misses"] + 1
    head, row, *rest = store.kv("stat").stdout.decode().splitlines()
    assert head.split()[:4] == ["NODE", "HOST", "STATE", "SIZE"]
    assert row.split()[0] == "node-0"
    assert "on this host  16 MiB" in row
    assert any(line.startswith("key lookups") for line in rest)


def test_stat_of_one_node_asks_nobody_else(store: Place) -> None:
    away = ("--url", "redis://127.0.0.1:1")
    ran = store.kv("stat", "--node", "node-0", "--json", *away)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["capacity_bytes"] == 16 << 20
    head, row = store.kv("stat", "--node", "node-0", *away).stdout.decode().splitlines()
    assert dict(zip(head.split(), row.split(), strict=True))["capacity_bytes"] == str(16 << 20)
    other = store.kv("stat", "--node", "node-9")
    assert (other.returncode, other.stderr) == (1, b"kvstore: no node node-9 runs here\n")


def test_a_closed_pipe_is_no_traceback(store: Place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "stat", "--run-dir", str(store.run_dir)]
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=clean_env(), stdout=writer, stderr=subprocess.PIPE, timeout=30
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")
