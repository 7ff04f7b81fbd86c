"""Defines what can happen to a node, and what it does about it. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, get_args

from kvstore.core.answers import Answer, Begin, SpillBlock
from kvstore.keys import Namespace
from kvstore.record import BlockParts
from kvstore.types import DiskBlock, Key

NOBODY = -1
"""Stands in place of a session's number for an event that no client has asked for."""
ELSEWHERE = 0
"""The same, for clients on other hosts."""


class Reserve(NamedTuple):
    """Ask for slots. `values[i]`, when not None, is the whole value: no commit follows."""

    session: int
    request: int
    keys: Sequence[Key]
    sizes: Sequence[int]
    namespace_id: int
    kinds: Sequence[int]
    meta_lengths: Sequence[int]
    values: Sequence[bytes | None]
    checksums: Sequence[int]
    """xxh3-64 of each value inside the request; 0 where none was computed."""


class Commit(NamedTuple):
    """Seal these (slot, generation, checksum), whose bytes are in place."""

    session: int
    request: int
    items: Sequence[tuple[int, int, int]]
    goes_on: bool = False
    """It is part of a larger event and comes before the part that was handled last (parts.py)."""


class Abort(NamedTuple):
    """Free these reserved (slot, generation) of the session, unwritten."""

    session: int
    request: int
    items: Sequence[tuple[int, int]]


class Pin(NamedTuple):
    """Keep the blocks of these keys from being evicted or moved, once more for this session."""

    session: int
    request: int
    keys: Sequence[Key]


class Unpin(NamedTuple):
    """Count down, by one each, what this session has pinned: (slot, generation)."""

    session: int
    request: int
    items: Sequence[tuple[int, int]]
    goes_on: bool = False
    """As in `Commit`."""


class Retain(NamedTuple):
    """Keep the blocks of these keys from being evicted for `ttl_s`; 0 ends that (retained.py)."""

    session: int
    request: int
    keys: Sequence[Key]
    ttl_s: int
    tenant: int
    """The tenant whose budget it takes; 32 bits."""


class Touch(NamedTuple):
    """Note that the blocks of these keys were used; one way."""

    session: int
    keys: Sequence[Key]
    goes_on: bool = False
    """As in `Commit`."""
    saved: bool = False
    """A save says so, for the order of its prefix: nobody has read them."""
    left: bool = False
    """They are not used: what they are needed for goes on elsewhere, so they go first."""


class EngineCounts(NamedTuple):
    """An engine of this host has counted so many tokens, by name (watched.py); one way."""

    session: int
    counts: Mapping[str, int]


class Drop(NamedTuple):
    """Drop the blocks of these keys; the answer says which were there."""

    session: int
    request: int
    keys: Sequence[Key]


class Clear(NamedTuple):
    """Drop every block of one namespace; the answer says how many there were."""

    session: int
    request: int
    namespace_id: int
    swept: bool = False
    """Every `Sweep` of it was carried out: only the answer is left."""


class Sweep(NamedTuple):
    """Carry out a part of `Clear` or `Reset`: of these keys, drop the blocks of these namespaces,
    of all when there are none; the answer says how many there were."""

    session: int
    request: int
    keys: Sequence[Key]
    namespace_ids: Sequence[int]
    number: int = 0
    """The reset's number, if another node told of it. A number that is known is not carried out
    again."""


class Reset(NamedTuple):
    """Drop every block of these namespaces, of all when there are none, and know it by a number.

    Of a client `number` is a wish: the answer has the number that it got.
    """

    session: int
    request: int
    number: int
    namespace_ids: Sequence[int]
    swept: bool = False
    """As in `Clear`. The reset is known from here on, and not earlier: a node that is killed among
    its parts carries out all of it when it starts again."""


class Stat(NamedTuple):
    """Ask for the node's counters (core/report.py)."""

    session: int
    request: int


class Listing(NamedTuple):
    """Ask for a page of the sealed blocks: up to `at_most` behind the key `after`, which may be
    empty; an empty page is the end. What a sequence of pages promises: core/memory/listed.py."""

    session: int
    request: int
    after: bytes
    at_most: int


class Explain(NamedTuple):
    """Ask what became of each of `keys` here; the answer is in core/report.py."""

    session: int
    request: int
    keys: Sequence[Key]


class Introduce(NamedTuple):
    """Tell what the id of a namespace stands for; one way."""

    session: int
    namespace: Namespace


class Named(NamedTuple):
    """Tell what users call the values under these keys; one way."""

    session: int
    keys: Sequence[Key]
    names: Sequence[bytes]


class Suspect(NamedTuple):
    """Report that a client read bytes of these keys that do not have the checksum saved with them;
    one way.

    The node checks for itself: see `CheckSlot`.
    """

    session: int
    keys: Sequence[Key]


class Coldest(NamedTuple):
    """Pin for this session what was used least lately, at most so many blocks and only as many
    as are needed for `free_bytes` to be free; core/demotion.py."""

    session: int
    request: int
    free_bytes: int
    at_most: int


class Retire(NamedTuple):
    """Unpin and free these (slot, generation) of `Coldest`, which were moved down a tier or are
    evicted."""

    session: int
    request: int
    items: Sequence[tuple[int, int]]


class Spill(NamedTuple):
    """Ask what is to be written to the node's disks, at most so many bytes at a time; the answer is
    a `SpillPlan`. This and what follows is how the threads of disks speak; core/disk/tier.py."""

    session: int
    request: int
    at_most_bytes: int
    devices: tuple[int, ...] = ()
    """Those that the thread has to do with; all when there are none."""


class Spilled(NamedTuple):
    """Tell which of these blocks were written, with their checksums; None in place of one that was
    not."""

    session: int
    request: int
    blocks: Sequence[SpillBlock]
    written: Sequence[DiskBlock | None]
    failed: bool = False
    """The device failed meanwhile: what is not written may be there all the same."""


class Vacate(NamedTuple):
    """Give up these blocks of a region that is about to be begun. The answer lists those that are
    to be written again, with their places in the new lap."""

    session: int
    request: int
    begin: Begin
    blocks: Sequence[DiskBlock]


class Begun(NamedTuple):
    """A region was begun, after all of its former blocks were given up; or it could not be, and is
    not tried again in this run."""

    session: int
    request: int
    begin: Begin
    done: bool = True


class DiskFound(NamedTuple):
    """A device was opened. It is written to once its last block was told (`DiskAdopted`)."""

    session: int
    request: int
    device: int
    uuid: bytes
    first_pages: Sequence[int]
    """For each region its first disk page for payloads."""
    region_pages: int
    """Disk pages for payloads in a region."""
    region_entries: int
    laps: Sequence[int]
    """For each region the lap that its header names; 0: it was never begun."""
    next_lap: int
    """The first lap that was not given out yet."""


class DiskAdopted(NamedTuple):
    """Blocks that a former start wrote to a device may be read again; the answer is how many of
    them are. `last`: these were all."""

    session: int
    request: int
    device: int
    blocks: Sequence[DiskBlock]
    last: bool = False


class DiskDamaged(NamedTuple):
    """A block on a disk cannot be read, or does not have its checksum."""

    session: int
    request: int
    block: DiskBlock


class DiskClosed(NamedTuple):
    """A device takes nothing any more: it failed, or could not be opened."""

    session: int
    request: int
    device: int


class Promoted(NamedTuple):
    """Seal what was read from a disk into these reserved (slot, generation, checksum), unless
    something was cleared since the plan that named it (`SpillPlan.clears`): then they are free."""

    session: int
    request: int
    items: Sequence[tuple[int, int, int]]
    clears: int


class Corrupt(NamedTuple):
    """Report that the node's own check of a slot found a wrong checksum."""

    slot_id: int
    generation: int


class SessionResumed(NamedTuple):
    """A client is back on a new connection and holds only these.

    Whatever else is reserved or pinned for it was granted in answers it never saw (or gave up on),
    so it cannot be writing there.
    """

    session: int
    reserved: Mapping[int, int]
    """Slot -> its generation."""
    pinned: Mapping[int, int]
    """Slot -> how many times it is pinned."""
    slots: Sequence[int] | None = None
    """The slots that this part of the event is about; None for all."""


class SessionDead(NamedTuple):
    """A client's process is known to be dead (rule 5), not merely disconnected."""

    session: int
    slots: Sequence[int] | None = None
    """The slots that this part of the event is about; None for all, and then the session is
    forgotten."""


class Expire(NamedTuple):
    """Time has passed: the life of a block may be over."""


DiskRequest = Spill | Spilled | Vacate | Begun | DiskFound | DiskAdopted | DiskDamaged | DiskClosed
"""What the threads of disks ask (core/disk/tier.py)."""
DISK_REQUESTS: tuple[type, ...] = get_args(DiskRequest)
Request = (
    Reserve
    | Commit
    | Abort
    | Pin
    | Unpin
    | Retain
    | Drop
    | Clear
    | Sweep
    | Reset
    | Stat
    | Listing
    | Explain
    | Coldest
    | Retire
    | DiskRequest
    | Promoted
)
"""The events that have an answer (answers.py)."""
Event = (
    Request
    | Touch
    | EngineCounts
    | Introduce
    | Named
    | Suspect
    | Corrupt
    | Expire
    | SessionResumed
    | SessionDead
)


class Mark(NamedTuple):
    """Write one header word: state and generation, in a single 8-byte store."""

    slot_id: int
    state: int
    generation: int
    granule: int = 0
    """Number of the granule within its page at which the slot begins."""
    size: int = 0
    """Size in granules, while RESERVED: a restarted node must know how far the writer may write."""


class Bounds(NamedTuple):
    """Note what a restarted node must know without a look at every header."""

    generation: int
    """The generation of no slot is higher, or will be before the next `Bounds`."""
    used_below: int
    used_from: int
    """Between `used_below` and this page no page was ever part of a slot."""


class Hold(NamedTuple):
    """Note whether clients have a slot pinned: a restarted node must not reuse it."""

    slot_id: int
    held: bool


class Keep(NamedTuple):
    """Note until when a slot's block is retained, and for whom: restarts go on with it."""

    slot_id: int
    until_s: int
    """The second of the node's clock until which it stays; 0: it is not retained."""
    tenant: int
    """`NO_TENANT` means that it is not retained, and its life ends at `until_s`."""


class Seal(NamedTuple):
    """Write a whole header: body first, the word that says SEALED last."""

    slot_id: int
    generation: int
    key: Key
    length: int
    granule: int
    """Number of the granule within its page at which the slot begins."""
    kind: int
    meta_length: int
    checksum: int
    namespace_id: int


class Fill(NamedTuple):
    """Copy a value from its request into its slot."""

    offset: int
    value: bytes


class Copy(NamedTuple):
    """Copy bytes within the segment, because a retained block moves. The two ranges do not
    overlap."""

    source: int
    destination: int
    length: int


class CheckSlot(NamedTuple):
    """Compare the checksum of a sealed payload; if it is wrong, the next event is `Corrupt`."""

    slot_id: int
    generation: int
    offset: int
    length: int
    checksum: int


class Reply(NamedTuple):
    """Send the answer to one request of a session."""

    session: int
    request: int
    body: Answer
    after_publish: bool
    """Hold the answer until the pending index work was tried once, so that a put that says stored
    is found by the next get."""
    after_log: bool = False
    """Hold the answer until what was forbidden up to now is durable (core/disk/base.py)."""


mark_of: Callable[[tuple[int, int, int, int, int]], Mark] = partial(tuple.__new__, Mark)
"""Does what `Mark(...)` does with all its parts, without unpacking them: there is one for each
block."""
seal_of: Callable[[BlockParts], Seal] = partial(tuple.__new__, Seal)
"""Does the same for a `Seal`."""
Write = Mark | Seal | Fill | Copy | Hold | Keep | Bounds


class Effects(NamedTuple):
    """What a node must do now, in this order: the writes one by one, then the replies."""

    writes: list[Write]
    replies: list[Reply]
    checks: list[CheckSlot]
    """Checks to make beside all that, in any order."""
