"""Bugs in a node's next start, and in waiting (planting.py)."""

from planting import bug, bug_that_needs

from kvstore.client import control, link
from kvstore.core import breaker, recovery
from kvstore.core.allocator import Allocator
from kvstore.core.events import SessionDead
from kvstore.core.holdings import FORMER
from kvstore.node.daemon import Node
from kvstore.segment import scan
from kvstore.segment.header import (
    RESERVED,
    SEALED,
    body_of,
    of_word,
)

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
    real = breaker.Breaker.allows

    def allows(self, now):
        return self.state is breaker.BreakerState.CLOSED and real(self, now)

    patch(breaker.Breaker, "allows", allows)
