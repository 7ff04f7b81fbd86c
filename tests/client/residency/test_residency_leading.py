"""A listener tells the leading blocks of a prompt, however many, and the node that has most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import MissReason, UsageError
from kvstore.client.residency.view import NodeView
from kvstore.compiled.key_set import LOOKED_AT_ONCE
from kvstore.protocol.block_events import Source
from kvstore.spi import Residency

KEYS = [number.to_bytes(32, "big") for number in range(3 * LOOKED_AT_ONCE)]


@pytest.fixture
def residency(tmp_path: Any) -> Iterator[Residency]:
    pytest.importorskip("zmq")
    with Residency([f"ipc://{tmp_path}/nobody"]) as residency:
        yield residency


def views(*held: list[bytes]) -> list[Any]:
    made = []
    for number, keys in enumerate(held):
        view = NodeView()
        view.source = Source("host", f"node{number}", 1)
        view.keys.update(keys)
        view._heard_at = time.monotonic() + 3600
        made.append(SimpleNamespace(view=view))
    return made


AROUND = [n * LOOKED_AT_ONCE + d for n in (1, 2) for d in (-1, 0, 1)]


def test_the_run_ends_at_the_first_block_that_is_missing(
    residency: Residency, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first_missing in (0, 1, *AROUND, len(KEYS) - 1, len(KEYS)):
        there = [key for at, key in enumerate(KEYS) if at != first_missing]
        monkeypatch.setattr(residency, "_nodes", views(there))
        for asked in (0, 1, LOOKED_AT_ONCE, LOOKED_AT_ONCE + 7, len(KEYS)):
            expected = min(asked, first_missing)
            for wanted in (KEYS[:asked], b"".join(KEYS[:asked])):
                assert len(residency.leading(wanted)) == expected, (first_missing, asked)
                runs = residency.runs(wanted)
                assert [run.blocks for run in runs] == [expected] * bool(expected)
                assert runs.short is (None if expected == asked else MissReason.ABSENT)


def test_the_node_that_has_most_of_what_follows_is_told(
    residency: Residency, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = LOOKED_AT_ONCE + 5
    monkeypatch.setattr(residency, "_nodes", views(KEYS[:at], KEYS[:10], KEYS[at - 3 : at + 70]))
    names = [holder.name for holder in residency.leading(KEYS)]
    assert names == ["node0"] * at + ["node2"] * 70
    runs = residency.runs(b"".join(KEYS))
    assert [(run.holder.name, run.blocks) for run in runs] == [("node0", at), ("node2", 70)]
    assert (runs.blocks, runs.short) == (at + 70, MissReason.ABSENT)


def test_bytes_of_keys_that_are_not_whole_are_refused(residency: Residency) -> None:
    for keys in (b"k", b"k" * 31, b"k" * 33):
        with pytest.raises(UsageError, match="must have 32 bytes each"):
            residency.leading(keys)
