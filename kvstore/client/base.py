"""The contract between connectors and the store: blocks in, blocks out, by key.

`BlockStore` is what `connector/` is written against; `kvstore.BlockSession`
implements it over Redis and the memory node of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.client.explanation import FieldDifference, Missing, MissReason
from kvstore.client.reset_result import ResetResult
from kvstore.index.base import Record
from kvstore.keys import Namespace
from kvstore.limits import RESET_TIMEOUT_S
from kvstore.types import Key, PutResult


class BlockRef(NamedTuple):
    """A block that was in the index a moment ago. Plain data: it may cross processes."""

    key: Key
    record: Record
    """Opaque; give it back to `view`."""


class PrefixMatch(list[BlockRef]):
    """The leading blocks that were found, and why there are not more."""

    __slots__ = ("short",)

    def __init__(self, found: Iterable[BlockRef] = (), short: MissReason | None = None) -> None:
        super().__init__(found)
        self.short = short
        """None when every key was found. ABSENT says that the index does not have the next
        one: `BlockStore.why_missing` may know more."""


class LookupResult(list[BlockRef | None]):
    """One answer for each key that was asked for, and what kept the index from answering."""

    __slots__ = ("short",)

    def __init__(
        self, found: Iterable[BlockRef | None] = (), short: MissReason | None = None
    ) -> None:
        super().__init__(found)
        self.short = short
        """None when the index answered: a None among the answers is then an absent block."""


class MissQuery(NamedTuple):
    """One missing block, and what else to look for in its place."""

    block: int
    key: Key
    namespace: Namespace
    key_in: Callable[[Namespace], Key | None]
    """The key of the first block in another namespace; None when nobody can tell. Asked for
    block 0 alone: where earlier blocks are there, the fields were right."""
    others: Sequence[tuple[FieldDifference, Key]] = ()
    """Keys of the first block under other settings."""


class Reservation(NamedTuple):
    """A slot that is this writer's own until it commits, aborts or its process ends."""

    key: Key
    buffer: memoryview
    """Writable shared memory, exactly the size that was asked for (format 'B')."""
    node_id: int
    epoch: int
    slot: int
    generation: int


ReserveAnswer = Reservation | PutResult
"""For a block that is to be saved: where to write it, or what became of it already."""


class PoolMapping(NamedTuple):
    """A segment of a node on this host as this process has mapped it, for who wants to
    page-lock or register its memory."""

    memory: memoryview
    """All its payload, format 'B', read-only or not; stays mapped as long as this is held."""
    part_bytes: int
    """What to lock in one call at most. A block may cross a multiple of it: then no copy may go
    over it in one."""
    writable: bool
    node_id: int
    epoch: int
    """Two mappings with the same two are the same memory."""


class BlockView(Protocol):
    """A block in place, read-only. Copy first, then ask `valid()` (rule 4)."""

    @property
    def buffer(self) -> memoryview:
        """Read-only, format 'B', exactly the length that was saved."""
        ...

    def valid(self) -> bool:
        """True when all that was read from `buffer` so far is the block of this key."""
        ...


class BlockStore(Protocol):
    """Safe to call from several threads. Every call ends within its deadline."""

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> PrefixMatch:
        """The longest leading run of `keys` that can be read from here; one index round trip.

        Never raises for a peer's fault: without the index, what is found in this host's memory.
        `PrefixMatch.short` says why it ends where it does.
        """
        ...

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        """Each of `keys` that can be read from here, None for the others; one index round trip.

        For questions that are no single run, such as which of several writers
        has a block. Never raises for a peer's fault: as `match`.
        """
        ...

    def view(self, found: BlockRef) -> BlockView | None:
        """The block in place, or None when it is not there (any more): a miss."""
        ...

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[BlockView | None]:
        """`view` for each of `found`, in order, each when it is asked for.

        Blocks of other hosts are read together, into `staging` (writable, format 'B') as far
        as it has room; their views are good until it is used again. None makes
        memory for them. `timeout_s` bounds what all of them wait for other hosts.
        """
        ...

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[Reservation | PutResult]:
        """Ask the nodes of this host for a slot per key; one request to each that is to have some.

        A key that needs no writing comes back as its `PutResult` (exists, in
        progress by another, rejected and why). Raises `NodeUnavailableError` or
        `DeadlineError`; then nothing is reserved for the caller.
        """
        ...

    def commit(self, reservations: Sequence[Reservation]) -> list[PutResult]:
        """The bytes are in place: seal and publish; one request.

        Raises `NodeUnavailableError` or `DeadlineError`; then what became of the
        blocks is unknown and the buffers must not be written any more.
        """
        ...

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back unwritten. Never raises for a peer's fault."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Say that blocks were used: coalesced, one way, never waits."""
        ...

    def pin(self, keys: Sequence[Key]) -> list[BlockRef | None]:
        """Keep blocks of this host's nodes where they are; no index.

        A pinned block is not evicted until as many `unpin`s, `close` or the end of
        this process; `clear` still makes it a miss. None where no node here has
        such a block or this store holds as many pins as it may
        (`Limits.pins_per_client`). Raises `NodeUnavailableError` or `DeadlineError`;
        then nothing is pinned.
        """
        ...

    def unpin(self, found: Sequence[BlockRef]) -> None:
        """Let pinned blocks go, each once. Never raises for a peer's fault; what cannot be
        said to the node now is said when it is reached again."""
        ...

    def clear(self, namespace_id: int) -> int:
        """Drop every block of a namespace on the nodes of this host; returns how many.

        Raises `NodeUnavailableError` or `DeadlineError`.
        """
        ...

    def reset(
        self, namespace_ids: Sequence[int], timeout_s: float = RESET_TIMEOUT_S
    ) -> ResetResult:
        """Drop every block of these namespaces on all nodes, wherever they are.

        Waits until all have confirmed it, at most `timeout_s`; the answer says who has not.
        Raises `NodeUnavailableError` or `DeadlineError` when there are nodes and none could
        be told.
        """
        ...

    def read_bytes(self) -> Mapping[str, int]:
        """Payload bytes that were read, or given out to be read in place, by transport."""
        ...

    def mappings(self) -> Sequence[PoolMapping]:
        """What of this host's memory blocks are read from and written to in place, now.

        Finds the nodes of this host if nobody has yet, but starts none. Never raises for a peer's
        fault: what is not there is not among them.
        """
        ...

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """Say which namespaces this store will save to: nodes then know what their ids stand
        for, and can explain a miss. Contacts nobody yet."""
        ...

    def why_missing(self, question: MissQuery) -> Missing:
        """Ask the index and the nodes of this host why a block is not there; for people.

        Never raises for a peer's fault, and ends within twice the deadline of a request.
        """
        ...

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        ...
