"""What luck may bring, as probabilities per scheduler step. All zero is a quiet day."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Each field is the chance per step that it happens to somebody."""

    client_crash: float = 0.0004
    """A client's process is killed where it stands; its lease is found free some time later."""
    client_pause: float = 0.004
    """A client stops (SIGSTOP, a long GC) and goes on later as if nothing had been."""
    connection_loss: float = 0.001
    """A client's connection breaks; requests and answers under way are lost, the process lives."""
    node_crash: float = 0.0002
    """The node is killed; a new one starts with a new epoch and an empty segment."""
    index_unavailable: float = 0.001
    index_emptied: float = 0.0005
    index_lies: float = 0.003
    """For a while every lookup may answer with somebody else's, an old, a damaged or no record."""

    def calm(self) -> Self:
        return replace(self, **{f.name: 0.0 for f in fields(self)})

    def hits(self, rng: random.Random, name: str) -> bool:
        chance: float = getattr(self, name)
        return rng.random() < chance
