"""Code in a Python of its own, or in a child of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120


def printed(code: str, *args: str, **options: Any) -> str:
    """Return what a Python of its own prints that runs `code`. It has to end well; `options` are
    those of `subprocess.run`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def holds_in_child(what: Callable[[], object]) -> bool:
    """Return whether `what` is true in a forked child, where it raises nothing and does not
    hang."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S // 4)
            code = 0 if what() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
