"""scripts/lib/walk.py: what a reader meets is noted in order, and climbs are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from walk import Place, Tracer, Walk, shown  # noqa: E402

from kvstore.keys import Namespace  # noqa: E402

# Files, of the walks that nobody else's speed changes: a slow index is asked once more.
FILES_MAX = {
    "put": 20,
    "get, here": 10,
    "get, here again": 8,
    "match_prefix": 14,
    "connector: save": 19,
    "connector: load, here": 18,
}
"""What was visited when these ways were first shortened (docs/architecture.md)."""
CLIMBING = Walk("w", [Place("a", "f"), Place("a", "g"), Place("b", "h"), Place("a", "i")])


def test_a_function_met_in_a_file_that_was_left_is_a_climb() -> None:
    assert (CLIMBING.files, CLIMBING.climbs) == (2, 1)
    assert shown(CLIMBING).splitlines() == ["w", "    a: f, g", "    b: h", "  ^ a: i"]


def test_only_our_own_functions_are_met_each_once() -> None:
    tracer = Tracer()
    tracer.install()
    try:
        walk = tracer.walk("w", lambda: [Namespace.named("n").value_key(b"k") for _ in range(3)])
    finally:
        tracer.uninstall()
    assert {place.file for place in walk.places} >= {"kvstore/keys.py"}
    assert all(place.file.startswith("kvstore/") for place in walk.places)
    assert len(set(walk.places)) == len(walk.places)


@pytest.mark.long
def test_every_walk_is_taken_against_real_nodes() -> None:
    ran = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "lib" / "walk.py"), "--summary"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    rows = {
        line[:30].strip(): [int(n) for n in line[30:].split()]
        for line in ran.stdout.splitlines()[1:]
    }
    assert {"put", "get, here", "get, another host", "get, a miss"} <= rows.keys()
    assert all(functions >= files > 0 for functions, files, _ in rows.values())
    assert rows["get, another host"][0] > rows["get, here"][0]
    longer = {name for name, most in FILES_MAX.items() if rows.get(name, [0, 0])[1] > most}
    assert not longer, f"more files to look into than before: {longer} (scripts/walk)"
