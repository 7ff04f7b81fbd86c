from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

import pytest
from each_input import each
from places import Place  # noqa: TC002  # as in every other test

import kvstore
from kvstore.cli import main
from kvstore.cli.options import size_bytes
from kvstore.cli.output import human_bytes, table
from kvstore.index.embedded_redis.server import find_server


@each(
    ("text", "count"),
    [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("4096", 4096), ("1.5k", 1536), ("2 tb", 2 << 40)],
)
def test_sizes_are_read_as_powers_of_two(text: str, count: int) -> None:
    assert size_bytes(text) == count


@each("text", ["", "GiB", "-1", "1XB", "1ib", "1 GiB 2", "nan", "9" * 400])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as 1GiB"):
        size_bytes(text)


def test_sizes_are_written_with_about_three_digits() -> None:
    sizes = (0, 512, 1536, 1 << 20, 123456789, 5 << 60)
    shown = ["0 B", "512 B", "1.5 KiB", "1 MiB", "118 MiB", "5120 PiB"]
    assert [human_bytes(size) for size in sizes] == shown


def test_tables_are_aligned() -> None:
    assert table(("A", "B"), [("xx", 1), ("y", 22)]) == "A    B\nxx   1\ny   22"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["node", "--size", "3x"], "argument --size: '3x' is not a size such as 1GiB"),
        (["node", "--policy", "none"], "argument --policy: invalid choice"),
        (["ls", "--limit", "0"], "argument --limit: '0' is not a number from 1"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "required: COMMAND"),
    ],
)
def test_a_wrong_argument_is_named(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@each(
    ("args", "field"),
    [
        (["node", "--size", "1KiB"], "node.size='1024': is 1024 bytes: must be 64 KiB to "),
        (["node", "--size", "12"], "node.size='12': is 12 bytes: must be 64 KiB to "),
        (["node", "--listen", "7777"], "listen='7777': must be HOST:PORT, [V6]:PORT or :PORT"),
        (["node", "--advertise", "a"], "node.advertise='a': is for a node that serves other hosts"),
        (["node", "--vram", "1GiB", "--size", "1GiB"], "node.size='1073741824'"),
        (["node", "--name", "../x", "--url", "redis://127.0.0.1:1"], "name='../x'"),
        (["node", "--url", "http://x"], "url='http://x'"),
        (["up", "--url", "http://u:p@x"], "url='http://x'"),
        (["up", "--nodes", "65"], "nodes=65"),
        (["put", "k", "/dev/null", "--url", "redis://x:0"], "url='redis://x:0'"),
        (["get", "", "--url", "redis://127.0.0.1:1"], "Redis at 127.0.0.1:1"),
        (["stat", "--url", "nothing"], "url='nothing'"),
        (["ls", "--url", "p4ss@x"], "url='(no scheme)'"),
    ],
)
def test_a_wrong_value_is_one_line_on_standard_error(
    args: list[str],
    field: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*args, "--run-dir", str(place.run_dir)]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvstore: {field}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("args", [["put", "k", "/dev/null"], ["get", "k"], ["stat"]])
def test_commands_that_look_start_no_store(
    args: list[str], place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, "--run-dir", str(place.run_dir)]) == 1
    assert "no store runs here: start one with `kvstore up`" in capsys.readouterr().err
    assert place.files() == []


def test_without_a_node_ls_says_how_to_start_one(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", "--run-dir", str(place.run_dir)]) == 1
    said = "kvstore: no memory node on this host: `kvstore up` starts one\n"
    assert capsys.readouterr().err == said


def test_stat_without_redis_still_tells_of_local_nodes(place: Place) -> None:
    store = ("--url", "redis://127.0.0.1:1")
    place.serving("node", *store)
    ran = place.kv("stat", *store)
    assert ran.returncode == 1
    assert b"not in the index" in ran.stdout
    assert ran.stderr.startswith(b"kvstore: Redis at 127.0.0.1:1: ")


def test_stat_says_the_servers_own_name_and_version(store: Place) -> None:
    server = find_server()
    printed = subprocess.run([server.path, "--version"], capture_output=True, text=True, check=True)
    name, version = re.search(r"(Redis|Valkey) server v=([\d.]+)", printed.stdout).groups()
    assert store.kv("stat").stdout.decode().endswith(f"{name} {version}\n")
    found = json.loads(store.kv("stat", "--json").stdout)
    assert found["index"]["version"] == f"{name} {version}"


def test_python_m_kvstore_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, f"kvstore {kvstore.__version__}\n")


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_on_another_system_than_linux_one_sentence_says_so(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import kvstore"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *_, said = ran.stderr.splitlines()
    assert said == (
        f"ImportError: kvstore runs on Linux alone, and this is {platform}: use a Linux host"
    )
