"""Opens the index at a URL, or the embedded one, behind circuit breakers."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import NO_DESCRIPTORS, IndexUnavailableError
from kvstore.index.base import Index
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.limits import Limits
from kvstore.system.on_failure import on_failure

if TYPE_CHECKING:
    from kvstore.index.embedded_redis.server import EmbeddedRedis

URL_VARIABLE = "KVSTORE_URL"


class OpenedIndex:
    """An index behind a circuit breaker and, when nobody named one, the embedded Redis it is in."""

    def __init__(self, index: Index, url: str, embedded: EmbeddedRedis | None) -> None:
        self.index = index
        self.url = url
        self._embedded = embedded

    @property
    def embedded(self) -> bool:
        return self._embedded is not None

    def close(self) -> None:
        """Close it. Safe to call twice."""
        self.index.close()
        if self._embedded is not None:
            self._embedded.close()


def open_guarded(
    url: str | None,
    *,
    key_prefix: str,
    run_dir: Path,
    limits: Limits,
    waits_first: bool = True,
) -> OpenedIndex:
    """Open `url`, else KVSTORE_URL, else the embedded Redis of `run_dir`. `waits_first` is that of
    `GuardedIndex`.

    A named server need not be up: calls then raise `IndexUnavailableError`. Raises
    `UsageError` for a bad URL and what `EmbeddedRedis.acquire` raises.
    """
    url = url or os.environ.get(URL_VARIABLE) or None
    embedded = None
    if url is None:
        try:
            from kvstore.index.embedded_redis.server import EmbeddedRedis
        except OSError as e:
            remedy = NO_DESCRIPTORS if e.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise IndexUnavailableError(f"no embedded Redis: {e.strerror}: {remedy}") from e
        embedded = EmbeddedRedis.acquire(run_dir)
    with on_failure(embedded.close) if embedded is not None else nullcontext():
        where = embedded.url if embedded is not None else url or ""
        index = open_index(
            where,
            key_prefix=key_prefix,
            timeout_s=limits.redis_timeout_s,
            publish_timeout_s=limits.publish_timeout_s,
        )
    return OpenedIndex(GuardedIndex(index, waits_first=waits_first), where, embedded)
