"""Does the rest of `scripts/starved` beside looking up: reads, saves, publishes, asks Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from connector.layout.geometry import StoreLayout
from kvstore import BlockRef, BlockSession, KVStoreError, LookupResult, PutResult, Reservation
from kvstore.client.missing.explanation import reason_of
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index
from kvstore.keys import Namespace
from kvstore.types import Key

SAVED_BLOCKS = 8
SAVED_BYTES = 16 << 10
"""Of each; more than what travels in a request, so that a save is a reserve, a copy, a commit."""
SAVES_KEPT = 64
"""Before they are cleared, so that the node stays a small one."""
PUBLISHED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.05


class Elsewhere:
    """Wraps a store so that it finds nothing on this host: the index is asked for every block, as
    for those of other hosts."""

    def __init__(self, session: BlockSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        answers = LookupResult([None] * len(keys))
        try:
            for i, record in enumerate(self._session.lookups.readable(keys) if timeout_s else ()):
                answers[i] = None if record is None else BlockRef(keys[i], record)
        except IndexUnavailableError as e:
            answers.short = reason_of(e)
        return answers


def read(session: BlockSession, keys: Sequence[Key], expected: bytes) -> str:
    """Return why not all of `keys` could be read; empty when they could."""
    found = session.match(keys)
    if len(found) < len(keys):
        return str(found.short)
    for view in session.views(found, None):
        if view is None or bytes(view.buffer) != expected or not view.valid():
            return "not readable"
    return ""


class Saves:
    """Saves under a namespace of its own, and counts what is not published in the end."""

    def __init__(self, session: BlockSession, reader: BlockSession, patient: Index) -> None:
        self.unpublished = 0
        self._session = session
        self._reader = reader
        self._patient = patient
        self._namespace = Namespace.named("starved saves")
        self._kept: list[Key] = []

    def save(self) -> str:
        """Return why not all was saved and could be read; empty when it could."""
        keys = [self._namespace.value_key(os.urandom(8).hex()) for _ in range(SAVED_BLOCKS)]
        payload = os.urandom(SAVED_BYTES)
        try:
            answers = self._session.reserve(keys, SAVED_BYTES, self._namespace.id)
            refused = [answer for answer in answers if isinstance(answer, PutResult)]
            if refused:
                return f"reserve: {refused[0].reason}"
            slots = [slot for slot in answers if isinstance(slot, Reservation)]
            for slot in slots:
                slot.buffer[:] = payload
            refused = [one for one in self._session.commit(slots) if not one]
            if refused:
                return f"commit: {refused[0].reason}"
        except KVStoreError as e:
            return type(e).__name__
        self._kept += keys
        return read(self._reader, keys, payload)

    def tidy(self) -> str:
        """Clear what was saved, when it has become much and is published. Return why that
        failed."""
        if len(self._kept) < SAVES_KEPT * SAVED_BLOCKS:
            return ""
        self.settle()
        try:
            self._session.clear(self._namespace.id)
        except KVStoreError as e:
            return f"clear: {type(e).__name__}"
        return ""

    def settle(self) -> None:
        """Wait for the records of what was saved, and count those that do not come."""
        kept, self._kept = self._kept, []
        give_up_at = time.monotonic() + PUBLISHED_WITHIN_S
        while missing := [
            k for k, r in zip(kept, self._patient.lookup(kept), strict=True) if not r
        ]:
            if time.monotonic() >= give_up_at:
                self.unpublished += len(missing)
                return
            time.sleep(0.05)


def prompt_keys(layout: StoreLayout, hashes: Sequence[bytes]) -> list[Key]:
    (namespace,) = layout.groups[0].namespaces
    return namespace.engine_keys(hashes, layout.hashes_per_key)
