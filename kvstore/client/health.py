"""Tells people, logs and probes whether the index and the nodes of this host do their part."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index, patient
from kvstore.index.outage import GuardedIndex
from kvstore.limits import INDEX_LOOKED_AFTER_EVERY_S, INDEX_WARNED_EVERY_S
from kvstore.machine import REAL, Clock
from kvstore.types import KEY_BYTES

log = logging.getLogger("kvstore.client")

DISK_CLOSED = "%d of its disks does not work: its log says why"
NO_KEY = bytes(KEY_BYTES)
"""The key of no block: asking for it needs the rights that a lookup needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What works now, as a round trip to each showed. Truthy when all of it does."""

    index: str
    """Why Redis cannot be asked; empty when it answers."""
    nodes: Mapping[str, str]
    """By name, for each memory node that lives on this host: what is wrong with it, or nothing.
    Without any, values go to other hosts, or the first save starts the embedded node."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The same for the nodes of other hosts, and why this client cannot read them. That is no
    fault while one of them, or a node of this host, can be."""

    disks: Mapping[str, str] = field(default_factory=dict)
    """By name, for nodes of this host of which a disk does not work: how many; or why this process
    cannot read one. That is no fault: it costs misses."""

    def __bool__(self) -> bool:
        alone = not self.nodes and len(self.others) > 0 and all(self.others.values())
        return not (self.index or any(self.nodes.values()) or alone)

    def __str__(self) -> str:
        wrong = [f"index: {self.index}"] if self.index else []
        wrong += [f"node {name}: {why}" for name, why in self.nodes.items() if why]
        right = "healthy" if self.nodes else "healthy, with no memory node on this host"
        said = wrong if not self else [right]
        said += [
            f"node {name}: {why}"
            for name, why in (*self.others.items(), *self.disks.items())
            if why
        ]
        return "; ".join(said)


def ask_index(index: Index) -> None:
    """Ask with the rights of a lookup, behind the breakers, and with patience: an index that is
    slow for a moment must not be taken for away. Raises `IndexUnavailableError`."""
    if isinstance(index, GuardedIndex):
        index = index.index
    with patient():
        index.ping()
        index.lookup([NO_KEY])


class IndexWatch:
    """Warns of an index that cannot be asked, also when nobody asks it: a get is then a miss
    and a put is found by nobody else, and neither says so."""

    def __init__(self, index: Index, now: Clock = REAL.monotonic) -> None:
        self._index = index
        self._now = now
        self._look_at = 0.0
        self._warn_at = 0.0
        self._failing = False
        self._closed = False

    def close(self) -> None:
        """Warn no more: what fails from here on does so because the client was closed."""
        self._closed = True

    def look(self, now: float) -> None:
        """Ask the index, at most once every `INDEX_LOOKED_AFTER_EVERY_S`."""
        if now < self._look_at:
            return
        self._look_at = now + INDEX_LOOKED_AFTER_EVERY_S
        try:
            ask_index(self._index)
        except IndexUnavailableError as e:
            self.failed(e)
            return
        if self._failing:
            self._failing, self._warn_at = False, 0.0
            log.info("the index answers again")

    def failed(self, error: IndexUnavailableError) -> None:
        """Warn of `error`, at most once every `INDEX_WARNED_EVERY_S`."""
        now = self._now()
        self._failing = True
        if now < self._warn_at or self._closed:
            return
        self._warn_at = now + INDEX_WARNED_EVERY_S
        log.warning(
            "the index cannot be asked: only blocks of this host are found, and nothing that is "
            "saved here is found elsewhere: %s",
            error,
        )
