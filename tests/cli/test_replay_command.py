from __future__ import annotations

import json
import random
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from each_input import each
from stores import NodeProcess

from kvstore import Namespace
from kvstore.cli import main
from kvstore.cli.replay.replayed import keys_of
from kvstore.cli.replay.traces import PromptTrace, read_trace
from kvstore.client.session import BlockSession
from kvstore.types import STORED, PutResult

if TYPE_CHECKING:
    from redis_servers import RedisServer

FIELDS = [
    *("trace", "capacity_blocks", "disk_blocks", "policy", "hit_rate", "optimum"),
    *("fraction_of_optimum", "disk_written_blocks", "disk_read_blocks"),
    "disk_again_blocks",
]
BLOCK = 16 << 10


def sessions(folder: Path, count: int, requests: int) -> Path:
    """Sessions that grow, and now and then forget a part."""
    rng = random.Random(5)
    lines = []
    for _ in range(count):
        at_s, blocks, session = 0.0, 0, []
        for _ in range(requests):
            kept = blocks if rng.random() < 0.9 else blocks // 2
            blocks = kept + rng.randint(1, 8)
            session.append([at_s, kept, blocks, "tool_use"])
            at_s += rng.expovariate(0.1)
        lines.append(json.dumps(session) + "\n")
    path = folder / "agents.jsonl"
    path.write_text("".join(lines))
    return path


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["replay", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told) == ["rows"]
    found: list[dict[str, Any]] = told["rows"]
    return found


def test_each_capacity_and_policy_has_a_row_of_the_promised_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sessions(tmp_path, 20, 10)
    found = rows(capsys, str(path), "--capacity", "1MiB,256MiB", "--live", "10")
    assert [list(row) for row in found] == [FIELDS] * 4
    assert [(row["capacity_blocks"], row["policy"]) for row in found] == [
        (blocks, policy) for blocks in (64, 16384) for policy in ("head-start", "lru")
    ]
    trace = read_trace(path)
    unlimited = round(1 - trace.distinct / trace.references, 6)
    assert all(row["trace"] == "agents.jsonl" and row["disk_blocks"] == 0 for row in found)
    assert all(0 < row["hit_rate"] < row["optimum"] < unlimited for row in found[:2])
    assert all(
        row["hit_rate"] == row["optimum"] == unlimited and row["fraction_of_optimum"] == 1
        for row in found[2:]
    )


def test_a_block_takes_what_a_node_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sessions(tmp_path, 20, 10)
    small = rows(capsys, str(path), "--capacity", "4MiB", "--policy", "lru")
    large = rows(
        capsys, str(path), "--capacity", "32MiB", "--policy", "lru", "--block-bytes", "100KiB"
    )
    assert [row["capacity_blocks"] for row in (*small, *large)] == [256, 327]


def test_the_table_has_a_bar_for_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(sessions(tmp_path, 20, 10)), "--policy", "lru"]) == 0
    about, _, head, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith("agents.jsonl: 200 prompts in ")
    assert head.split() == ["CAPACITY", "BLOCKS", "POLICY", "HIT", "RATE", "OPTIMUM", "OF", "IT"]
    assert all("lru" in line and "|" in line for line in lines)
    assert lines[-1].count("#") > lines[0].count("#")


def test_the_table_says_what_went_to_the_disk_and_how_much_of_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(sessions(tmp_path, 20, 10)), "--policy", "lru", "--capacity", "1MiB")
    words = (*words, "--disk", "4MiB", "--disk-writes-per-day", "0")
    (row,) = rows(capsys, *words)
    assert main(["replay", *words]) == 0
    _, _, head, line = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["WRITTEN", "READ", "AGAIN"]
    names = ("disk_written_blocks", "disk_read_blocks", "disk_again_blocks")
    assert line.split()[-4:-1] == [str(row[name]) for name in names]
    assert 0 < 11 * row["disk_again_blocks"] <= row["disk_written_blocks"]


@each(
    "words, said",
    [
        (("--capacity", "1KiB"), "--capacity=1024: must be 64 KiB to 16.0 TiB"),
        (("--capacity", "64KiB", "--block-bytes", "1MiB"), "--block-bytes=1048576"),
        (("--block-bytes", "0"), "--block-bytes=0: must be 1 to "),
        (("--disk", "1MiB"), "--disk=1048576: must be at least 4194304"),
        (("--disk", "1GiB", "--block-bytes", "4KiB"), "with --block-bytes 16384 or more"),
        (("--disk-writes-per-day", "-1"), "--disk-writes-per-day=-1.0: must be 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["replay", str(sessions(tmp_path, 2, 2)), *words]) == 2
    assert said in capsys.readouterr().err


@each(
    "words, said",
    [
        (("--capacity", "much"), "'much' is not a size"),
        (("--policy", "lru,fifo"), "'fifo' is none of head-start, lru"),
        (("--hints", "1.5"), "'1.5' is not a share from 0 to 1"),
    ],
)
def test_what_is_mistyped_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "trace", *words])
    assert said in capsys.readouterr().err


def live(node: NodeProcess, trace: PromptTrace) -> int:
    """Blocks that a real node has, fed as an engine feeds it."""
    keys, space = keys_of(trace), Namespace.named("live")
    hits = 0
    options: Any = node.client_options
    with closing(BlockSession(**options)) as session:
        for prompt in trace.prompts:
            asked = [keys[number] for number in prompt]
            found = session.lookup(asked, 5.0)
            refs = [ref for ref in takewhile(lambda ref: ref is not None, found) if ref]
            views = session.views(refs, None, 5.0)
            run = list(takewhile(lambda view: view is not None and view.valid(), views))
            hits += len(run)
            if new := asked[len(run) :]:
                session.writer.touch(asked[: len(run)], 0.0, at_once=True)
                answers = session.reserve(new, BLOCK, space.id)
                granted: Any = [one for one in answers if not isinstance(one, PutResult)]
                assert set(session.commit(granted)) <= {STORED}
            session.writer.touch(asked, 0.0, at_once=True)
    return hits


@pytest.mark.long
def test_a_live_node_finds_what_the_replay_says(
    tmp_path: Path, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sessions(tmp_path, 40, 15)
    size = 4 << 20
    (row,) = rows(capsys, str(path), "--capacity", str(size), "--policy", "lru", "--live", "12")
    assert 0.1 < row["hit_rate"] < row["optimum"] - 0.05, "the store is too small for all of it"
    trace = read_trace(path, live=12)
    with NodeProcess(redis_server, size=size) as node:
        found = live(node, trace) / trace.references
    assert abs(found - row["hit_rate"]) <= 0.01, f"{found} live, {row}"
