"""Spreads resets of namespaces among nodes, and lets a node catch up with those it has missed.

Nodes tell each other of resets by their announcements in the index, and by a file each in the
run directory, which needs no index. docs/decisions/0029-reset.md says why that is enough.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.core.events import NOBODY, Effects, Reset
from kvstore.core.node import NodeCore
from kvstore.core.resets import Resets
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.base import Index
from kvstore.limits import RESETS_KEPT_S, RESETS_SETTLE_S
from kvstore.machine import REAL, Machine
from kvstore.node.publishing.heartbeat import ANNOUNCEMENT_TTL_S
from kvstore.nodedir import ANNOUNCEMENT_BYTES_MAX, Announcement, NodeDir
from kvstore.record import RecordSigner
from kvstore.system.host_clock import Moment, passed_s
from kvstore.system.small_json import parse_object

log = logging.getLogger("kvstore.node")

RECORD_ID = (1 << 64) - 1
"""The number, no node's, under which the index keeps all resets longer than any node lives."""
WARNED_EVERY_S = 30.0
"""Pause between two warnings that the run directory takes no more."""
POLL_S = 0.2
"""Pause between two looks of a node that catches up."""


class ResetNews:
    """What one node and the others know of resets."""

    def __init__(
        self,
        directory: NodeDir,
        run_dir: Path,
        key_prefix: str,
        index: Index,
        signer: RecordSigner | None = None,
        *,
        machine: Machine = REAL,
    ) -> None:
        self._machine = machine
        self._now = machine.monotonic
        self._signer = signer
        self._directory = directory
        self._run_dir = run_dir
        self._key_prefix = key_prefix
        self._index = index
        self._written = ""
        self._incarnation = ""
        self._peers: set[int] = set()
        """Nodes that were announced when this one looked last, itself included."""
        self._put_at = self._warn_at = float("-inf")

    # --- what the index keeps beyond the life of nodes --------------------

    def _in_index(self) -> str:
        """Return the resets that a node put into the index last; empty where they cannot be
        believed."""
        try:
            raw = self._index.node(RECORD_ID)
        except IndexUnavailableError:
            return ""
        if raw is None or not (self._signer is None or self._signer.announced(raw)):
            return ""
        return str(parse_object(raw, ANNOUNCEMENT_BYTES_MAX).get("resets", ""))

    def _put_in_index(self, resets: Resets) -> None:
        """Put the resets into the index, unless all of them are there and will stay for a while."""
        now = self._now()
        there = Resets.unpack(self._in_index())
        if not len(resets) or (not there.news(resets) and now < self._put_at + RESETS_KEPT_S / 4):
            return
        raw = json.dumps({"resets": resets.pack()}).encode()
        raw = raw if self._signer is None else self._signer.announcement(raw)
        self._index.announce(RECORD_ID, raw, RESETS_KEPT_S)
        self._put_at = now

    def unknown_to(
        self, resets: Resets, announcements: Iterable[Announcement]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return resets that others tell of and this node does not know, each once."""
        found: dict[int, tuple[int, ...]] = {}
        served = [
            announcement
            for announcement in announcements
            if announcement.key_prefix == self._key_prefix
        ]
        self._peers = {announcement.node_id for announcement in served}
        told = [announcement.resets for announcement in served]
        for text in (*told, *self._on_file(), self._in_index()):
            if text:
                found.update(resets.news(Resets.unpack(text)))
        return sorted(found.items())

    def _on_file(self) -> Iterable[str]:
        """Yield the resets that nodes of this run directory, alive or not, have on file; this
        node's former start is one of them."""
        for directory in self._machine.node_dirs(self._run_dir):
            kept = directory.kept_resets()
            if kept.get("key_prefix") == self._key_prefix:
                yield str(kept.get("resets", ""))

    # --- what a next start will want to know ------------------------------

    def save(self, resets: Resets) -> None:
        """Write the resets to disk, before anybody is told that this node knows of them."""
        text = resets.pack()
        if text != self._written:
            self._write(text, self._machine.moment())

    def announced(self, incarnation: str, resets: Resets) -> None:
        """Take note that the node was announced in this incarnation of the index."""
        self._incarnation = incarnation
        self._write(resets.pack(), self._machine.moment())
        with suppress(IndexUnavailableError):  # then with the next one
            self._put_in_index(resets)

    def withdrawn(self) -> None:
        """Take note that the announcement is withdrawn: no reset waits for this node then."""
        self._write(self._written, None)

    def _write(self, text: str, announced_at: Moment | None) -> None:
        """Write what is known of resets. Where there is no room for it, nothing stays: a start that
        finds nothing asks the others, and begins empty unless they know. What was written before
        would hide a reset from it."""
        kept = {
            "key_prefix": self._key_prefix,
            "resets": text,
            "incarnation": self._incarnation,
            "announced_at": announced_at.pack().hex() if announced_at else "",
            "peers": sorted(self._peers),
        }
        try:
            self._directory.keep_resets(kept)
        except OSError as e:
            with suppress(OSError):
                self._directory.resets_path.unlink(missing_ok=True)
            now = self._now()
            if now >= self._warn_at:
                self._warn_at = now + WARNED_EVERY_S
                log.warning(
                    "%s cannot be written: %s; a start of this node now might begin empty",
                    self._directory.resets_path,
                    e.strerror,
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
        deadline = self._now() + RESETS_SETTLE_S
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
                apply(core.handle(Reset(NOBODY, 0, number, namespace_ids), self._now()))
            if reached and incarnation and incarnation == kept.get("incarnation"):
                return  # it has forgotten nothing
            if self._now() >= deadline:
                break
            self._machine.sleep(POLL_S)
        # Others say what they know with each heartbeat: by now they have.
        if _counted_on(kept.get("announced_at"), self._machine.moment()):
            return
        if not reached:
            raise ValueError("what was reset meanwhile cannot be learned without the index")
        peers = kept.get("peers")
        others = {*peers} - {core.node_id} if isinstance(peers, list) else {0}
        if others and not others & self._peers:
            raise ValueError("the index has forgotten what was reset, and so has everybody else")


def _counted_on(announced_at: Any, now: Moment) -> bool:
    """Return whether the node's announcement has stood all the time that it was down: then every
    reset has waited for it.

    By a clock that nobody sets, and that goes on while the host is suspended: the index is on
    another one, where the announcement ends by its own clock. One that is set forward there ends
    all announcements at once, and the nodes that live say again within a heartbeat what was reset.
    """
    try:
        since = Moment.unpack(bytes.fromhex(announced_at))
    except (TypeError, ValueError):
        return False
    down_s = passed_s(since, now)
    return down_s is not None and down_s < ANNOUNCEMENT_TTL_S
