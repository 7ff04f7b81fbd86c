"""Checks the rules that must hold in a simulated world, and knows what is true in it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from kvstore.core.events import Mark, Seal, Write
from kvstore.core.memory.granules import GRANULE_BYTES
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.report import stats
from kvstore.index.base import KeyedRecord, KeyRecord, Record
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.record import unpack_record
from kvstore.segment.header import RESERVED, unpack
from kvstore.testing.sim.models.memory import SimOwned, address_of
from kvstore.testing.sim.scheduler import FOREVER, Actor, Process
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.testing.sim.client import SimClient
    from kvstore.testing.sim.node import SimNode
    from kvstore.testing.sim.world import World

Place = tuple[str, int]
"""(path of a segment, slot): the same memory may serve several starts of a node"""


def content(key: Key, put: int, size_bytes: int) -> bytes:
    """Makes what put number `put` saves under `key`: any mixture with another put shows."""
    unit = blake2b(key + put.to_bytes(8, "little"), digest_size=16).digest()
    return (unit * (size_bytes // 16 + 1))[:size_bytes]


class Put(NamedTuple):
    """Names one put of a key by its number among all puts, and its size."""

    number: int
    size_bytes: int


class RuleChecks:
    """Checks every rule, in the words of docs/architecture.md, and raises `ViolationError`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: dict[tuple[int, int], SimNode] = {}
        """Every start of every node, by (node id, epoch)."""
        self.clients: dict[Process, SimClient] = {}
        self.copying: dict[Actor, range] = {}
        """Addresses that a thread is writing to at this moment, even if it is stopped."""
        self.pinned: dict[tuple[Process, Place], int] = {}
        self._puts: dict[Key, list[Put]] = {}
        self._put_count = 0
        self._epochs: dict[int, int] = {}
        self._removing: list[tuple[Key, Record]] = []
        self._generations: dict[tuple[int, int], int] = {}
        self._sealed: dict[tuple[int, int, int], tuple[Key, float]] = {}
        """What a slot of a segment, known by its address, held in which generation, and until when:
        from the moment at which its node begins to seal it, since a reader may see that before the
        node goes on. A start in an empty segment counts generations anew."""
        self._sealed_last: dict[tuple[int, int], int] = {}
        """The generation that a slot of a segment was last sealed in."""

    # --- what is saved, and what is read --------------------------------------

    def begin_put(self, key: Key, size_bytes: int) -> bytes:
        """Return the bytes to save: no other put has the same."""
        self._put_count += 1
        self._puts.setdefault(key, []).append(Put(self._put_count, size_bytes))
        return content(key, self._put_count, size_bytes)

    def hit(self, key: Key, data: bytes | bytearray | memoryview) -> None:
        """Check rule 1: a hit is exactly the bytes of one put of this key."""
        self._world.count("hits")
        if self.right(key, data):
            return
        self._world.fail(f"rule 1: a hit for {_short(key)} gave bytes that nobody saved for it")

    def right(self, key: Key, data: bytes | bytearray | memoryview) -> bool:
        raw = bytes(data)
        return any(
            put.size_bytes == len(raw) and content(key, put.number, put.size_bytes) == raw
            for put in self._puts.get(key, ())
        )

    def match(self, keys: Sequence[Key], found: Sequence[KeyRecord], since: float) -> None:
        """Check that a match is a contiguous prefix of blocks that were there during it:
        each in the index, or sealed on a node, published or not."""
        index = self._world.index
        for i, (key, record) in enumerate(found):
            if key != keys[i]:
                self._world.fail(f"a match has {_short(key)} in place {i} of the prefix")
            if index.lied_at >= since:
                continue
            if unpack_record(key, record) is None:
                self._world.fail(f"a match has somebody else's record in place {i}")
            if index.last_seen.get(key, -FOREVER) < since and not self._was_here(
                key, record, since
            ):
                self._world.fail(f"a match of {len(found)} blocks has a hole at {i}")

    def _was_here(self, key: Key, record: Record, since: float) -> bool:
        """Tell whether its slot held the block at some time after `since`: then it was found there
        without the index."""
        location = unpack_record(key, record)
        if location is None:
            return False
        node = self.nodes.get((location.node_id, location.epoch))
        if node is None:
            return False
        segment = node.segment
        assert isinstance(segment, SimOwned)
        was = self._sealed.get((segment.address, location.slot, location.generation))
        return was is not None and was[0] == key and was[1] >= since

    def copies_to(self, destination: memoryview) -> None:
        """Note where this thread writes, or may at any moment."""
        place = address_of(destination)
        self.copying[self._world.current] = range(place, place + len(destination))

    # --- before a node writes to its segment ------------------------------------

    def node_started(self, node: SimNode) -> None:
        """Check that epochs only grow."""
        node_id, epoch = node.core.node_id, node.core.epoch
        if epoch <= self._epochs.get(node_id, 0):
            self._world.fail(f"node {node_id:x}: epoch {epoch} after {self._epochs[node_id]}")
        self._epochs[node_id] = epoch
        self.nodes[node_id, epoch] = node

    def before_write(self, segment: SimOwned, write: Write) -> None:
        """Check rules 3 to 5, and that generations only grow."""
        if isinstance(write, Seal):
            offset = write.slot_id * SLOT_BYTES_MIN + write.granule * GRANULE_BYTES
            if not self.right(write.key, segment.bytes_at(offset, write.length)):
                self._world.fail(f"rule 3: {_short(write.key)} sealed, its bytes are not there")
            place = (segment.address, write.slot_id)
            self._sealed[*place, write.generation] = (write.key, FOREVER)
            self._sealed_last[place] = write.generation
        if not isinstance(write, Mark):
            return
        world = self._world
        slot_id, generation = write.slot_id, write.generation
        place = (segment.address, slot_id)
        seen = self._generations.get(place, 0)
        if generation < seen or (generation == seen and write.state == RESERVED):
            world.fail(f"slot {slot_id}: generation {generation} after {seen}")
        if write.state == RESERVED:
            self._may_be_reused(segment, slot_id)

    def after_write(self, segment: SimOwned, write: Write) -> None:
        if isinstance(write, Mark):
            self._generations[segment.address, write.slot_id] = write.generation
            place = (segment.address, write.slot_id)
            last = self._sealed_last.pop(place, None)
            if last is not None:
                key, _ = self._sealed[*place, last]
                self._sealed[*place, last] = (key, self._world.now)

    def _may_be_reused(self, segment: SimOwned, slot_id: int) -> None:
        block = segment.superblock
        node = self.nodes[block.node_id, block.epoch]
        slot = node.core.blocks.allocator.slot(slot_id)
        if slot is not None:  # else it came and went within one request
            start = segment.address + slot.offset
            stop = start + slot.size * GRANULE_BYTES
            for actor, addresses in self.copying.items():
                if addresses.start < stop and start < addresses.stop:
                    self._world.fail(f"rule 5: slot {slot_id} reused; {actor.name} writes to it")
        for client in self.clients.values():
            if client.holds(str(segment.data_path), slot_id):
                self._world.fail(f"rule 5: slot {slot_id} reused; it is {client.process.name}'s")
        for (process, pinned), count in self.pinned.items():
            if count and pinned == (str(segment.data_path), slot_id):
                self._world.fail(f"slot {slot_id} reused; {process.name} has pinned it")

    # --- before a node publishes ---------------------------------------------------

    def published(self, records: Sequence[KeyedRecord]) -> None:
        """Check rule 3: what is published is SEALED and whole."""
        for key, record in records:
            location = unpack_record(key, record)
            if location is None:
                self._world.fail(f"a record of {_short(key)} was published that nobody can read")
            node = self.nodes[location.node_id, location.epoch]
            segment = node.segment
            assert isinstance(segment, SimOwned)
            header = unpack(segment.header(location.slot))
            if header is None or header.key != key or header.generation != location.generation:
                self._world.fail(f"rule 3: {_short(key)} published, slot {location.slot} unsealed")
            slot = node.core.blocks.by_key[key]
            if not self.right(key, segment.bytes_at(slot.offset, header.length)):
                self._world.fail(f"rule 3: {_short(key)} published before its bytes were in place")

    def before_removal(self, records: Sequence[KeyedRecord]) -> None:
        truth = self._world.index.truth()
        self._removing = [
            (key, record)
            for key, record in ((key, truth.get(key)) for key, _ in records)
            if record is not None and self._leads_somewhere(key, record)
        ]

    def after_removal(self) -> None:
        """Check that nobody takes out a record that leads to a block."""
        truth = self._world.index.truth()
        for key, _ in self._removing:
            if key not in truth:
                self._world.fail(f"a removal took the record of {_short(key)}, which is there")

    # --- a node's books --------------------------------------------------------------

    def all_nodes(self) -> None:
        for node in self.living():
            self.books(node.core)

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.ready and not node.process.dead]

    def books(self, core: NodeCore) -> None:
        """Check that free, writing, sealed and doomed slots add up, and no slot is in two lists."""
        fail, allocator = self._world.fail, core.blocks.allocator
        held = [s for session in core.sessions() for s in session.reserved.values()]
        reserved = {slot.slot_id for slot in held}
        if len(reserved) != len(held):
            fail("a slot is reserved twice")
        seen = free = retained = 0
        touching = False
        for extent in allocator.extents():  # raises when a granule is in none, or in two
            slot = extent.slot
            if slot is None:
                if touching:
                    fail(f"two free extents touch at granule {extent.start}")
                touching = True
                free += extent.size
                continue
            touching = False
            seen += 1
            state = slot.state
            if state is SlotState.FREE:
                free += extent.size
            if (slot.slot_id in reserved) != (state is SlotState.RESERVED):
                fail(f"slot {slot.slot_id} is {state.name}: no session holds it, or one does")
            if slot.length > slot.size * GRANULE_BYTES:
                fail(f"slot {slot.slot_id} has {slot.size} KiB for {slot.length} bytes")
            if state is SlotState.SEALED and core.blocks.by_key.get(slot.key) is not slot:
                fail(f"slot {slot.slot_id} is sealed but its key leads elsewhere")
            stays = slot.pins or slot.kept_until
            if allocator.may_go(slot) != (state is SlotState.SEALED and not stays):
                fail(f"slot {slot.slot_id} is {state.name}, {slot.pins} pins: the policy differs")
            if slot.kept_until:
                retained += slot.size * GRANULE_BYTES
                if state is not SlotState.SEALED:
                    fail(f"slot {slot.slot_id} is {state.name}, and retained")
        sealed = {key for key, slot in core.blocks.by_key.items() if slot.state is SlotState.SEALED}
        if set(core.blocks.listed.page(b"", len(sealed) + 1)) != sealed:
            fail("the list of sealed blocks is another one than the keys say")
        if retained != core.blocks.retained.bytes:
            fail(f"{retained} bytes are retained, the books say {core.blocks.retained.bytes}")
        if seen != len(allocator.slots()) or free * GRANULE_BYTES != allocator.free_bytes:
            fail(f"{seen} slots and {free} KiB free are seen, the books say otherwise")

    # --- at the end ---------------------------------------------------------------------

    def process_ended(self, process: Process) -> None:
        """Note that a process has ended: what it held ends with it."""
        self.clients.pop(process, None)
        for actor in [actor for actor in self.copying if actor.process is process]:
            del self.copying[actor]
        for key in [key for key in self.pinned if key[0] is process]:
            del self.pinned[key]

    def nothing_leaked(self, client: SimClient) -> None:
        """Check that a node keeps, in peace, for a living client what that client holds."""
        writer = client.real.session.writer
        for node in self.living():
            for session in node.sessions.all():
                if self._world.leases[session.client_id].holder is not client.process:
                    continue
                held = node.core._sessions.get(session.number)
                if held is None:
                    continue
                held_here = [
                    link.held
                    for link in writer.links()
                    if (link.announcement.node_id, link.announcement.epoch)
                    == (node.core.node_id, node.core.epoch)
                ]
                reserved = {slot for here in held_here for slot, _ in here.reserved}
                pinned = {slot for here in held_here for slot, _, _ in here.said()[1]}
                if not (set(held.reserved) <= reserved and set(held.pins) <= pinned):
                    self._world.fail(
                        f"{node.process.name} keeps {sorted(held.reserved)} and {held.pins} for "
                        f"{client.process.name}, which holds {sorted(reserved)} and {pinned}"
                    )

    def settled(self) -> str | None:
        """Return what has not come to rest yet; None when all has."""
        for node in self.living():
            now = stats(node.core, 0.0)
            for what in ("reserved", "pinned", "unpublished", "removals_pending"):
                if now[what]:
                    return f"{now[what]} {what} at {node.process.name}"
        return self._unreachable() or self._stale()

    def _unreachable(self) -> str | None:
        """Return a sealed block that cannot be found: no record leads to a block of its key."""
        truth = self._world.index.truth()
        for node in self.living():
            for key in node.core.blocks.by_key:
                record = truth.get(key)
                # Another node's record that came after that node had taken it back
                # hides ours: nobody can know.
                if record is not None and KeyRecord(key, record) in self._world.index.late:
                    continue
                if record is None or not self._leads_somewhere(key, record):
                    return f"block {_short(key)} of {node.process.name} cannot be found"
        return None

    def _leads_somewhere(self, key: Key, record: Record) -> bool:
        location = unpack_record(key, record)
        if location is None:
            return False
        node = self.nodes.get((location.node_id, location.epoch))
        if node is None or node.process.dead:
            return False
        slot = node.core.blocks.by_key.get(key)
        return slot is not None and slot.state is SlotState.SEALED and slot.record == record

    def _stale(self) -> str | None:
        """Return a record that names a block which a living node does not have.

        Records of a node's earlier starts stay until they are overwritten; every
        reader takes them for a miss.
        """
        index = self._world.index
        for key, record in index.truth().items():
            location = unpack_record(key, record)
            if location is None:
                return f"the index has garbage under {_short(key)}"
            node = self.nodes.get((location.node_id, location.epoch))
            if node is None or node.process.dead or KeyRecord(key, record) in index.late:
                continue
            if not self._leads_somewhere(key, record):
                return f"the index has a stale record of {_short(key)}"
        return None


def _short(key: Key) -> str:
    return key[8:12].hex()
