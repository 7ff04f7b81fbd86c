"""Defines the contract between connectors and the store: blocks in, blocks out, by key.

`BlockStore` is what `connector/` is written against; `kvstore.spi.BlockSession`
implements it over Redis and the memory node of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kvstore.client.explanation import FieldDifference, Missing, MissReason
from kvstore.index.base import Record
from kvstore.keys import Namespace
from kvstore.limits import RESET_TIMEOUT_S
from kvstore.types import Key, PutResult, Retained, Tier

if TYPE_CHECKING:
    from kvstore.cuda.base import Buffer, DeviceRange

T = TypeVar("T")
Later = Callable[[], list[T]]
"""What becomes of each of the blocks of a request that was sent; waits until it is known."""


class BlockRef(NamedTuple):
    """A block that was in the index, or on this host, a moment ago. Plain data: it may cross
    processes."""

    key: Key
    record: Record
    """Opaque; give it back to `view`."""


class PrefixMatch(list[BlockRef]):
    """The leading blocks that were found, and why there are not more."""

    short: MissReason | None = None
    """None when every key was found. ABSENT says that the index does not have the next one:
    `BlockStore.why_missing` may know more."""


class LookupResult(list[BlockRef | None]):
    """One answer for each key that was asked for, and what kept the index from answering for
    those that are missing."""

    short: MissReason | None = None
    """None when the index answered: a None among the answers is then an absent block, or one whose
    node is out of reach. Another cause for which this client cannot read a block is named."""


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
    """Memory that is this writer's own until it commits, aborts or its process ends."""

    key: Key
    buffer: memoryview
    """Writable, exactly the size that was asked for (format 'B')."""
    saver: Saver[Reservation]
    """Who granted it, and alone can take it back."""
    node_id: int
    epoch: int
    slot: int
    generation: int
    """These four are what `saver` knows it by: a slot, where there is one."""


class DeviceReservation(NamedTuple):
    """`Reservation` of memory of a CUDA device."""

    key: Key
    buffer: DeviceRange
    """Exactly the size that was asked for."""
    saver: Saver[DeviceReservation]
    slot: int
    generation: int


AnyReservation = Reservation | DeviceReservation
R_contra = TypeVar("R_contra", bound=AnyReservation, contravariant=True)
ReserveAnswer = Reservation | PutResult
"""For a block that is to be saved: where to write it, or what became of it already."""


class Saver(Protocol[R_contra]):
    """What takes the blocks of one place: a node of this host, nodes of other hosts, or the pool
    in VRAM of this process. Thread-safe.

    It grants reservations (each kind is asked for them in its own way) and takes each back once,
    by a commit or an abort. Until then the memory is its writer's, whatever the saver does or
    fails at (rule 5). `client/nodes/saving/savers.py` divides what is of several.
    """

    def commit_later(self, reservations: Sequence[R_contra]) -> Later[PutResult]:
        """`BlockStore.commit` of what this saver granted, in two steps: sent now, answered when
        called. Either may raise what `commit` raises.

        A reservation that was taken back before, or is of a former start, is REJECTED, or all of
        the call raises `NodeUnavailableError`; it never seals what another writer has.
        """
        ...

    def abort(self, reservations: Sequence[R_contra]) -> None:
        """Take back unwritten. Never raises for a peer's fault; what was taken back before is
        passed over."""
        ...


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
    def buffer(self) -> Buffer:
        """Exactly the length that was saved. A memoryview is read-only, format 'B'."""
        ...

    def valid(self) -> bool:
        """True when all that was read from `buffer` so far is the block of this key."""
        ...


class HostView(BlockView, Protocol):
    """A `BlockView` in the host's memory."""

    @property
    def buffer(self) -> memoryview: ...


class BlockStore(Protocol):
    """Finds, reads and saves blocks, wherever they are. Safe to call from several threads. Every
    call ends within its deadline."""

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> PrefixMatch:
        """Return the longest leading run of `keys` that can be read from here, as far as it was
        found.

        This host's memory is looked through first, without a wait or a deadline; the index is
        asked from the first key that is missing there, in at most one round trip.
        `timeout_s` bounds that: the part of the answer that comes later counts as absent. With
        0 the index is not asked, and no miss is counted.

        Each block was sealed on this host, or in the index, at some moment of this call: each
        for itself, not all at one moment, and one of this host before the index knew of it or
        after it had lost it. A hint either way (rule 7): whoever reads checks (rule 4).

        Never raises for a peer's fault: without the index, what is found in this host's memory.
        `PrefixMatch.short` says why it ends where it does.
        """
        ...

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        """Return each of `keys` that can be read from here, None for the others.

        For questions that are no single run, such as which of several writers
        has a block. Promises what `match` does, and asks the index for the missing keys alone.
        """
        ...

    def tiers(self, found: Sequence[BlockRef]) -> list[Tier]:
        """Return where each of `found` lies, by its record and by what is mapped here. Asks nobody
        and waits for nothing: for metrics."""
        ...

    def sources(self, found: Sequence[BlockRef]) -> list[str]:
        """Return what each of `found` would be read from, as a name by which speeds are kept: its
        tier, followed by a colon and the start of its node where that is not this host's memory.
        Asks nobody, like `tiers`."""
        ...

    def view(self, found: BlockRef) -> BlockView | None:
        """Return the block in place, or None when it is not there (any more): a miss."""
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
    ) -> Sequence[AnyReservation | PutResult]:
        """Ask the nodes of this host for a slot per key; one request to each that is to have some.

        A key that needs no writing comes back as its `PutResult` (exists, in
        progress by another, rejected and why). Raises `NodeUnavailableError` or
        `DeadlineError`; then nothing is reserved for the caller.
        """
        ...

    def commit(self, reservations: Sequence[AnyReservation]) -> list[PutResult]:
        """The bytes are in place: seal and publish; one request to each saver.

        Raises `NodeUnavailableError` or `DeadlineError` when none answers, else what one that
        does not would have sealed is REJECTED; either way it may be sealed all the same, and the
        buffers must not be written any more.
        """
        ...

    def abort(self, reservations: Sequence[AnyReservation]) -> None:
        """Give slots back unwritten. Never raises for a peer's fault."""
        ...

    def touch(self, keys: Sequence[Key], *, saved: bool = False, left: bool = False) -> None:
        """Say that blocks were read, or `saved` together, which only keeps the order of their
        prefix, or `left`, so that they are evicted first: coalesced, one way, never waits."""
        ...

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        """Ask nodes whether these blocks were read since they were stored; waits as `why_missing`
        does. False: evicted, and nobody is known to have read it. None: unread, or nobody knows.
        Empty when no node answered."""
        ...

    def report(self, counts: Mapping[str, int]) -> bool:
        """Tell one node of this host what an engine has counted since the last time, by name
        (core/outgoing/watched.py), for its metrics: one way, never waits. False when none was."""
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

    def retain(self, keys: Sequence[Key], for_s: int, tenant: str = "") -> list[Retained]:
        """Keep blocks of this host's nodes from being evicted for `for_s` seconds, whatever
        becomes of this client or of the node's process; what became of each wish. 0 ends it.

        It is paid from the budget of `tenant` on each node (`Limits`). To ask again makes the time
        longer, never shorter. Who drops or clears a block ends it all the same. Raises
        `UsageError`, and `NodeUnavailableError` or `DeadlineError` when a node that may have one
        of the blocks did not answer: some may be retained then.
        """
        ...

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        """Drop blocks: on the nodes of this host, and one that is not there on the node of another
        host that the index names. Which of `keys` were there.

        Also what is pinned or retained is a miss from then on. Raises `NodeUnavailableError` or
        `DeadlineError` when a node that may have one of them could not be asked; the others are
        dropped then.
        """
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
        """Return what of this host's memory blocks are read from and written to in place, now.

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
        """Give everything back but memory that somebody still has a view of. Safe to call
        twice."""
        ...


class HostBlockStore(BlockStore, Protocol):
    """A `BlockStore` whose buffers are all in the host's memory."""

    def view(self, found: BlockRef) -> HostView | None: ...

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[HostView | None]: ...

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[ReserveAnswer]: ...
