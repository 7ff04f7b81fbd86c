"""scripts/lib/walk.py: what a reader meets is noted in order, and climbs are counted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from walk import Place, Tracer, Walk, shown  # noqa: E402

from kvstore.keys import Namespace  # noqa: E402

SLOW_INDEX_ADDS = 3
"""Functions, files and climbs: a slow index is asked once more."""
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


def figures(markdown: str) -> dict[str, list[int]]:
    """Functions, files and climbs by walk, of the lines of a table that have them."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|$", markdown, re.M)
    return {name: [int(n) for n in numbers] for name, *numbers in rows}


@pytest.mark.long
def test_architecture_md_has_the_figures_of_every_walk_against_real_nodes() -> None:
    ran = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "lib" / "walk.py"), "--markdown"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    now, written = figures(ran.stdout), figures((PROJECT / "docs/architecture.md").read_text())
    assert {"put", "get, here", "get, another host", "get, a miss"} <= now.keys()
    assert now["get, another host"][0] > now["get, here"][0]
    assert all(n <= most for n, most in zip(now["put"], (45, 11, 8), strict=True)), "straight"
    far = zip(now["get, another host"], (91, 28, 27), strict=True)
    assert all(n <= most + SLOW_INDEX_ADDS for n, most in far), "no longer than it was"
    assert written.keys() == now.keys(), "scripts/walk --markdown makes the table"
    apart = {
        name: (written[name], got)
        for name, got in now.items()
        if any(abs(a - b) > SLOW_INDEX_ADDS for a, b in zip(written[name], got, strict=True))
    }
    assert not apart, "written, walked: scripts/walk --markdown makes the table"
