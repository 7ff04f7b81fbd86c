"""`kvstore top`: what a screen says, and a real one, in a terminal, of nodes of which one dies."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from stores import MIB, NodeProcess, announcement

from kvstore import Client
from kvstore.cli.commands.top import COLUMNS, TICK_S, Line, render
from kvstore.node.page.watch import Watch
from kvstore.nodedir import Announcement
from kvstore.spi import BlockSession

if TYPE_CHECKING:
    from redis_servers import RedisServer

NOW, WALL = 1000.0, 1_700_000_000.0
GIB = 1 << 30


def node(number: int, **changes: object) -> Announcement:
    fields = {
        "node_id": number,
        "name": f"node-{number}",
        "host": f"host-{number // 2}",
        "size_bytes": 64 * GIB,
        "free_bytes": 16 * GIB,
        "up_s": 100,
    }
    return announcement(**{**fields, **changes})


def watched(*before: Announcement, after: tuple[Announcement, ...] | None = None) -> Watch:
    """A watch that heard of these, and a tick later of those."""
    watch = Watch(TICK_S)
    watch.hear(before, NOW - TICK_S)
    watch.hear(before if after is None else after, NOW)
    return watch


def screen(watch: Watch, **options: object) -> list[str]:
    return [line.text for line in lines(watch, **options)]


def lines(watch: Watch, **options: object) -> list[Line]:
    return render(watch, NOW, WALL, **{"store": "redis:6379", **options})  # type: ignore[arg-type]


def test_disks_are_a_tier_of_their_own_where_there_are_some() -> None:
    counts = {"disk_bytes": 20 * GIB, "disk_capacity_bytes": 40 * GIB}
    said = screen(watched(node(1, counts=counts), node(2, counts=counts), node(3)))
    assert "disk      [############............]  50% of 80 GiB in use" in said
    assert not any(line.startswith("disk") for line in screen(watched(node(1))))


def test_what_clients_got_is_told_where_there_are_some() -> None:
    counts = {"client_hits": 1500, "client_misses": 500}
    said = screen(watched(node(1), after=(node(1, counts=counts),)))
    assert "values    clients got 75% of 2000" in said
    assert "hits      nobody has asked for a prompt in the last minute" in said
    assert not any(line.startswith("values") for line in screen(watched(node(1))))


def test_a_screen_says_how_full_how_useful_and_how_busy_the_cluster_is() -> None:
    counts = {
        "stored_bytes": 5 * GIB,
        "served_bytes": 10 * MIB,
        "evicted": 50,
        "asked_tokens": 1000,
        "engine_tokens": 300,
        "hit_tokens": 500,
        "missed_tokens:evicted": 150,
        "missed_tokens:never-stored": 50,
        "evicted_age": 50,
        "evicted_age_le_300": 10,
        "evicted_age_le_900": 50,
    }
    before = node(1), node(2, transports={"cuda_ipc": "x"}, free_bytes=0)
    text = "\n".join(screen(watched(*before, after=(node(1, counts=counts, up_s=105), before[1]))))
    assert "2 nodes" in text
    assert "DRAM      [##################......]  75% of 64 GiB" in text
    assert "VRAM      [########################] 100% of 64 GiB" in text
    assert "engine 30%, store 50%, missed 20% of 1000 tokens" in text
    assert "misses    evicted 75%, never-stored 25%" in text
    assert "1 GiB/s stored, 2 MiB/s to other hosts" in text
    assert "evicted   50 in the last minute, of an age up to 5m 20%, 15m 100%" in text
    (row,) = (line for line in text.splitlines() if line.startswith("node-1"))
    assert row.split() == [
        "node-1",
        "host-0",
        "alive",
        "DRAM",
        "75%",
        "64",
        "G",
        "1",
        "G",
        "2",
        "M",
        "80%",
        "10",
        "1m",
    ]


def test_a_node_that_does_not_beat_is_silent_before_the_index_forgets_it() -> None:
    watch = watched(node(1), node(2), after=(node(1, up_s=105), node(2)))
    states = {line.split()[0]: line.split()[2] for line in screen(watch) if "node-" in line}
    assert states == {"node-1": "alive", "node-2": "silent"}


def test_who_comes_and_who_dies_is_told() -> None:
    watch = watched(node(1), node(2))
    watch.hear([node(1, up_s=104), node(3)], NOW + 4)
    text = screen(watch)
    assert text[-2].endswith("node-3 on host-1 joined")
    assert text[-1].endswith("node-2 on host-1 died")
    (row,) = (line for line in text if line.startswith("node-2"))
    assert row.split()[2] == "gone"


@pytest.mark.parametrize("count", [0, 3, 100])
def test_every_screen_fits_eighty_columns_and_its_rows(count: int) -> None:
    nodes = tuple(node(i, name="n" * 32, host="h" * 64) for i in range(count))
    for rows in (10, 24, 50):
        text = screen(watched(*nodes), rows=rows, store="s" * 200, error="e" * 200)
        assert len(text) <= rows
        assert max(map(len, text)) <= COLUMNS


def test_of_a_hundred_nodes_those_are_shown_that_need_somebody() -> None:
    watch = watched(*(node(i) for i in range(100)))
    watch.hear([node(i, up_s=104) for i in range(100) if i != 77], NOW + 4)
    text = screen(watch)
    (row,) = (line for line in text if line.startswith("node-77"))
    assert "gone" in row
    assert any(re.fullmatch(r"and \d\d more nodes", line) for line in text)


def test_names_cannot_move_the_cursor() -> None:
    watch = watched(node(1, name="\x1b[2J", host="\r\x07"))
    watch.hear([], NOW + 1)
    assert all(line.isprintable() for line in screen(watch, store="\x1b]0;x"))


class Terminal:
    """`kvstore top` in a terminal of 80 columns and 24 rows."""

    def __init__(self, *options: str) -> None:
        self.master, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", "top", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
        )
        self.theirs = theirs
        self.said = ""

    def read(self) -> str:
        """The last whole screen."""
        while select.select([self.master], [], [], 0.05)[0]:
            self.said += os.read(self.master, 65536).decode()
        frames = self.said.split("\x1b[H")
        return re.sub(r"\x1b\[\d*[a-zA-Z]", "", frames[-2] if len(frames) > 2 else "")

    def shows(self, what: str, timeout_s: float = 40.0) -> str:
        until = time.monotonic() + timeout_s
        while not re.search(what, shown := self.read()):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, f"no {what!r} in:\n{shown}"
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.master)
        os.close(self.theirs)


@contextmanager
def three_nodes(redis: RedisServer) -> Iterator[list[NodeProcess]]:
    prefix = f"kv:top-{os.getpid()}-{time.monotonic_ns()}"
    with ExitStack() as stack:
        yield [
            stack.enter_context(NodeProcess(redis, key_prefix=prefix, name=f"node-{i}"))
            for i in range(3)
        ]


@pytest.mark.timeout(180)
def test_a_real_cluster_is_watched_while_a_node_is_killed(redis_server: RedisServer) -> None:
    with three_nodes(redis_server) as nodes, ExitStack() as stack:
        options = ("--url", redis_server.url, "--key-prefix", nodes[0].key_prefix)
        terminal = Terminal(*options, "--run-dir", str(nodes[0].run_dir))
        stack.callback(terminal.close)
        terminal.shows("3 nodes")
        client = stack.enter_context(Client(**nodes[0].client_options))
        session = BlockSession(**nodes[0].client_options)
        stack.callback(session.close)
        for i in range(40):  # more than fits: some are evicted
            client.put(f"k{i}", bytes(MIB))
        session.report({"asked_tokens": 100, "hit_tokens": 80, "missed_tokens:evicted": 20})
        shown = terminal.shows(r"store 80%, missed 20% of 100 tokens")
        assert re.search(r"evicted   \d+ in the last minute, of an age up to ", shown)
        assert re.search(r"\d MiB/s stored", shown)
        nodes[2].signal(signal.SIGKILL)
        shown = terminal.shows("node-2 on .* died")
        assert "2 nodes" in shown
        assert re.search(r"node-2 +\S+ +gone", shown)
        assert max(map(len, shown.splitlines())) <= COLUMNS
        os.write(terminal.master, b"q")
        assert terminal.process.wait(20) == 0
        assert "\x1b[?1049l" in terminal.said + os.read(terminal.master, 65536).decode()
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_in_a_pipe_it_says_one_screen_and_ends(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server) as one:
        command = [sys.executable, "-m", "kvstore.cli", "top", "--url", redis_server.url]
        command += ["--key-prefix", one.key_prefix]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("kvstore top  1 node ")
    assert "\x1b" not in ran.stdout
