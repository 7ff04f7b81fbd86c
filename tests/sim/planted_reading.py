"""Bugs in reading, and in what the index is told (planting.py)."""

import struct

from planting import bug, bug_that_needs

from kvstore.client import block_lookup, client, reader
from kvstore.core.blocks import Blocks
from kvstore.core.outgoing.outbox import Outbox
from kvstore.core.scrub import Scrub
from kvstore.index.memory import MemoryIndex
from kvstore.segment import batch_read, locate, shm
from kvstore.segment.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    pack,
)

# --- reading --------------------------------------------------------------------


@bug
def no_check_after_reading(patch):
    """A slot that was reused while it was copied counts as a hit (rule 4)."""
    patch(reader.Place, "valid", lambda self: True)


@bug
def no_check_after_reading_a_batch(patch):
    """A slot that was reused while a batch was copied counts as a hit (rule 4)."""
    patch(batch_read, "unchanged", lambda *_: True)


@bug
def no_generation_check_after_a_batch(patch):
    """Whoever reads a batch looks at the key alone (rule 4)."""

    def unchanged(head, start, image):
        return head[start + 8 : start + 40] == image[8:40]

    patch(batch_read, "unchanged", unchanged)


@bug
def no_generation_check(patch):
    """A reader looks at the key alone, and takes what was written over for whole (rule 4)."""

    def valid(self):
        return self.attached.shm.header(self.slot_id)[8:40] == self.image[8:40]

    patch(reader.Place, "valid", valid)


@bug
def index_believed_over_header(patch):
    """A stale or lying record decides what the bytes are (rule 7)."""

    real = reader.Reader.resolve

    def resolve(self, key, record):
        location = reader.unpack_record(key, record)
        if location is None:
            return None
        attached = self._nodes.segment(location.node_id, location.epoch, 0.0)
        if attached is None or location.slot >= attached.shm.slots:
            return real(self, key, record)
        image = attached.shm.header(location.slot)
        header = (0, key, location.length, location.granule, 1, 0, 0, 0)
        return placed(self, attached, location.slot, image, header)

    patch(reader.Reader, "resolve", resolve)


def placed(self, attached, slot_id, image, header):
    offset = locate.offset_of(attached.shm.superblock.size_bytes, slot_id, header)
    return None if offset is None else self._place(attached, slot_id, image, header, offset)


@bug
def hint_believed_over_header(patch):
    """A reader takes whatever block the table of hints leads to."""

    def find_here(self, found, keys):
        for i, key in enumerate(keys):
            for attached in self._nodes.mapped if found[i] is None else ():
                slot_id, image = attached.shm.hinted(key)
                header = locate.fields(image)
                if header is not None:
                    named = (header[0], key, *header[2:])
                    found[i] = placed(self, attached, slot_id, image, named)
                    break

    patch(reader.Reader, "_find_here", find_here)


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
    real = locate.fields

    def fields(raw):
        whole = pack((int.from_bytes(raw[:8], "little") >> SHIFT, *_body(raw)))
        return real(raw[:60] + whole[60:])

    patch(locate, "fields", fields)


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

    real = block_lookup.BlockLookup._indexed

    def indexed(ask, keys):
        if ask.__name__ != "match":
            return real(ask, keys)
        return [record for record in ask.__self__.lookup(keys) if record is not None]

    patch(block_lookup.BlockLookup, "_indexed", staticmethod(indexed))


@bug
def get_blocks_counts_all_hits(patch):
    """Blocks behind a missing one count as a prefix."""

    def get_blocks(self, tokens, out):
        keys = self.namespace.block_keys(tokens, self.block_tokens)[: len(out)]
        return sum(value is not None for value in self._getter.get_many(keys, out[: len(keys)]))

    patch(client.Client, "get_blocks", get_blocks)


@bug
def a_pin_ends_although_a_view_lives(patch):
    """Its `with` ends it, whoever still looks at the memory."""
    real = client.Pinned.close

    def close(self):
        view, self._memory = self._memory, None
        if view is not None:
            self._pins.end([view.pin])
        real(self)

    patch(client.Pinned, "close", close)


# --- the index ------------------------------------------------------------------


@bug
def flushed_index_never_refilled(patch):
    """Neither the new incarnation nor the round over all blocks publishes anything."""
    patch(Blocks, "republish", lambda self: 0)
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
    real = Blocks.free

    def free(self, slots, event, writes):
        for slot in slots:
            slot.published = False
        real(self, slots, event, writes)

    patch(Blocks, "free", free)


@bug_that_needs(index_slow=0.5, index_down=0.5)
def one_removal_per_key(patch):
    """Seed 4: a record of a publication that never arrived hides an older one."""
    real = Blocks.free

    def free(self, slots, event, writes):
        removals, gone = self.outbox._removals, {slot.key for slot in slots if slot.published}
        for item in [item for item in removals if item[0] in gone]:
            del removals[item]
        real(self, slots, event, writes)

    patch(Blocks, "free", free)


@bug
def withdrawn_block_still_published(patch):
    """What was evicted before its publication is published."""
    real = Outbox.withdraw

    def withdraw(self, *slots):
        pending = [slot for slot in slots if self._unpublished.get(slot.key) is slot]
        real(self, *slots)
        self._unpublished.update((slot.key, slot) for slot in pending)

    patch(Outbox, "withdraw", withdraw)
