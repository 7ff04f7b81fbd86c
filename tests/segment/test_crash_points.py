"""A node killed inside any header write: every subset of its 8-byte words, so every prefix too."""

from itertools import combinations, pairwise

import pytest

from kvstore.core.answers import Grant
from kvstore.core.events import Abort, Bounds, Commit, Drop, Mark, Pin, Reserve, Retain, Seal, Unpin
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.recovery import recover
from kvstore.keys import Namespace
from kvstore.segment.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    newest_superblock,
    pack_superblock,
    superblock_place,
)
from kvstore.segment.scan import scan
from kvstore.segment.shm import OwnedShm

ARENA = 64 << 10
NODE, SIZE = 7, ARENA
KEYS = Namespace.named("test").block_keys(range(20), 1)
SLOT = 32 << 10
"""Two to a segment, so that a slot is reused soon."""


def reserve(*keys: bytes, size: int = SLOT, value: bytes | None = None) -> Reserve:
    zeros = [0] * len(keys)
    return Reserve(1, 1, keys, [size] * len(keys), 3, zeros, zeros, [value] * len(keys), zeros)


class History:
    """A node on real shared memory, and every header write it did as (write, before, after)."""

    def __init__(self, base) -> None:
        self.core = NodeCore(node_id=NODE, epoch=1, size_bytes=SIZE)
        self.segment = OwnedShm(base, Superblock(NODE, 1, 0, SIZE))
        self.writes: list[tuple[Mark | Seal, bytes, bytes]] = []

    def headers(self) -> bytes:
        return b"".join(self.segment.header(i) for i in range(ARENA // 4096))

    def do(self, event):
        effects = self.core.handle(event, 0.0)
        for write in effects.writes:
            before = self.headers()
            self.segment.apply(write)
            if isinstance(write, Mark | Seal):
                self.writes.append((write, before, self.headers()))
        return effects.replies[0].body

    def put(self, *keys: bytes, size: int = SLOT) -> None:
        grants = [a for a in self.do(reserve(*keys, size=size)) if isinstance(a, Grant)]
        self.do(Commit(1, 1, [(slot, generation, 9) for slot, generation, _ in grants]))


def first_use(history: History) -> None:
    history.put(KEYS[0])


def value_in_the_request(history: History) -> None:
    history.do(reserve(KEYS[0], size=900, value=b"v" * 900))


def evicted_and_reused(history: History) -> None:
    for key in KEYS[:6]:
        history.put(key)


def freed_and_reused_for_the_same_block(history: History) -> None:
    """The body that is written equals the one that is there: only generation and CRC differ."""
    for _ in range(3):
        history.put(KEYS[0])
        history.do(Drop(1, 1, KEYS[:1]))


def same_key_another_length(history: History) -> None:
    for size in (SLOT, SLOT - 1, SLOT - 4096):
        history.put(KEYS[0], size=size)
        history.do(Drop(1, 1, KEYS[:1]))


def aborted(history: History) -> None:
    history.put(KEYS[0])
    ((slot, generation, _),) = history.do(reserve(KEYS[1]))
    history.do(Abort(1, 1, [(slot, generation)]))
    history.put(KEYS[2])


def another_size(history: History) -> None:
    history.put(*KEYS[:2])
    history.put(KEYS[2], size=ARENA)
    history.put(*KEYS[3:9], size=4096)


def within_one_page(history: History) -> None:
    """Slots that begin in a page where another ends, and what takes their place."""
    history.put(*KEYS[:12], size=5000)
    history.put(KEYS[12], size=ARENA)
    history.put(*KEYS[13:16], size=4096 + 1)


def dropped_while_pinned(history: History) -> None:
    history.put(*KEYS[:2])
    history.do(Pin(2, 1, KEYS[:1]))
    slot = history.core.blocks.by_key[KEYS[0]]
    history.do(Drop(1, 1, KEYS[:1]))
    history.do(Unpin(2, 1, [(slot.slot_id, slot.generation)]))
    history.put(KEYS[3])


def moved(history: History) -> None:
    """A block is SEALED at two places for a moment, and then at the new one."""
    history.put(*KEYS[:8], size=8192)
    for tenant in (1, 2):
        history.do(Retain(1, 1, KEYS[2 * tenant - 1 : 8 : 4], 60, tenant))
    history.put(KEYS[8], size=16384)
    assert history.core.blocks.counts["moved"] == 1


HISTORIES = (
    moved,
    first_use,
    value_in_the_request,
    evicted_and_reused,
    freed_and_reused_for_the_same_block,
    same_key_another_length,
    aborted,
    another_size,
    within_one_page,
    dropped_while_pinned,
)


def words_of(image: bytes) -> list[bytes]:
    return [image[i : i + 8] for i in range(0, len(image), 8)]


def torn(before: bytes, after: bytes):
    """Every image in which some of the words that the write changes are there and some are not."""
    old, new = words_of(before), words_of(after)
    changed = [i for i, (o, n) in enumerate(zip(old, new, strict=True)) if o != n]
    for count in range(len(changed) + 1):
        for done in combinations(changed, count):
            yield b"".join(new[i] if i in done else word for i, word in enumerate(old))


def recovered(headers: bytes, held: bytes) -> NodeCore:
    core = NodeCore(node_id=NODE, epoch=2, size_bytes=SIZE)
    bounds = Bounds(1 << 20, 0, 0)
    recover(core, scan(SIZE, bounds, memoryview(headers), memoryview(held)), 1, 0.0)
    return core


def blocks(core: NodeCore) -> set[tuple[int, bytes, int, int, int]]:
    return {
        (slot.slot_id, slot.key, slot.length, slot.generation, slot.checksum)
        for slot in core.blocks.by_key.values()
        if slot.state is SlotState.SEALED
    }


@pytest.mark.parametrize("happens", HISTORIES, ids=lambda f: f.__name__)
def test_a_torn_header_is_the_block_before_the_block_after_or_none(tmp_path, happens):
    history = History(tmp_path / happens.__name__)
    try:
        happens(history)
        assert history.writes
        held = bytes(ARENA // 4096)
        points = 0
        for write, before, after in history.writes:
            at = slice(write.slot_id * HEADER_BYTES, (write.slot_id + 1) * HEADER_BYTES)
            was, will = blocks(recovered(before, held)), blocks(recovered(after, held))
            others = {block for block in was if block[0] != write.slot_id}
            for image in torn(before, after):
                core = recovered(image, held)
                served = blocks(core)
                if image[at] == before[at]:
                    assert served == was
                elif image[at] == after[at]:
                    assert served == will
                else:
                    assert served == others, f"{write}: {image[at].hex()}"
                if image[at][0] == SlotState.RESERVED:
                    assert write.slot_id in core.former().reserved
                points += 1
        assert points > len(history.writes)
    finally:
        history.segment.close()


def test_every_whole_write_leaves_exactly_what_the_node_holds(tmp_path):
    """The oracle of the test above is not the code under test alone: here it is the core."""
    for happens in HISTORIES:
        history = History(tmp_path / happens.__name__)
        try:
            happens(history)
            held = bytes(ARENA // 4096)
            assert blocks(recovered(history.headers(), held)) == blocks(history.core)
        finally:
            history.segment.close()


def test_a_superblock_that_is_being_replaced_is_the_old_one_or_the_new_one():
    page = bytes(SUPERBLOCK_BYTES)
    starts = [Superblock(NODE, epoch, 0, SIZE) for epoch in (1, 2, 3, 4)]
    first = pack_superblock(starts[0])
    page = first + page[len(first) :]
    for old, new in pairwise(starts):
        raw, place = pack_superblock(new), superblock_place(page)
        after = page[:place] + raw + page[place + len(raw) :]
        images = list(torn(page, after))
        assert len(images) >= 2
        for image in images:
            assert newest_superblock(image) == (new if image == after else old)
        page = after
