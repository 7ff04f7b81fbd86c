"""Finds out how much of a prefix can be restored when several pools must have their part of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Hits:
    """Keeps the lengths of prefixes, in pages, that all pools asked so far can restore."""

    def __init__(self, kv: Sequence[bool]) -> None:
        """`kv`: whether each page of the main pool is there."""
        self.run = leading(kv)
        """Pages of the main pool's leading run."""
        self.restorable = list(range(1, self.run + 1))
        """Lengths that can be restored. A shorter one is not always among them: a pool that needs
        only the end of a prefix may have the end of the longer one alone."""
        self.by_pool: dict[Hashable, int] = {}
        """The longest prefix for each pool beside the main one, whatever the others have."""

    def need(self, name: Hashable, pages: Sequence[bool], trailing: int | None) -> None:
        """Add a pool that must have every page of a prefix, or the last `trailing` of them."""
        if trailing is None:
            mine = set(range(1, min(leading(pages), self.run) + 1))
        else:
            mine, streak = set(), 0
            for length, there in enumerate(pages[: self.run], start=1):
                streak = streak + 1 if there else 0
                if streak >= min(trailing, length):
                    mine.add(length)
        self.by_pool[name] = max(mine, default=0)
        self.restorable = [length for length in self.restorable if length in mine]

    @property
    def longest(self) -> int:
        """Return the pages of the longest prefix that all of them can restore."""
        return self.restorable[-1] if self.restorable else 0


def leading(there: Sequence[bool]) -> int:
    """Return length of the leading run."""
    return next((i for i, ok in enumerate(there) if not ok), len(there))
