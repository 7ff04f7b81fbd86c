"""Bugs to plant, as small patches to the real functions. The simulation must find each.

Every function is one bug: its name says what is wrong, its docstring what follows.
It gets `patch(owner, name, replacement)`.
"""

import struct
from dataclasses import replace
from functools import partial

from kvstore.client import client, control, reader, writer
from kvstore.core import breaker, node, recovery
from kvstore.core.allocator import Allocator
from kvstore.core.events import Fill, SessionDead, SessionResumed
from kvstore.core.gone import GoneWhy
from kvstore.core.holdings import FORMER
from kvstore.core.node import NodeCore
from kvstore.core.outbox import Outbox
from kvstore.core.scrub import Scrub
from kvstore.core.slots import SlotEvent, SlotState
from kvstore.index.memory import MemoryIndex
from kvstore.node.control import Connection
from kvstore.node.daemon import Node
from kvstore.node.sessions import Sessions
from kvstore.segment import scan, shm
from kvstore.segment.header import (
    HEADER_BYTES,
    RESERVED,
    SEALED,
    SUPERBLOCK_BYTES,
    body_of,
    of_word,
    pack,
)
from kvstore.testing.sim import Faults, world

BUGS = []
"""(what plants it, the faults that it needs or None for those that each seed draws)"""


def bug(plant, faults=None):
    BUGS.append((plant, faults))
    return plant


def bug_that_needs(**rates):
    """A bug that shows under a coincidence which is rare where other faults end a day first."""
    return partial(bug, faults=replace(Faults().calm(), **rates))


# --- saving ---------------------------------------------------------------------


@bug
def seal_before_the_copy(patch):
    """Readers find a block whose bytes are not there yet (rule 3)."""
    real = NodeCore._reserve

    def reserve(self, event, effects, now):
        real(self, event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, tuple):
                slot = self.allocator.slot(answer[0])
                del self._sessions[event.session].reserved[slot.slot_id]
                self._seal(slot, 0, effects.writes)

    patch(NodeCore, "_reserve", reserve)


@bug
def publish_before_the_seal(patch):
    """The index learns of a slot that is being written (rule 3)."""
    real = NodeCore._reserve

    def reserve(self, event, effects, now):
        real(self, event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, tuple):
                slot = self.allocator.slot(answer[0])
                slot.record = node.pack_record(slot.key, _location(self, slot))
                self.outbox.publish(slot)

    patch(NodeCore, "_reserve", reserve)


def _location(core, slot):
    return node.Location(
        core.node_id, core.epoch, 0, slot.slot_id, slot.generation, slot.size_class, slot.length, 0
    )


@bug
def inline_value_filled_after_the_seal(patch):
    """A small value is sealed before its bytes are there (rule 3)."""
    real = NodeCore._reserve

    def reserve(self, event, effects, now):
        real(self, event, effects, now)
        effects.writes.sort(key=lambda write: isinstance(write, Fill))

    patch(NodeCore, "_reserve", reserve)


@bug
def reservations_time_out(patch):
    """A paused writer's slot goes to somebody else (rule 5)."""
    real = NodeCore.handle

    def handle(self, event, now):
        late = []
        for session in self._sessions.values():
            for slot in list(session.reserved.values()):
                if now - slot.reserved_at > 0.5:
                    del session.reserved[slot.slot_id]
                    self._release(slot, GoneWhy.WRITER_DIED, late, now)
        effects = real(self, event, now)
        effects.writes[:0] = late
        return effects

    patch(NodeCore, "handle", handle)


@bug
def lost_connection_counts_as_death(patch):
    """A living writer loses its slots with its connection (rule 5)."""
    real = NodeCore._session_resumed

    def resumed(self, event, effects, now):
        real(self, SessionResumed(event.session, [], []), effects, now)

    patch(NodeCore, "_session_resumed", resumed)


@bug
def client_forgets_to_say_what_it_holds(patch):
    """After a reconnect its slots are given to others while it writes (rule 5)."""
    patch(writer._Holdings, "said", lambda self: ([], []))


@bug_that_needs(delayed=0.1, connection_loss=6.0, client_pause=1.0)
def old_hello_believed(patch):
    """A HELLO that was overtaken frees what was granted since (rule 5)."""
    real = Sessions.enter

    def enter(self, client_id, request, transport):
        known = self._by_client.get(client_id)
        if known is not None:
            known.hello = 0
        return real(self, client_id, request, transport)

    patch(Sessions, "enter", enter)


@bug
def requests_carried_out_twice(patch):
    """A doubled message reserves or pins what nobody knows of: it leaks."""
    patch(Connection, "_carried_out", lambda self, message: False)


@bug
def dead_writers_forgotten(patch):
    """Their slots leak."""
    patch(NodeCore, "_session_dead", lambda self, event, effects, now: None)


@bug
def commit_of_a_cleared_block_seals_it(patch):
    """A block is back that was cleared while it was written."""
    real = NodeCore._commit

    def commit(self, event, effects, now):
        for session in self._sessions.values():
            for slot in session.reserved.values():
                slot.void = False
        real(self, event, effects, now)

    patch(NodeCore, "_commit", commit)


@bug
def doubled_commit_accepted_after_reuse(patch):
    """An old commit seals what is being written anew in the same slot (rule 3)."""
    patch(Connection, "_carried_out", lambda self, message: False)

    def owned(session, slot_id, generation):
        return session.reserved.get(slot_id) if session is not None else None

    patch(NodeCore, "_owned", staticmethod(owned))


# --- slots ----------------------------------------------------------------------


@bug
def pinned_slot_evicted(patch):
    """Bytes change under somebody who looks at them in place."""
    real = NodeCore._pin

    def pin(self, event, effects, now):
        before = {slot: slot.pins for slot in self.by_key.values()}
        real(self, event, effects, now)
        for slot, pins in before.items():
            if pins == 0 and slot.pins:
                self.allocator.became_evictable(slot)

    patch(NodeCore, "_pin", pin)


@bug
def doomed_slot_reused(patch):
    """A block that was dropped while it is pinned is free at once."""
    real = NodeCore._drop_slot

    def drop(self, slot, why, writes, now):
        if slot.state is not SlotState.SEALED or not slot.pins:
            return real(self, slot, why, writes, now)
        pins, slot.pins = slot.pins, 0
        self.allocator.became_evictable(slot)
        self._free(slot, SlotEvent.EVICT, writes)
        slot.pins = pins
        return True

    patch(NodeCore, "_drop_slot", drop)


@bug
def first_of_several_unpins_frees(patch):
    """A doomed slot is free while another client still looks at it."""
    real = NodeCore._unpin_slot

    def unpin(self, slot, count, *writes):
        real(self, slot, slot.pins if slot.state is SlotState.DOOMED else count, *writes)

    patch(NodeCore, "_unpin_slot", unpin)


@bug
def generation_not_advanced(patch):
    """A reader cannot tell a reused slot from the one it was sent to."""
    real = node.Slot.move

    def move(self, event):
        real(self, event)
        if event is SlotEvent.RESERVE and self.generation > 2:
            self.generation -= 1

    patch(node.Slot, "move", move)


@bug
def generations_restart_with_the_class(patch):
    """An arena that changes its class begins to count anew."""
    real = Allocator._unused_slot

    def unused(self, size_class):
        index = self._growing.get(size_class)
        if index is not None:
            self.arenas[index].generation_floor = 0
        return real(self, size_class)

    patch(Allocator, "_unused_slot", unused)


@bug
def epoch_is_the_time(patch):
    """A clock that is set back gives an earlier epoch."""
    patch(world, "epoch_after", lambda last, now_s: int(now_s))


@bug
def epoch_ignored(patch):
    """A client goes on with a node that was started anew, and writes into its old memory."""
    real = control.ControlChannel._receive

    def receive(self, ticket):
        real(self, ticket)
        answer = ticket.answer
        if isinstance(answer, list) and len(answer) == 2 and answer[0] == self._node[0]:
            ticket.answer = self._node

    patch(control.ControlChannel, "_receive", receive)


# --- reading --------------------------------------------------------------------


@bug
def no_check_after_reading(patch):
    """A slot that was reused while it was copied counts as a hit (rule 4)."""
    patch(reader.Place, "valid", lambda self: True)


@bug
def no_generation_check(patch):
    """A reader looks at the key alone, and takes what was written over for whole (rule 4)."""

    def valid(self):
        return self.attached.shm.header(self.slot_id)[8:40] == self.image[8:40]

    patch(reader.Place, "valid", valid)


@bug
def index_believed_over_header(patch):
    """A stale or lying record decides what the bytes are (rule 7)."""

    def place(self, key, record):
        location = reader.unpack_record(key, record)
        if location is None:
            return None
        attached = self._nodes.segment(location.node_id, location.epoch, 0.0)
        if attached is None or location.slot >= attached.shm.slots:
            return None
        image = attached.shm.header(location.slot)
        header = (0, key, location.length, location.size_class, 1, 0, 0, 0)
        return self._seen(attached, location.slot, image, header)

    patch(reader.Reader, "place", place)


@bug
def hint_believed_over_header(patch):
    """A reader takes whatever block the table of hints leads to."""

    def local(self, key):
        for attached in self._nodes.mapped:
            slot_id, image = attached.shm.hinted(key)
            header = reader.fields(image)
            if header is not None:
                return self._seen(attached, slot_id, image, (header[0], key, *header[2:]))
        return None

    patch(reader.Reader, "_local", local)


@bug
def half_written_header_trusted(patch):
    """SEALED is written first, and nobody checks the CRC."""

    def seal(self, write):
        start = SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES
        raw = pack(write[1:])
        self._words[start >> 3] = int.from_bytes(raw[:8], "little")
        for at in range(HEADER_BYTES - 8, 0, -8):
            self._head[start + at : start + at + 8] = raw[at : at + 8]
        self._hint(write.key, write.slot_id)

    patch(shm.OwnedShm, "_seal", seal)
    real = reader.fields

    def fields(raw):
        whole = pack((int.from_bytes(raw[:8], "little") >> SHIFT, *_body(raw)))
        return real(raw[:60] + whole[60:])

    patch(reader, "fields", fields)


SHIFT = pack((1, b"", 0, 0, 0, 0, 0, 0))[:8].index(1) * 8
"""Where the generation begins in a header's word."""


def _body(raw):
    return struct.unpack("<32sIBBHQI", raw[8:60])


@bug
def header_left_sealed_while_the_slot_is_written(patch):
    """Who finds the block that was there before reads a mixture."""
    patch(shm.OwnedShm, "_mark", lambda self, write: None)


@bug
def match_skips_a_hole(patch):
    """Blocks behind a missing one count as a prefix."""

    def indexed_run(self, keys):
        return [record for record in self._index.lookup(keys) if record is not None]

    patch(reader.Reader, "indexed_run", indexed_run)


@bug
def get_blocks_counts_all_hits(patch):
    """Blocks behind a missing one count as a prefix."""

    def get_blocks(self, tokens, out):
        keys = self.namespace.block_keys(tokens, self.block_tokens)[: len(out)]
        return sum(value is not None for value in self._get_all(keys, out[: len(keys)]))

    patch(client.Client, "get_blocks", get_blocks)


@bug
def closing_a_pin_spoils_the_place(patch):
    """The next get of the same key raises."""
    real = client.Pinned.__init__

    def init(self, owner, place, key, record):
        real(self, owner, place, key, record)
        self.buffer = place.data

    patch(client.Pinned, "__init__", init)


# --- the index ------------------------------------------------------------------


@bug
def flushed_index_never_refilled(patch):
    """Neither the new incarnation nor the round over all blocks publishes anything."""
    patch(NodeCore, "republish", lambda self: 0)
    patch(Scrub, "next", lambda self, at_most: [])


@bug
def nobody_looks_after_single_keys(patch):
    """Of two nodes that have a key, the one that drops it hides the other's."""
    patch(Scrub, "next", lambda self, at_most: [])


@bug
def removals_not_repeated_after_a_failover(patch):
    """The replica still has records of blocks that are gone."""
    patch(Outbox, "remove_again", lambda self: None)


@bug
def plain_delete(patch):
    """A removal takes out whatever is there, also another node's record."""
    real = MemoryIndex.remove

    def remove(self, records):
        return real(self, [(key, self._records.get(key, record)) for key, record in records])

    patch(MemoryIndex, "remove", remove)


@bug
def lost_removal(patch):
    """Evicted blocks stay in the index for ever."""
    real = NodeCore._free

    def free(self, slot, event, writes):
        slot.published = False
        real(self, slot, event, writes)

    patch(NodeCore, "_free", free)


@bug
def one_removal_per_key(patch):
    """Seed 4: a record of a publication that never arrived hides an older one."""
    real = NodeCore._free

    def free(self, slot, event, writes):
        removals = self.outbox._removals
        for item in [item for item in removals if item[0] == slot.key and slot.published]:
            del removals[item]
        real(self, slot, event, writes)

    patch(NodeCore, "_free", free)


@bug
def withdrawn_block_still_published(patch):
    """What was evicted before its publication is published."""
    real = Outbox.withdraw

    def withdraw(self, slot):
        pending = self._unpublished.get(slot.key)
        real(self, slot)
        if pending is slot:
            self._unpublished[slot.key] = slot

    patch(Outbox, "withdraw", withdraw)


# --- warm restart ---------------------------------------------------------------

RESTARTS = {"node_kill_warm": 0.7, "client_pause": 3.0}


@bug_that_needs(**RESTARTS)
def restart_frees_what_is_reserved(patch):
    """A writer of the former start writes into what is somebody else's (rule 5)."""
    real = recovery._hold

    def hold(core, held):
        if not held.reserved:
            real(core, held)

    patch(recovery, "_hold", hold)


@bug_that_needs(**RESTARTS)
def restart_seals_what_is_reserved(patch):
    """What a slot held before is back, with bytes of what was being written."""

    def sealed(word):
        state, generation, size_class = of_word(word)
        return (SEALED if state == RESERVED else state), generation, size_class

    def fields(raw):
        state, generation, _ = of_word(int.from_bytes(raw[:8], "little"))
        return body_of(raw, generation - (state == RESERVED))

    patch(scan, "of_word", sealed)
    patch(scan, "fields", fields)


@bug_that_needs(**RESTARTS)
def restart_forgets_pins(patch):
    """Bytes change under somebody who looks at them in place."""
    patch(scan._Arena, "_pinned", lambda self: set())


@bug
def restart_counts_generations_anew(patch):
    """A reader of the former start cannot tell a reused slot."""
    real = Allocator.restore

    def restore(self, arenas):
        real(self, [(index, size_class, 0) for index, size_class, _ in arenas])

    patch(Allocator, "restore", restore)


@bug_that_needs(**RESTARTS)
def restart_believes_former_clients_dead(patch):
    """Their slots are free at once (rule 5)."""
    patch(Node, "_end_former", lambda self: self._act(SessionDead(FORMER)))


@bug_that_needs(**RESTARTS)
def client_lets_its_lease_go_with_the_node(patch):
    """The next start cannot know that it still writes there (rule 5)."""
    patch(writer._Holdings, "__bool__", lambda self: False)


# --- waiting --------------------------------------------------------------------


@bug
def deadline_ignored(patch):
    """A lost answer is waited for, and for ever (rule 8)."""
    real = control.Ticket.__init__

    def init(self, give_up_at, accept):
        real(self, give_up_at + 1e6, accept)

    patch(control.Ticket, "__init__", init)


@bug
def breaker_stays_open(patch):
    """After one failure a client never asks again."""
    real = breaker.Breaker.allows

    def allows(self, now):
        return self.state is breaker.BreakerState.CLOSED and real(self, now)

    patch(breaker.Breaker, "allows", allows)
