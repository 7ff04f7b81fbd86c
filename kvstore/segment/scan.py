"""What the slot headers of a segment say, read at once when a node is started again.

A segment of 100 GiB has 26 million places for headers, most of them unused, so a look at
all of them is avoided where it can be. What makes that right: an arena's first slot is the
first to be handed out whenever the arena is given to a class. So an arena whose first
word is 0 was never used, and headers behind the last slot of the present class say
nothing: their generations are lower than the first slot's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvstore.core.events import Mark, Seal
from kvstore.core.recovery import ArenaSeen, HeldSlot, fits
from kvstore.core.sizes import SLOT_BYTES
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.header import (
    FREE,
    GENERATION_MAX,
    HEADER_BYTES,
    RESERVED,
    SEALED,
    Superblock,
    all_fields,
    body_of,
    fields,
    of_word,
)

_WORDS = HEADER_BYTES // 8
_make_seal = partial(tuple.__new__, Seal)
"""As `Seal(...)`, without taking its arguments apart."""


class DamagedSegmentError(ValueError):
    """Its headers contradict each other: nobody can say what may be reused."""


def scan(superblock: Superblock, headers: memoryview, held: memoryview) -> Iterator[ArenaSeen]:
    """Every arena that was ever used. `headers` are 64 bytes a slot, `held` is one byte a slot.

    Raises `DamagedSegmentError`; the caller then starts with an empty segment.
    """
    slots = superblock.arena_bytes // SLOT_BYTES_MIN
    words = headers.cast("Q")[::_WORDS]
    for index in range(superblock.arenas):
        first = index * slots
        if words[first]:
            yield _Arena(superblock, index, headers, held, words).seen()


class _Arena:
    def __init__(
        self,
        superblock: Superblock,
        index: int,
        headers: memoryview,
        held: memoryview,
        words: memoryview,
    ) -> None:
        self._superblock = superblock
        self._index = index
        self._slots = superblock.arena_bytes // SLOT_BYTES_MIN
        self._first = index * self._slots
        self._headers = headers
        self._held = held[self._first : self._first + self._slots]
        self._words = words

    def seen(self) -> ArenaSeen:
        size_class = self._class_of(0)
        if size_class < 0:
            size_class = self._class_of_any()
        # Without a class nothing lives here, and generations of all classes count.
        count = self._slots
        if size_class >= 0:
            count = self._superblock.arena_bytes // SLOT_BYTES[size_class]
        words = self._words[self._first : self._first + count].tolist()
        generation = max(words) >> 16
        if generation > GENERATION_MAX // 2:
            raise DamagedSegmentError(f"arena {self._index}: generation {generation}")
        found = ArenaSeen(self._index, size_class, generation, [], set(), [], [], [])
        pinned = self._pinned()
        used = max((position for position, word in enumerate(words) if word), default=-1) + 1
        blocks = self._blocks(used, size_class)
        found.sealed.extend(filter(None, blocks))
        found.pinned.update(self._first + p for p in pinned if p < used and blocks[p])
        for position, block in enumerate(blocks):
            if block is None and words[position]:
                self._look(found, position, words[position], position in pinned)
        return found

    def _blocks(self, used: int, size_class: int) -> list[Seal | None]:
        """Blocks of that class in the first `used` slots: nearly all that there is to be found."""
        if size_class < 0:
            return [None] * used
        slot_bytes = SLOT_BYTES[size_class]
        start = self._first * HEADER_BYTES
        headers = all_fields(bytes(self._headers[start : start + used * HEADER_BYTES]))
        return [
            _make_seal((slot_id, *seen))
            if seen is not None and seen[3] == size_class and seen[5] <= seen[2] <= slot_bytes
            else None
            for slot_id, seen in enumerate(headers, self._first)
        ]

    def _look(self, found: ArenaSeen, position: int, word: int, pinned: bool) -> None:
        slot_id = self._first + position
        state, generation, size_class = of_word(word)
        if state == RESERVED:
            if size_class != found.size_class:
                raise self._contradiction(position, size_class, found.size_class)
            found.held.append(HeldSlot(slot_id, generation, True))
            self._left(found, slot_id, generation - 1)
            return
        if state == SEALED:
            block = self._sealed(slot_id)
            if block is not None:
                if block.size_class != found.size_class:
                    raise self._contradiction(position, block.size_class, found.size_class)
                found.sealed.append(block)
                if pinned:
                    found.pinned.add(slot_id)
                return
            found.damaged.append(Mark(slot_id, FREE, generation))
        elif state != FREE:
            raise DamagedSegmentError(f"slot {slot_id}: state {state}")
        if pinned:
            found.held.append(HeldSlot(slot_id, generation, False))
        self._left(found, slot_id, generation)

    def _left(self, found: ArenaSeen, slot_id: int, generation: int) -> None:
        block = self._body(slot_id, generation)
        if block is not None:
            found.gone.append(block)

    def _class_of(self, position: int) -> int:
        """The size class that a slot in use says it has; -1 for one that is not in use."""
        slot_id = self._first + position
        state, generation, size_class = of_word(self._words[slot_id])
        if state == RESERVED:
            if not self._fits_class(position, size_class):
                raise DamagedSegmentError(f"slot {slot_id}: reserved in class {size_class}")
            return size_class
        block = self._sealed(slot_id) if state == SEALED else None
        if block is None and self._held[position]:
            block = self._body(slot_id, generation)
            if block is None:
                raise DamagedSegmentError(f"slot {slot_id}: pinned, and nobody knows how large")
        return -1 if block is None else block.size_class

    def _class_of_any(self) -> int:
        words = self._words[self._first : self._first + self._slots].tolist()
        pinned = self._pinned()
        for position, word in enumerate(words):
            if word & 0xFF or position in pinned:
                size_class = self._class_of(position)
                if size_class >= 0:
                    return size_class
        return -1

    def _pinned(self) -> set[int]:
        held = bytes(self._held)
        return {i for i, byte in enumerate(held) if byte} if any(held) else set()

    def _fits_class(self, position: int, size_class: int) -> bool:
        return (
            size_class < len(SLOT_BYTES)
            and (position + 1) * SLOT_BYTES[size_class] <= self._superblock.arena_bytes
        )

    def _sealed(self, slot_id: int) -> Seal | None:
        """The block that a header describes; None unless it is whole and possible."""
        return self._checked(slot_id, fields(self._image(slot_id)))

    def _body(self, slot_id: int, generation: int) -> Seal | None:
        """The block that was sealed there in that generation, if the body still tells."""
        if generation <= 0:
            return None
        return self._checked(slot_id, body_of(self._image(slot_id), generation))

    def _image(self, slot_id: int) -> bytes:
        return bytes(self._headers[slot_id * HEADER_BYTES : (slot_id + 1) * HEADER_BYTES])

    def _checked(
        self, slot_id: int, seen: tuple[int, bytes, int, int, int, int, int, int] | None
    ) -> Seal | None:
        if seen is None:
            return None
        block = Seal(slot_id, *seen)
        return block if fits(block, self._slots, self._superblock.arena_bytes) else None

    def _contradiction(self, position: int, found: int, expected: int) -> DamagedSegmentError:
        return DamagedSegmentError(
            f"slot {self._first + position}: size class {found} in an arena of {expected}"
        )
