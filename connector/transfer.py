"""Transfers under way in one worker: what its engine's thread and its own threads share."""

from __future__ import annotations

from typing import Any

from connector.base import LoadJob, SaveJob
from connector.blocks import HeadPart
from connector.fence import Fence
from kvstore import BlockView

Views = list[tuple[BlockView, HeadPart]]
"""All shards that one store block is copied from, and the heads that each has for us."""


class Load:
    """`loaded` counts blocks that were copied and checked."""

    __slots__ = ("deadline", "ended", "fence", "job", "loaded")

    def __init__(self, job: LoadJob, deadline: float) -> None:
        self.job = job
        self.deadline = deadline
        self.fence = Fence()
        self.loaded = 0
        self.ended = False


class Save:
    """`ready` stands for the work that fills the blocks; see `KVBlocks.wait_ready`."""

    __slots__ = ("deadline", "ended", "fence", "job", "ready")

    def __init__(self, job: SaveJob, deadline: float, ready: Any = None) -> None:
        self.job = job
        self.deadline = deadline
        self.ready = ready
        self.fence = Fence()
        self.ended = False


Transfer = Load | Save
