"""Bugs in saving, and in what becomes of a slot (planting.py)."""

from planting import bug, bug_that_needs

from kvstore.client.nodes import control
from kvstore.client.nodes.saving import link
from kvstore.core.answers import Grant
from kvstore.core.blocks import Blocks
from kvstore.core.events import Copy, Fill, SessionResumed
from kvstore.core.memory import allocator
from kvstore.core.memory.granules import granules_of
from kvstore.core.memory.slots import SlotEvent, SlotState
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.node.control.control_server import Connection
from kvstore.node.control.liveness import Sessions
from kvstore.record import pack_record
from kvstore.testing.sim import world
from kvstore.types import Location

RESERVE, MOVE = NodeCore._reserve, Blocks._move

# --- saving ---------------------------------------------------------------------


@bug
def seal_before_the_copy(patch):
    """Readers find a block whose bytes are not there yet (rule 3)."""

    def reserve(self, event, effects, now):
        RESERVE(self, event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, Grant):
                slot = self.blocks.allocator.slot(answer[0])
                del self._sessions[event.session].reserved[slot.slot_id]
                self.blocks.seal([slot], effects.writes)

    patch(NodeCore, "_reserve", reserve)


@bug
def publish_before_the_seal(patch):
    """The index learns of a slot that is being written (rule 3)."""

    def reserve(self, event, effects, now):
        RESERVE(self, event, effects, now)
        for answer in effects.replies[-1].body:
            if isinstance(answer, Grant):
                slot = self.blocks.allocator.slot(answer[0])
                slot.record = pack_record(slot.key, _location(self, slot))
                self.blocks.outbox.publish(slot)

    patch(NodeCore, "_reserve", reserve)


def _location(core, slot):
    return Location(
        core.node_id, core.epoch, 0, slot.slot_id, slot.generation, slot.granule, slot.length, 0
    )


@bug
def inline_value_filled_after_the_seal(patch):
    """A small value is sealed before its bytes are there (rule 3)."""

    def reserve(self, event, effects, now):
        RESERVE(self, event, effects, now)
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
                    self.blocks.release(slot, GoneWhy.WRITER_DIED, late, now)
        effects = real(self, event, now)
        effects.writes[:0] = late
        return effects

    patch(NodeCore, "handle", handle)


@bug
def lost_connection_counts_as_death(patch):
    """A living writer loses its slots with its connection (rule 5)."""
    real = NodeCore._session_resumed

    def resumed(self, event, effects, now):
        real(self, SessionResumed(event.session, {}, {}, event.slots), effects, now)

    patch(NodeCore, "_session_resumed", resumed)


@bug
def client_forgets_to_say_what_it_holds(patch):
    """After a reconnect its slots are given to others while it writes (rule 5)."""
    patch(link.Holdings, "said", lambda self: ([], []))


@bug_that_needs(client_pause=5.0, connection_loss=3.0, delayed=0.02, reordered=0.3)
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
        before = {slot: slot.pins for slot in self.blocks.by_key.values()}
        real(self, event, effects, now)
        for slot, pins in before.items():
            if pins == 0 and slot.pins:
                self.blocks.allocator.became_evictable(slot)

    patch(NodeCore, "_pin", pin)


@bug
def doomed_slot_reused(patch):
    """A block that was dropped while it is pinned is free at once."""
    real = Blocks.drop

    def drop(self, slot, why, writes, now):
        if slot.state is not SlotState.SEALED or not slot.pins:
            return real(self, slot, why, writes, now)
        pins, slot.pins = slot.pins, 0
        self.allocator.became_evictable(slot)
        self.free([slot], SlotEvent.EVICT, writes)
        slot.pins = pins
        return True

    patch(Blocks, "drop", drop)


@bug
def first_of_several_unpins_frees(patch):
    """A doomed slot is free while another client still looks at it."""
    real = Blocks.unpin

    def unpin(self, slot, count, *writes):
        real(self, slot, slot.pins if slot.state is SlotState.DOOMED else count, *writes)

    patch(Blocks, "unpin", unpin)


@bug
def generation_not_advanced(patch):
    """A reader cannot tell a reused slot from the one it was sent to."""
    real = Blocks.take

    def take(self, *arguments):
        slots = real(self, *arguments)
        if slots and slots[-1].generation > 2:
            self._generation -= 1
        return slots

    patch(Blocks, "take", take)


@bug
def a_window_goes_over_pins(patch):
    """Room is made of the neighbours of a cold block, also of those that somebody looks at."""
    patch(allocator, "_may_go", lambda slot: slot.state is SlotState.SEALED)


@bug
def a_window_goes_over_reservations(patch):
    """Room is made of what a writer writes to (rule 5)."""
    patch(allocator, "_may_go", lambda slot: not slot.pins)


@bug
def extents_of_neighbours_overlap(patch):
    """A slot is a granule shorter than its value."""
    patch(allocator, "granules_of", lambda length: max(4, granules_of(length) - 1))


@bug
def moved_block_sealed_before_its_bytes(patch):
    """Readers find a block at its new place before it is there (rule 3)."""

    def move(self, old, new, writes):
        late = []
        MOVE(self, old, new, late)
        writes += sorted(late, key=lambda write: isinstance(write, Copy))

    patch(Blocks, "_move", move)


@bug_that_needs(client_pause=2.0, index_lag=0.5)
def moved_block_stays_at_its_old_place_too(patch):
    """The old header says SEALED while others write there (rule 4)."""

    def move(self, old, new, writes):
        MOVE(self, old, new, writes)
        writes.pop()

    patch(Blocks, "_move", move)


@bug
def epoch_is_the_time(patch):
    """A clock that is set back gives an earlier epoch."""
    patch(world, "epoch_after", lambda last, now_s: int(now_s))


@bug_that_needs(node_kill=1.0, connection_loss=5.0, delayed=0.02)
def epoch_ignored(patch):
    """A client goes on with a node that was started anew, and writes into its old memory."""
    real = control.ControlChannel._receive

    def receive(self, ticket):
        real(self, ticket)
        answer = ticket.answer
        if isinstance(answer, list) and len(answer) == 2 and answer[0] == self._node[0]:
            ticket.answer = self._node

    patch(control.ControlChannel, "_receive", receive)
