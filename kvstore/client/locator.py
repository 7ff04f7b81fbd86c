"""Tells routers where blocks are, by the index alone: they read none of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Self

from kvstore.batches import in_batches
from kvstore.client.arguments import Uncopied
from kvstore.client.explanation import MissReason, reason_of
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.compiled.key_set import split_keys
from kvstore.config_file import read_config
from kvstore.errors import IndexUnavailableError
from kvstore.index.open import OpenedIndex, open_guarded
from kvstore.limits import BATCH_KEYS_MAX, Limits
from kvstore.record import RecordSigner, node_start_of, unpack_record
from kvstore.rundir import run_dir as default_run_dir
from kvstore.secret import SIGNING_KEY, secret
from kvstore.types import Key, StrPath


class Holder(NamedTuple):
    """A memory node that is announced in the index."""

    name: str
    """Unique on its host."""
    host: str


class Holders(list[Holder]):
    """Who holds each leading block, in the order of the keys, and why there are not more."""

    __slots__ = ("short",)

    def __init__(self, short: MissReason | None = None) -> None:
        super().__init__()
        self.short = short
        """None when every key has a holder."""


class HolderRun(NamedTuple):
    """Blocks one after the other that one node holds."""

    holder: Holder
    blocks: int


class HolderRuns(list[HolderRun]):
    """The same as `Holders`, without an object for each block."""

    __slots__ = ("short",)

    def __init__(self, short: MissReason | None = None) -> None:
        super().__init__()
        self.short = short

    @classmethod
    def of(cls, holders: Holders) -> Self:
        """Return the runs of what holds each block."""
        runs = cls(holders.short)
        runs.extend(HolderRun(holder, len(list(run))) for holder, run in groupby(holders))
        return runs

    @property
    def blocks(self) -> int:
        """Blocks of all runs together."""
        return sum(run.blocks for run in self)


class Locator(Uncopied):
    """Tells which nodes hold the leading blocks of a prompt. Thread-safe.

    Needs the index and nothing else: no node on this host, no shared memory. What
    it says is a hint (rule 7). `url` and `signing_key` as for `Client`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key_prefix: str = "kv:default",
        run_dir: StrPath | None = None,
        limits: Limits | None = None,
        signing_key: str | bytes | None = None,
    ) -> None:
        key = secret(SIGNING_KEY, signing_key)
        self._signer = RecordSigner(key, key_prefix) if key else None
        where = default_run_dir(run_dir)
        self._opened: OpenedIndex = open_guarded(
            url,
            key_prefix=key_prefix,
            run_dir=where,
            limits=limits or read_config().limits(),
        )
        self._index = self._opened.index
        self._nodes = NodeDirectory(where, self._index, key_prefix, use=False, signer=self._signer)
        """Of its own, though a session has one: a router has no session, and whether it could reach
        a node itself is nothing to it."""

    def leading(self, keys: Sequence[Key] | bytes) -> Holders:
        """Return the holders of the longest leading run of `keys`, one each. `keys` may be the
        bytes of all, one after the other.

        One round trip for every `BATCH_KEYS_MAX` keys, and one for each node not heard of
        for `NODE_BELIEVED_S`. Never raises for a peer's fault: the run is shorter then.
        """
        holders = Holders()
        known: dict[bytes, Holder | None] = {}
        """By node and start of it, as records have them: a prompt's blocks are on few."""
        try:
            for batch in in_batches(split_keys(keys), BATCH_KEYS_MAX):
                run = self._index.match(batch)
                for key, record in zip(batch, run, strict=False):
                    start = node_start_of(key, record)
                    if start is None or (self._signer and not self._signer.right(key, record)):
                        holders.short = MissReason.NODE_DEAD
                        return holders
                    if start not in known:
                        known[start] = self._holder(key, record)
                    holder = known[start]
                    if holder is None:
                        holders.short = MissReason.NODE_DEAD
                        return holders
                    holders.append(holder)
                if len(run) < len(batch):
                    holders.short = MissReason.ABSENT
                    break
        except IndexUnavailableError as e:
            holders.short = reason_of(e)
        return holders

    def _holder(self, key: Key, record: bytes) -> Holder | None:
        """None when the record is of a node, or a start of one, that is over."""
        location = unpack_record(key, record)
        if location is None:
            return None
        node = self._nodes.node(location.node_id, time.monotonic()).announcement
        if node is None or node.epoch != location.epoch:
            return None
        return Holder(node.name, node.host)

    def close(self) -> None:
        """Give connections back. Safe to call twice."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
