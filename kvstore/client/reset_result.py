"""Defines what a reset answers: who has confirmed it and who has not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What came of a reset; true when it is complete.

    Complete: nothing that was saved before it began is found by anybody any more. Else that
    holds for the nodes that have confirmed it. The others drop it as soon as they hear of
    it, within a heartbeat of when they reach the index again or start anew, and until then
    clients that can read them may find it.
    """

    confirmed: tuple[str, ...]
    """Nodes that have dropped it, as NAME@HOST."""
    unconfirmed: tuple[str, ...]
    """Nodes that live, or did a moment ago, and have not said so in time."""
    index_answered: bool
    """All the time, and long enough for all nodes to be heard of. Without the index nobody knows
    of nodes on other hosts; they hear of it later."""

    def __bool__(self) -> bool:
        return self.index_answered and not self.unconfirmed

    def __str__(self) -> str:
        if self:
            return f"complete: confirmed by {', '.join(self.confirmed) or 'nobody, no node lives'}"
        missing = list(self.unconfirmed)
        if not self.index_answered:
            missing.append("nodes of other hosts (the index did not answer all the time)")
        return f"not confirmed by {', '.join(missing)}; they drop it when they hear of it"
