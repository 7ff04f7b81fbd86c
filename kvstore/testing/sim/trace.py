"""Keeps the last steps before a rule broke, for people."""

from __future__ import annotations

from collections import deque

LINES_KEPT = 80


class Trace:
    """Notes are kept as they are and made into text only when somebody asks."""

    def __init__(self) -> None:
        self._notes: deque[tuple[int, float, str, tuple[object, ...]]] = deque(maxlen=LINES_KEPT)

    def add(self, step: int, now: float, who: str, what: tuple[object, ...]) -> None:
        self._notes.append((step, now, who, what))

    def keep_all(self) -> None:
        self._notes = deque(self._notes)

    def lines(self) -> list[str]:
        return [
            f"step {step:6} {now:10.4f} s  {who:12} {' '.join(map(_short, what))}"
            for step, now, who, what in self._notes
        ]


def _short(word: object) -> str:
    if isinstance(word, bytes):
        return f"{word[8:12].hex()}" if len(word) == 32 else f"<{len(word)} bytes>"
    if isinstance(word, list):
        return "[" + ", ".join(map(_short, word)) + "]"
    if isinstance(word, float):
        return f"{word:.4f}"
    return str(word)
