"""Limits that promises are made of: the documents say a figure, and it is this one."""

from pathlib import Path

from kvstore.limits import RESETS_KEPT_S, RESTART_WITHIN_S

ROOT = Path(__file__).parents[1]


def test_the_memory_of_a_dead_node_is_kept_for_as_long_as_the_documents_say():
    assert RESTART_WITHIN_S == 10 * 60
    assert RESETS_KEPT_S > RESTART_WITHIN_S
    for document, said in (
        ("README.md", "after ten minutes"),
        ("docs/architecture.md", "waits 10 minutes (`RESTART_WITHIN_S`)"),
    ):
        assert said in (ROOT / document).read_text(), document
