"""How a node hears of resets, tells of them, and catches up with those it has missed.

Nodes tell each other: by their announcements in the index, and by a file each in the run
directory, which needs no index. docs/decisions/0029-reset.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvstore.core.events import Effects, Reset
from kvstore.core.node import NOBODY, NodeCore
from kvstore.core.record import RecordSigner
from kvstore.core.resets import Resets
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.base import Index
from kvstore.limits import RESETS_SETTLE_S
from kvstore.node.heartbeat import ANNOUNCEMENT_TTL_S
from kvstore.nodedir import Announcement, NodeDir, node_dirs

log = logging.getLogger("kvstore.node")

POLL_S = 0.2
"""Between two looks of a node that catches up."""


class ResetNews:
    """What one node and the others know of resets."""

    def __init__(
        self,
        directory: NodeDir,
        run_dir: Path,
        key_prefix: str,
        index: Index,
        signer: RecordSigner | None = None,
    ) -> None:
        self._signer = signer
        self._directory = directory
        self._run_dir = run_dir
        self._key_prefix = key_prefix
        self._index = index
        self._written = ""
        self._incarnation = ""

    def unknown_to(
        self, resets: Resets, announcements: Iterable[Announcement]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Resets that others tell of and this node does not know, each once."""
        found: dict[int, tuple[int, ...]] = {}
        told = [word.resets for word in announcements if word.key_prefix == self._key_prefix]
        for text in (*told, *self._told_here()):
            if text:
                found.update(resets.news(Resets.unpack(text)))
        return sorted(found.items())

    def _told_here(self) -> Iterable[str]:
        """By nodes of this run directory, alive or not, this one's former start among them."""
        for directory in node_dirs(self._run_dir):
            kept = directory.kept_resets()
            if kept.get("key_prefix") == self._key_prefix:
                yield str(kept.get("resets", ""))

    # --- what a next start will want to know ------------------------------

    def save(self, resets: Resets) -> None:
        """On record before anybody is told that this node knows of it."""
        text = resets.pack()
        if text != self._written:
            self._write(text, time.time())

    def announced(self, incarnation: str, resets: Resets) -> None:
        """The index has had a sign of life, in this incarnation of it."""
        self._incarnation = incarnation
        self._write(resets.pack(), time.time())

    def withdrawn(self) -> None:
        """From here on a reset does not count on this node."""
        self._write(self._written, 0.0)

    def _write(self, text: str, announced_at: float) -> None:
        self._directory.keep_resets(
            {
                "key_prefix": self._key_prefix,
                "resets": text,
                "incarnation": self._incarnation,
                "announced_at": announced_at,
            }
        )
        self._written = text

    # --- a start with blocks of a former one ------------------------------

    def catch_up(self, core: NodeCore, apply: Callable[[Effects], None]) -> None:
        """Drop what was reset while this node was down, before anybody reads it.

        Raises `ValueError` when nobody can say what that was: then the node must start empty.
        """
        kept = self._directory.kept_resets()
        own = Resets.unpack(str(kept.get("resets", "")))
        core.resets = own
        deadline = time.monotonic() + RESETS_SETTLE_S
        reached = False
        while True:
            try:
                incarnation = self._index.incarnation()
                told = list(announced_nodes(self._index, self._signer).values())
            except IndexUnavailableError:
                told = []
            else:
                reached = True
            for number, namespace_ids in self.unknown_to(own, told):
                log.info("namespaces were reset while this node was down (%x)", number)
                apply(core.handle(Reset(NOBODY, 0, number, namespace_ids), time.monotonic()))
            if reached and incarnation and incarnation == kept.get("incarnation"):
                return  # it has forgotten nothing
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        # Others say what they know with each heartbeat: by now they have.
        if not reached and not _counted_on(kept.get("announced_at"), time.time()):
            raise ValueError("what was reset meanwhile cannot be learned without the index")


def _counted_on(announced_at: Any, now: float) -> bool:
    """Whether its announcement has stood all the time: then every reset has waited for it."""
    return isinstance(announced_at, float) and 0.0 <= now - announced_at < ANNOUNCEMENT_TTL_S
