"""`scripts/bench local --docs`: this store beside others, as docs/benchmarks.md shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.mooncake import GET_MOONCAKE
from benchmarks.report import Row
from benchmarks.side_by_side import BEGIN, DOCUMENT, END, into_document, table

ROOT = Path(__file__).parents[2]
KIB, MIB = 1 << 10, 1 << 20


def row(op: str, size_bytes: int, batch: int, us: float, readers: int = 1) -> Row:
    return {
        "op": op,
        "size_bytes": size_bytes,
        "batch": batch,
        "readers": readers,
        "latency_us_p50": us,
    }


ROWS = [
    row("put", 4 * KIB, 1, 400.0),
    row("get", 4 * KIB, 1, 12.0),
    row("get_cached", 4 * KIB, 1, 9.0),
    row("put", 1 * MIB, 32, 4000.0),
    row("get", 4 * KIB, 1, 30.0, readers=4),
    row("mooncake-shm put", 4 * KIB, 1, 250.0),
    row("mooncake-shm get", 4 * KIB, 1, 241.0),
    row("mooncake-shm put", 1 * MIB, 32, 5000.0),
    row("redis put", 1 * MIB, 32, 100_000.0),
    {"op": "mooncake-tcp", "said": "the module mooncake is not installed here: do this"},
]


def test_each_row_has_all_stores_and_its_fastest_is_bold() -> None:
    lines = table({"cores": 2, "load_1min": 0.3}, ROWS, "scripts/bench local --docs").splitlines()
    assert lines[0] == "`scripts/bench local --docs`: cores 2, load_1min 0.3."
    assert lines[2:7] == [
        "| | this store | Mooncake, shared memory | the payload in plain Redis |",
        "|---|---|---|---|",
        "| get, 4 KiB | **12 µs** | 241 µs |  |",
        "| put, 4 KiB | 400 µs | **250 µs** |  |",
        "| put, 32 \N{MULTIPLICATION SIGN} 1 MiB | **8.4 GB/s** | 6.7 GB/s | 0.34 GB/s |",
    ]


def test_what_others_are_faster_at_is_said_and_what_did_not_run() -> None:
    made = table({}, ROWS, "x")
    assert "Others are faster at: put, 4 KiB (1.60 times Mooncake, shared memory)." in made
    assert "- `mooncake-tcp` did not run: the module mooncake is not installed here: do" in made
    assert "Others are faster" not in table({}, ROWS[:5], "x")


def test_only_what_is_between_the_markers_is_replaced() -> None:
    text = f"# Title\n\nbefore\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n"
    made = into_document(text, "new")
    assert made == text.replace("old", "new")
    assert into_document(made, "new") == made
    for other in ("no markers", BEGIN, END):
        with pytest.raises(ValueError, match="has no place for the table"):
            into_document(other, "new")


def test_the_document_has_a_place_for_it() -> None:
    assert "new" in into_document(DOCUMENT.read_text(), "new")


def test_a_peer_that_is_missing_says_what_it_lacks_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    (said,) = peers.run("mooncake-shm", [4 * KIB], [1])
    assert said == {
        "op": "mooncake-shm",
        "said": f"the module mooncake is not installed here: {GET_MOONCAKE}",
    }


@pytest.mark.long
def test_a_run_with_small_figures_shows_the_table(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"# Benchmarks\n\n{BEGIN}\n{END}\n\n## next\n")
    command = [sys.executable, "-m", "benchmarks", "local", "--quick", "--docs", "--json"]
    command += ["--document", str(document), "--peer", "redis", "--readers", "1"]
    command += ["--sizes", "4096", "65536", "--batches", "1", "--node-bytes", str(64 * MIB)]
    ran = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    about = json.loads(ran.stdout.splitlines()[-1])["machine"]
    text = document.read_text()
    assert text.startswith(f"# Benchmarks\n\n{BEGIN}\n\n`scripts/bench local --quick --docs")
    assert text.endswith(f"{END}\n\n## next\n")
    assert "| | this store | the payload in plain Redis |" in text
    for shape in ("get, 4 KiB", "get, 64 KiB", "put, 4 KiB", "put, 64 KiB"):
        assert text.count(f"| {shape} | ") == 1
    for name in ("date", "kvstore", "redis", "load_1min"):
        assert f"{name} {about[name]}" in text
