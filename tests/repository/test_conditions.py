"""A handler of signals that raises keeps no lock: none is taken by the `with` of a condition.

`Condition.__enter__` and `__exit__` are Python: a handler may run when the first has the lock and
the block has not begun, and before the second gives it back. `with` of a lock is one step.
"""

import ast
import signal
import sys
import threading
from pathlib import Path

import pytest
from signal_handlers import SignalledError, handling, raising

from connector.worker.tasks import TaskThreads

ROOT = Path(__file__).parents[2]
NEVER_MAIN = {"kvstore/node/stream/shares.py"}
"""Where threads of a node alone go: handlers run in the main thread."""


def conditions(tree: ast.AST) -> set[str]:
    """Names of attributes that are made a condition anywhere in a module."""
    return {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("Condition")
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }


def entered(tree: ast.AST) -> set[str]:
    """Names of attributes that a `with` enters."""
    return {
        item.context_expr.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Attribute)
    }


def test_nobody_enters_a_condition() -> None:
    paths = [path for room in ("kvstore", "connector") for path in (ROOT / room).rglob("*.py")]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_bytes()) for path in paths}
    found = {path: conditions(tree) & entered(tree) for path, tree in trees.items()}
    assert {path for path, names in found.items() if names} == NEVER_MAIN
    assert sum(map(bool, map(conditions, trees.values()))) > 5


@pytest.mark.parametrize("step", ["__enter__", "__exit__"])
def test_tasks_go_on_after_a_handler_raised_where_a_condition_would_be_entered(step: str) -> None:
    code = getattr(threading.Condition, step).__code__
    moment = "return" if step == "__enter__" else "call"

    def traced(frame, event, _):  # type: ignore[no-untyped-def]
        if frame.f_code is code and event == moment:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return traced

    tasks = TaskThreads("test", lambda: None)
    ran = threading.Event()
    with handling(raising(SignalledError)):
        sys.settrace(traced)
        try:
            tasks.submit(lambda: None, lambda: None)
        except SignalledError:
            pass
        finally:
            sys.settrace(None)
    threading.Thread(target=tasks.submit, args=(ran.set, lambda: None), daemon=True).start()
    assert ran.wait(5)
    assert tasks.close()
