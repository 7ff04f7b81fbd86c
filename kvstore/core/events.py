"""Defines what can happen to a node, and what it does about it. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.core.answers import Answer
from kvstore.keys import Namespace
from kvstore.record import BlockParts
from kvstore.types import Key

NOBODY = -1
"""In place of a session's number: an event that no client has asked for."""


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
    """xxh3-64 of each value that came along; 0 where none was computed."""


class Commit(NamedTuple):
    """The bytes are in place in these (slot, generation, checksum)."""

    session: int
    request: int
    items: Sequence[tuple[int, int, int]]
    goes_on: bool = False
    """It is the part of a larger one before the part that came before it (parts.py)."""


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
    """Keep the blocks of these keys from being evicted for so long; 0 ends that (retained.py)."""

    session: int
    request: int
    keys: Sequence[Key]
    ttl_s: int
    tenant: int
    """On whose budget; 32 bits."""


class Touch(NamedTuple):
    """The blocks of these keys were used; one way."""

    session: int
    keys: Sequence[Key]
    goes_on: bool = False
    """As in `Commit`."""


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
    """A part of `Clear` or `Reset`: of these keys, drop the blocks of these namespaces, of all when
    there are none; the answer says how many there were."""

    session: int
    request: int
    keys: Sequence[Key]
    namespace_ids: Sequence[int]
    number: int = 0
    """Of the reset, when another node told of it: one that is known by now is not done again."""


class Reset(NamedTuple):
    """Drop every block of these namespaces, of all when there are none, and know it by a number.

    Of a client `number` is a wish: the answer has the number that it got.
    """

    session: int
    request: int
    number: int
    namespace_ids: Sequence[int]
    swept: bool = False
    """As in `Clear`; it is known from here on, and not before: a node that is killed among its
    parts drops all of it when it starts again."""


class Stat(NamedTuple):
    """Ask for the node's counters (core/report.py)."""

    session: int
    request: int


class Listing(NamedTuple):
    """A page of the sealed blocks: up to `at_most` behind the key `after`, which may be empty; an
    empty one is the end. What a sequence of pages promises: core/memory/listed.py."""

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
    """What the id of a namespace stands for; one way."""

    session: int
    namespace: Namespace


class Named(NamedTuple):
    """What users call the values under these keys; one way."""

    session: int
    keys: Sequence[Key]
    names: Sequence[bytes]


class Suspect(NamedTuple):
    """A client read bytes of these keys that do not have the checksum saved with them; one way.

    The node looks for itself: see `CheckSlot`.
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
    """Unpin and free these (slot, generation) of `Coldest`: they have gone down a tier, or out."""

    session: int
    request: int
    items: Sequence[tuple[int, int]]


class Corrupt(NamedTuple):
    """The node's own look at a slot found that its checksum is wrong."""

    slot_id: int
    generation: int


class SessionResumed(NamedTuple):
    """The client is back on a new connection and holds only these.

    Whatever else is reserved or pinned for it was granted in answers it never
    saw (or gave up on), so it cannot be writing there.
    """

    session: int
    reserved: Mapping[int, int]
    """By slot the generation."""
    pinned: Mapping[int, int]
    """By slot how many times."""
    slots: Sequence[int] | None = None
    """A part of it: of these slots alone; None for all."""


class SessionDead(NamedTuple):
    """The client's process is known to be dead (rule 5), not merely disconnected."""

    session: int
    slots: Sequence[int] | None = None
    """A part of it: what it held of these slots alone; None for all, and then it is forgotten."""


class Expire(NamedTuple):
    """Nothing has happened, but the life of a block may be over."""


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
)
"""What has an answer (answers.py)."""
Event = (
    Request | Touch | Introduce | Named | Suspect | Corrupt | Expire | SessionResumed | SessionDead
)


class Mark(NamedTuple):
    """Write one header word: state and generation, in a single 8-byte store."""

    slot_id: int
    state: int
    generation: int
    granule: int = 0
    """Which one of its page the slot begins with."""
    size: int = 0
    """In granules, while RESERVED: a restarted node must know how far the writer may write."""


class Bounds(NamedTuple):
    """Note what a restarted node must know without a look at every header."""

    generation: int
    """Those of all slots were, and until the next of this will be, at most that."""
    used_below: int
    used_from: int
    """From the one page to the other none was ever part of a slot."""


class Hold(NamedTuple):
    """Note whether clients have a slot pinned: a restarted node must not reuse it."""

    slot_id: int
    held: bool


class Keep(NamedTuple):
    """Note until when a slot's block is retained, and for whom: restarts go on with it."""

    slot_id: int
    until_s: int
    """Of the node's clock; 0: it is not."""
    tenant: int
    """`NO_TENANT`: it is not retained, and its life ends then."""


class Seal(NamedTuple):
    """Write a whole header: body first, the word that says SEALED last."""

    slot_id: int
    generation: int
    key: Key
    length: int
    granule: int
    """Which one of its page the slot begins with."""
    kind: int
    meta_length: int
    checksum: int
    namespace_id: int


class Fill(NamedTuple):
    """Copy a value that came with its request into its slot."""

    offset: int
    value: bytes


class Copy(NamedTuple):
    """Copy so many bytes within the segment: a retained block moves. The two do not overlap."""

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
    """Hold it until the pending index work was tried once: a put that says stored
    can be found by the next get."""


mark_of: Callable[[tuple[int, int, int, int, int]], Mark] = partial(tuple.__new__, Mark)
"""As `Mark(...)`, of all its parts, without taking them apart: there is one for each block."""
seal_of: Callable[[BlockParts], Seal] = partial(tuple.__new__, Seal)
"""The same of a `Seal`."""
Write = Mark | Seal | Fill | Copy | Hold | Keep | Bounds


class Effects(NamedTuple):
    """What a node must do now, in this order: the writes one by one, then the replies."""

    writes: list[Write]
    replies: list[Reply]
    checks: list[CheckSlot]
    """Beside all that, in any order."""
