"""Bugs that need somebody else's ill will, a change of mind, a signal or a fork (planting.py)."""

import sys

from planting import PlantedError, bug_that_needs

from kvstore.client.nodes import control
from kvstore.client.nodes.saving import link
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op
from kvstore.segment import locate
from kvstore.segment.header import fields
from kvstore.testing.sim.models.hosts import SimLease
from kvstore.testing.sim.scheduler import HandlerError


@bug_that_needs(index_forged=2.0)
def record_says_whose_block_it_is(patch):
    """A record that names another key's block, with a CRC that is right, is believed (rule 1)."""

    def sealed_as(image, key, location):
        header = fields(image)
        promised = (location.generation, location.length, location.granule)
        right = header is not None and (header[0], *header[2:4]) == promised
        return (header[0], key, *header[2:]) if right else None

    patch(locate, "sealed_as", sealed_as)


@bug_that_needs(index_forged=2.0)
def record_says_how_long_a_block_is(patch):
    """A record with another length gives more bytes than were saved, or fewer (rule 1)."""

    def sealed_as(image, key, location):
        header = fields(image)
        if header is None or (header[0], header[1]) != (location.generation, key):
            return None
        return (*header[:2], location.length, *header[3:])

    patch(locate, "sealed_as", sealed_as)


@bug_that_needs(index_forged=2.0)
def announcement_read_as_it_is(patch):
    """Half an announcement ends the node that hears it."""
    real = Announcement.unpack.__func__

    def unpack(cls, raw):
        announcement = real(cls, raw)
        if announcement is None:
            raise PlantedError("no announcement")
        return announcement

    patch(Announcement, "unpack", classmethod(unpack))


@bug_that_needs(node_silent=1.0)
def connection_kept_that_did_not_answer(patch):
    """What the node granted meanwhile is nobody's: it leaks."""

    def failed(self, error, hurried):
        self._breaker.failed(self._now())

    patch(control.ControlChannel, "_failed", failed)


@bug_that_needs(cancelled=0.5)
def cancelled_put_committed(patch):
    """What somebody wants no more of is sealed half written (rule 1)."""

    def give_back(self, handles):
        if handles:
            items = [(*handle, 0) for handle in handles if handle in self.held.reserved]
            self.control.request(Op.COMMIT, items)

    patch(link.NodeLink, "_give_back", give_back)


@bug_that_needs(cancelled=0.5)
def cancelled_put_forgotten(patch):
    """Its slots stay reserved for as long as its client lives: they leak."""
    patch(link.NodeLink, "_give_back", lambda self, handles: self.held.release(handles))


@bug_that_needs(client_signal=3.0)
def lock_kept_by_who_was_interrupted(patch):
    """Every other thread of that client finds the node busy from then on."""
    real = control.ControlChannel.collect

    def collect(self, ticket):
        try:
            return real(self, ticket)
        except HandlerError:
            self._lock.acquire()
            raise

    patch(control.ControlChannel, "collect", collect)


@bug_that_needs(client_signal=3.0)
def answer_nobody_waits_for_any_more_taken(patch):
    """What the node grants to a call that was interrupted is nobody's: it leaks."""
    real = control.ControlChannel._disconnect

    def disconnect(self):
        if not isinstance(sys.exc_info()[1], HandlerError):
            real(self)

    patch(control.ControlChannel, "_disconnect", disconnect)


@bug_that_needs(client_signal=3.0)
def interrupted_put_committed(patch):
    """What was half written when a handler raised is sealed (rule 1)."""
    real = link.NodeLink._give_back

    def give_back(self, handles):
        if isinstance(sys.exc_info()[1], HandlerError):
            items = [(*handle, 0) for handle in handles if handle in self.held.reserved]
            self.control.request(Op.COMMIT, items)
        else:
            real(self, handles)

    patch(link.NodeLink, "_give_back", give_back)


@bug_that_needs(forked=0.8, client_kill=3.0, connection_loss=5.0)
def lease_ends_with_who_took_it(patch):
    """Its child writes on into what is somebody else's (rule 5): a lock of the process,
    by fcntl.lockf, in place of the open file's."""
    held = property(lambda self: not (self._released or self._holder.dead))
    patch(SimLease, "held", held)
