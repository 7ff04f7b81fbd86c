from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from each_input import each

from kvstore import UsageError
from kvstore.cli.replay import traces
from kvstore.cli.replay.traces import read_trace


def written(folder: Path, lines: Sequence[object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_requests_are_read_in_the_order_of_their_time(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "hash_ids": [1, 2, at]} for at in (2000, 500)]
    trace = read_trace(written(tmp_path, lines))
    assert trace.times == [0.5, 2.0]
    assert [list(prompt) for prompt in trace.prompts] == [[0, 1, 3], [0, 1, 2]]
    assert (trace.distinct, trace.references) == (4, 6)


def test_several_blocks_are_one(tmp_path: Path) -> None:
    requests = [{"timestamp": 0, "hash_ids": [1, 2, 3]}, {"timestamp": 1, "hash_ids": [1, 2, 4, 5]}]
    trace = read_trace(written(tmp_path, requests), join=2)
    assert [list(prompt) for prompt in trace.prompts] == [[0], [0, 1]]
    session = [[[0.0, 0, 3], [1.0, 3, 4], [2.0, 1, 5]]]
    trace = read_trace(written(tmp_path, session), join=2)
    assert [list(prompt) for prompt in trace.prompts] == [[0], [0, 1], [2, 3]]


def test_hashes_as_text_are_blocks_behind_their_prefix(tmp_path: Path) -> None:
    lines = [{"timestamp": 1, "hash_ids": ids} for ids in (["aa", "bb"], ["cc", "bb"], ["aa"])]
    trace = read_trace(written(tmp_path, lines))
    assert [list(prompt) for prompt in trace.prompts] == [[0, 1], [2, 3], [0]]


def test_a_block_of_a_session_is_of_the_request_that_had_it_first(tmp_path: Path) -> None:
    session = [[0.0, 0, 3, "tool_use"], [5.0, 2, 4, "end_turn"]]
    trace = read_trace(written(tmp_path, [session]))
    assert trace.times[1] - trace.times[0] == 5
    assert [list(prompt) for prompt in trace.prompts] == [[0, 1, 2], [0, 1, 3, 4]]
    assert trace.distinct == 5


def test_so_many_sessions_are_live_at_once_and_the_seed_draws_when(tmp_path: Path) -> None:
    path = written(tmp_path, [[[0.0, 0, 1], [100.0, 1, 2]]] * 2000)
    begins = read_trace(path, live=10, seed=1).times
    assert read_trace(path, live=10, seed=1).times == begins
    assert read_trace(path, live=10, seed=2).times != begins
    assert 19_000 < begins[-1] < 21_000, "2,000 sessions of 100 s, ten at a time"


REQUEST = {"timestamp": 1, "hash_ids": [1]}


@each(
    "line, said",
    [
        ('{"timestamp": 1', "is no JSON"),
        ("\udcff", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("7", "is no request and no session"),
        ([[0.0, 0, 1]], "those before it are requests"),
        ({"hash_ids": [1]}, "timestamp=None"),
        ({"timestamp": True, "hash_ids": [1]}, "timestamp=True"),
        ({"timestamp": float("nan"), "hash_ids": [1]}, "timestamp=nan"),
        ({"timestamp": -1, "hash_ids": [1]}, "timestamp=-1"),
        ({"timestamp": 1, "hash_ids": "12"}, "hash_ids='12'"),
        ({"timestamp": 1, "hash_ids": [1, None]}, "hash_ids has None"),
        ({"timestamp": 1, "hash_ids": [[1]]}, "hash_ids has [1]"),
    ],
)
def test_a_bad_line_is_named_with_what_to_do(tmp_path: Path, line: object, said: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "trace.jsonl"
    good = json.dumps(REQUEST)
    path.write_bytes(f"{good}\n\n{text}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match="line 3") as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert f"sed -i 3d {path}" in str(caught.value)


@each(
    "session, said",
    [
        ([1], "its request 0 must be"),
        ([[0.0, 0]], "its request 0 must be"),
        ([["0", 0, 1]], "the time '0'"),
        ([[5.0, 0, 1], [4.0, 1, 1]], "seconds from 5.0 on"),
        ([[0.0, 1, 1]], "keeps 1 blocks, and the one before it has 0"),
        ([[0.0, 0, 2], [1.0, 3, 4]], "keeps 3 blocks, and the one before it has 2"),
        ([[0.0, 0, 2], [1.0, 2, 1]], "no more kept than there are"),
        ([[0.0, 0, 1.5]], "must be whole numbers"),
        ([[0.0, -1, 2]], "must be whole numbers"),
        (REQUEST, "those before it are sessions"),
    ],
)
def test_a_bad_session_is_named_too(tmp_path: Path, session: object, said: str) -> None:
    with pytest.raises(UsageError, match="line 2") as caught:
        read_trace(written(tmp_path, [[[0.0, 0, 1]], session]))
    assert said in str(caught.value)


def test_a_trace_beyond_the_limits_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = written(tmp_path, [[[0.0, 0, 1 << 60]]])
    with pytest.raises(UsageError, match="blocks up to line 1: read a part") as caught:
        read_trace(sessions)
    assert "--join 4" in str(caught.value)
    monkeypatch.setattr(traces, "DISTINCT_MAX", 2)
    with pytest.raises(UsageError, match="more than 2 different blocks up to line 1"):
        read_trace(written(tmp_path, [{"timestamp": 0, "hash_ids": [1, 2, 3]}]))
    monkeypatch.setattr(traces, "LINE_BYTES_MAX", 10)
    with pytest.raises(UsageError, match="more than 10 bytes"):
        read_trace(sessions)


def test_what_is_empty_or_not_there_or_has_times_of_its_own_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompt with a block"):
        read_trace(written(tmp_path, []))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(UsageError, match="--live=3: is for sessions"):
        read_trace(written(tmp_path, [REQUEST]), live=3)
