"""The judge of disk backends calls wrong what is wrong, and finds a backend that was planted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from each_input import each

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from conformance import disk_faults  # noqa: E402
from conformance.disk_backends import digest, value  # noqa: E402
from conformance.disk_faults import (  # noqa: E402
    BAD,
    FAULTS,
    NOTHING,
    RESULTS,
    Peer,
    Verdict,
    enter,
    judge,
    table,
    verdict_of,
)
from conformance.results import PAGE  # noqa: E402

if TYPE_CHECKING:
    import pytest

GOOD, OTHER, OLD = (digest(value(key, version)) for key, version in ((1, 2), (2, 2), (1, 1)))
FAILED, LATE = {"error": "boom"}, {"error": "TimeoutError()"}


@each(
    ("answers", "said", "many"),
    [
        ([GOOD, GOOD], "right", 2),
        ([GOOD, None, None], "miss", 2),
        ([None, FAILED], "error", 1),
        ([LATE, FAILED], "CALL HANGS", 1),
        ([None, FAILED, OTHER], "WRONG BYTES", 1),
        ([OLD, None], "WRONG BYTES", 1),
        ([digest(b""), None, GOOD], "WRONG BYTES", 1),
    ],
)
def test_what_is_not_the_bytes_of_its_key_is_wrong(
    answers: list[object], said: str, many: int
) -> None:
    verdict = judge([(1, answer) for answer in answers], {1: 2})
    assert (verdict.said, verdict.many, verdict.of) == (said, many, len(answers))


def test_bytes_of_a_key_that_nobody_put_are_wrong() -> None:
    assert judge([(3, GOOD)], {1: 2}).said == "WRONG BYTES"


@each(
    "fault",
    [
        "bits: payload",
        "another key's bytes",
        "half a block never written",
        "files replaced by zeros",
    ],
)
def test_a_backend_that_does_not_compare_is_found_and_one_that_does_is_not(fault: str) -> None:
    assert verdict_of(Peer("unchecked", sys.executable), fault).said == "WRONG BYTES"
    assert verdict_of(Peer("folder", sys.executable), fault).said == "miss"


def test_without_a_fault_all_is_right_and_what_is_not_there_cannot_be_damaged() -> None:
    peer = Peer("folder", sys.executable)
    assert str(verdict_of(peer, NOTHING)) == "right (16 of 16)"
    assert verdict_of(peer, "bits: tables and logs").said == "does not apply"


@each(
    ("backend", "said"),
    [("refuses", "refused at start"), ("dies", "PROCESS DIES"), ("hangs", "CALL HANGS")],
)
def test_a_process_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, backend: str, said: str
) -> None:
    monkeypatch.setattr(disk_faults, "ANSWER_TIMEOUT_S", 2.0)
    assert verdict_of(Peer(backend, sys.executable), NOTHING).said == said


def test_the_table_has_a_row_for_each_fault_and_says_why() -> None:
    results: disk_faults.Results = {}
    run = ("2026-01-01", "scripts/conformance --disks thing")
    enter(
        results, "thing", run, "disk full", Verdict("WRONG BYTES", 1, 2, "boom /tmp/x/y", "thing 2")
    )
    shown = table(results)
    assert "| disk full | **wrong bytes (1 of 2)** |" in shown
    assert shown.count("\n| ") == len(FAULTS)
    assert "- **thing**, thing 2, 2026-01-01: `scripts/conformance --disks thing`" in shown
    assert "disk full: boom y" in shown


def test_the_table_on_the_page_is_that_of_the_results_and_the_tests_that_it_names_exist() -> None:
    results = json.loads(RESULTS.read_text())
    assert disk_faults.on_page(PAGE.read_text(), results) == PAGE.read_text()
    assert set(results["kvstore"]["faults"]) == set(FAULTS)
    for said, test in results["kvstore"]["faults"].values():
        file, _, name = test.rpartition(" ")[2].partition("::")
        assert f"def {name}(" in (PROJECT / file).read_text()
        assert not said.startswith(BAD)
