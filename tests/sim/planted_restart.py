"""Bugs in a node's next start, and in waiting (planting.py)."""

from planting import bug, bug_that_needs

from kvstore import circuit_breaker
from kvstore.client.nodes import control
from kvstore.client.nodes.saving import link
from kvstore.core import recovery
from kvstore.core.blocks import Blocks
from kvstore.core.events import Seal, SessionDead
from kvstore.core.holdings import FORMER
from kvstore.core.memory.granules import granules_of
from kvstore.node.daemon import Node
from kvstore.segment import scan
from kvstore.segment.header import _HEADER as HEADER
from kvstore.segment.header import RESERVED, of_reserved

# --- warm restart ---------------------------------------------------------------

RESTARTS = {"node_kill_warm": 0.7, "client_pause": 3.0}


@bug_that_needs(**RESTARTS)
def restart_frees_what_is_reserved(patch):
    """A writer of the former start writes into what is somebody else's (rule 5)."""
    real = recovery._hold

    def hold(core, slot_id, generation, *, reserved):
        if reserved:
            core.blocks.allocator.became_free(core.blocks.allocator.slot(slot_id))
        else:
            real(core, slot_id, generation, reserved=False)

    patch(recovery, "_hold", hold)


@bug_that_needs(**RESTARTS)
def restart_seals_what_is_reserved(patch):
    """What a slot held before is back, with bytes of what was being written."""
    real = scan._Scan._slot

    def slot(self, page, pinned):
        word, image = self._words[page], self._image(page)
        if word & 0xFF == RESERVED and any(image[8:40]):
            _, *body, _ = HEADER.unpack(image)
            generation, _, _ = of_reserved(word, self._last)
            block = Seal(page, generation, *body)
            self._found.sealed.append(block)
            return self._after(page, block.granule, granules_of(block.length))
        return real(self, page, pinned)

    patch(scan._Scan, "_slot", slot)


@bug_that_needs(**RESTARTS)
def restart_takes_reservations_for_shorter(patch):
    """The end of what a writer of the former start writes to is somebody else's (rule 5)."""

    def shorter(word, last_generation):
        generation, granule, size = of_reserved(word, last_generation)
        return generation, granule, max(4, size // 2)

    patch(scan, "of_reserved", shorter)


@bug_that_needs(**RESTARTS)
def restart_forgets_pins(patch):
    """Bytes change under somebody who looks at them in place."""
    real = scan.scan

    def without(size_bytes, bounds, headers, held):
        return real(size_bytes, bounds, headers, memoryview(bytes(len(held))))

    patch(scan, "scan", without)


@bug
def restart_counts_generations_anew(patch):
    """A reader of the former start cannot tell a reused slot."""
    real = Blocks.restore

    def restore(self, bounds):
        real(self, bounds._replace(generation=0))

    patch(Blocks, "restore", restore)


@bug_that_needs(**RESTARTS)
def restart_believes_former_clients_dead(patch):
    """Their slots are free at once (rule 5)."""
    patch(Node, "_end_former", lambda self: self.act(SessionDead(FORMER)))


@bug_that_needs(node_kill_warm=2.5, client_pause=6.0)
def client_lets_its_lease_go_with_the_node(patch):
    """The next start cannot know that it still writes there (rule 5)."""
    patch(link.Holdings, "__bool__", lambda self: False)


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
    real = circuit_breaker.Breaker.allows

    def allows(self, now):
        return self.state is circuit_breaker.BreakerState.CLOSED and real(self, now)

    patch(circuit_breaker.Breaker, "allows", allows)
