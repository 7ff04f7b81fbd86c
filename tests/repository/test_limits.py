"""Limits that promises are made of: the documents say a figure, and it is this one."""

import ast
from pathlib import Path

from kvstore.limits import RESETS_KEPT_S, RESTART_WITHIN_S

ROOT = Path(__file__).parents[2]


def test_the_memory_of_a_dead_node_is_kept_for_as_long_as_the_documents_say():
    assert RESTART_WITHIN_S == 10 * 60
    assert RESETS_KEPT_S > RESTART_WITHIN_S
    for document, said in (
        ("docs/claims.md", "after ten minutes"),
        ("docs/architecture.md", "waits 10 minutes (`RESTART_WITHIN_S`)"),
    ):
        assert said in (ROOT / document).read_text(), document


def test_no_constant_declares_a_range():
    """`NAME: Count = 8` at the head of a module would look as if an operator set it."""
    files = [path for top in ("kvstore", "connector") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 200
    assert not {
        f"{path.relative_to(ROOT)}: {node.target.id}"
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and (names := {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)})
        and names & {"Count", "Seconds", "NumberRange"}
    }
