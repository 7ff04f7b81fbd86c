"""Limits how many bytes a second a node checks because clients report them as damaged.

A client that sees a wrong checksum says so; the node looks itself, and only what it finds wrong
is dropped. Looking takes the node's time, so there is a limit for each second: beyond it a
report is passed over, and the next reader reports again.
"""

from __future__ import annotations


class TokenBucket:
    """Allows at most `bytes_per_s`, and at most one second's worth at once. Not thread-safe."""

    __slots__ = ("_at", "_bytes_per_s", "_left")

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = float(bytes_per_s)
        self._at = 0.0

    def allows(self, size_bytes: int, now: float) -> bool:
        """Return whether `size_bytes` may be checked at `now` (seconds); if so they are spent."""
        gained = max(now - self._at, 0.0) * self._bytes_per_s
        self._left = min(self._left + gained, float(self._bytes_per_s))
        self._at = max(now, self._at)
        if size_bytes > self._left:
            return False
        self._left -= size_bytes
        return True
