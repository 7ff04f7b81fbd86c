"""Bugs that need somebody else's ill will, or a change of mind (planting.py)."""

from planting import bug_that_needs

from kvstore.client.local import control, writer
from kvstore.nodedir import Announcement
from kvstore.segment import locate
from kvstore.segment.header import fields


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
            raise ValueError("no announcement")
        return announcement

    patch(Announcement, "unpack", classmethod(unpack))


@bug_that_needs(node_silent=1.0)
def connection_kept_that_did_not_answer(patch):
    """What the node granted meanwhile is nobody's: it leaks."""

    def failed(self):
        self._breaker.failed(self._now())

    patch(control.ControlChannel, "_failed", failed)


@bug_that_needs(cancelled=0.5)
def cancelled_put_committed(patch):
    """What somebody wants no more of is sealed half written (rule 1)."""

    def abort(self, reservations):
        if reservations:
            self.commit(reservations)

    patch(writer.Writer, "abort", abort)


@bug_that_needs(cancelled=0.5)
def cancelled_put_forgotten(patch):
    """Its slots stay reserved for as long as its client lives: they leak."""
    patch(writer.Writer, "abort", writer.Writer._forget)
