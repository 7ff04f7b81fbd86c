"""A handler of signals raises right where a lock was taken: it is free afterwards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory
from kvstore.index.memory import MemoryIndex

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Interrupted:
    """A lock whose taking is interrupted when it has been taken."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        self._lock.acquire(*args, **kwargs)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@pytest.mark.parametrize(
    "look",
    [
        lambda nodes: nodes.check(HERE_BELIEVED_S * 2),
        lambda nodes: nodes.map_ours(1.0),
        lambda nodes: nodes.map_all(1.0),
    ],
    ids=["check", "map_ours", "map_all"],
)
def test_a_look_that_is_interrupted_when_it_has_the_lock_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[NodeDirectory], object]
) -> None:
    nodes = NodeDirectory(tmp_path, MemoryIndex(), "kv:t")
    lock: Any = nodes._lock
    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_lock", Interrupted(lock))
        with pytest.raises(KeyboardInterrupt):
            look(nodes)
    got: list[bool] = []
    other = threading.Thread(target=lambda: got.append(lock.acquire(blocking=False)))
    other.start()
    other.join()
    assert got == [True]
