"""Headers written by one compiled call (compiled/block_writes.c) are those that Python writes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from block_writes import block_writes
from contract.segment import BLOCK, Pair, SegmentContract
from each_input import each
from segment_bytes import head_of, hints_in_head

from kvstore.compiled import part
from kvstore.core.events import Bounds, Copy, Fill, Hold, Keep, Mark, Seal, Write
from kvstore.segment import shm
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import FREE, RESERVED, SEALED, hint_of, unpack
from kvstore.segment.shm import OwnedShm, header_writer

SLOTS = BLOCK.size_bytes >> 12
KEY = bytes(range(32))
SOUND = Seal(1, 9, KEY, 7, 0, 1, 2, 3, 5)
MARK = Mark(1, RESERVED, 9, 1, 8)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "WRITE_HEADERS", block_writes().write_headers)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "segment", BLOCK)
    yield segment
    segment.close()


class OneByOne(OwnedShm):
    """Writes each by a call of its own."""

    def apply(self, write: Write) -> None:
        self.apply_all([write])


@pytest.mark.usefixtures("compiled")
class TestCompiled(SegmentContract):
    @pytest.fixture
    def pair(self, tmp_path: Path) -> Pair:
        owner = OneByOne(tmp_path / "segment", BLOCK)
        return owner, AttachedShm(owner.data_path, owner.head_path)


def any_write(rng: random.Random) -> Write:
    """Of a few keys whose hints have a few places, in a few slots."""
    slot, generation = rng.randrange(SLOTS), rng.getrandbits(48)
    key = (
        bytes(8) + rng.choice([0, 1, 2, 77]).to_bytes(4, "little") + bytes([rng.randrange(6)]) * 20
    )
    chance = rng.random()
    if chance < 0.5:
        checksum, namespace = rng.getrandbits(64), rng.getrandbits(32)
        sizes = rng.getrandbits(32), rng.randrange(4), rng.randrange(256), rng.getrandbits(16)
        return Seal(slot, generation, key, *sizes, checksum, namespace)
    if chance < 0.8:
        state = rng.choice([FREE, RESERVED])
        return Mark(slot, state, generation, rng.randrange(4), rng.getrandbits(24))
    return rng.choice(
        [
            Fill(rng.randrange(4096), rng.randbytes(100)),
            Copy(0, 8192, 4096),
            Hold(slot, rng.random() < 0.5),
            Keep(slot, rng.getrandbits(32), rng.getrandbits(32)),
            Bounds(generation, rng.getrandbits(32), rng.getrandbits(32)),
        ]
    )


def test_every_byte_is_the_one_that_python_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    writes = [any_write(rng) for _ in range(6000)]
    files = []
    for number, writer in enumerate((None, block_writes().write_headers)):
        monkeypatch.setattr(shm, "WRITE_HEADERS", writer)
        segment = OwnedShm(tmp_path / f"s{number}", BLOCK)
        head_of(segment)[3072:4096] = bytes(1024)  # its sign of life is a time
        segment.apply_all(writes)
        files.append((segment.head_path.read_bytes(), segment.data_path.read_bytes()))
        segment.close()
    assert files[0] == files[1]


@pytest.mark.parametrize("there", [SLOTS, 1 << 20, (1 << 32) - 1])
def test_a_hint_to_no_slot_is_replaced_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """A segment that was taken over may be damaged: that ends no node."""
    for number, writer in enumerate((None, block_writes().write_headers)):
        monkeypatch.setattr(shm, "WRITE_HEADERS", writer)
        segment = OwnedShm(tmp_path / f"s{number}", BLOCK)
        place = hint_of(KEY, len(hints_in_head(segment)))
        hints_in_head(segment)[place] = there
        # As if the table's own begin were the header of another block with these places.
        hints_in_head(segment)[0], hints_in_head(segment)[4] = SEALED, place
        segment.apply_all([SOUND])
        assert hints_in_head(segment)[place] == SOUND.slot_id
        segment.close()


def fills_by(owned: OwnedShm, fill: Callable[[Any], None]) -> None:
    """Have another than its own carry out `Fill`."""
    owned._apply[Fill] = fill


@pytest.mark.usefixtures("compiled")
def test_others_are_written_in_their_place_among_headers(owned: OwnedShm) -> None:
    said = []

    def fill(write: Fill) -> None:
        said.append((write.offset, owned.header(1)[0]))

    fills_by(owned, fill)
    owned.apply_all([Fill(1, b""), MARK, Fill(2, b""), SOUND, Fill(3, b"")])
    assert said == [(1, FREE), (2, RESERVED), (3, SEALED)]


@pytest.mark.usefixtures("compiled")
def test_what_another_write_raises_ends_it_there(owned: OwnedShm) -> None:
    def fill(write: Fill) -> None:
        raise RuntimeError("full")

    fills_by(owned, fill)
    with pytest.raises(RuntimeError, match="full"):
        owned.apply_all([MARK, Fill(1, b""), SOUND])
    assert owned.header(1)[0] == RESERVED


@pytest.mark.usefixtures("compiled")
def test_a_list_that_shrinks_meanwhile_is_not_read_beyond_its_end(owned: OwnedShm) -> None:
    writes: list[Write] = [Fill(1, b"")] * 50
    fills_by(owned, lambda write: writes.clear())
    owned.apply_all(writes)
    assert writes == []


WRONG: list[tuple[Any, type[Exception]]] = [
    (SOUND._replace(slot_id=SLOTS), IndexError),
    (MARK._replace(slot_id=SLOTS), IndexError),
    (SOUND._replace(slot_id=-1), OverflowError),
    (SOUND._replace(key=KEY[1:]), ValueError),
    (SOUND._replace(key="k" * 32), TypeError),
    *(
        (SOUND._replace(**{name: 1 << bits}), ValueError)
        for name, bits in (
            *(("slot_id", 32), ("generation", 48), ("length", 32), ("granule", 8), ("kind", 8)),
            *(("meta_length", 16), ("namespace_id", 32)),
        )
    ),
    (SOUND._replace(checksum=1 << 64), OverflowError),
    (SOUND._replace(length=7.0), TypeError),
    *(
        (MARK._replace(**{name: 1 << bits}), ValueError)
        for name, bits in (("slot_id", 32), ("state", 8), ("generation", 48), ("granule", 8))
    ),
    (MARK._replace(size=1 << 24), ValueError),
]


@pytest.mark.usefixtures("compiled")
@each(("wrong", "error"), WRONG)
def test_what_no_header_can_say_is_refused_and_nothing_written(
    owned: OwnedShm, wrong: Write, error: type[Exception]
) -> None:
    before = owned.head_path.read_bytes()
    with pytest.raises(error):
        owned.apply_all([wrong])
    assert owned.head_path.read_bytes() == before


def test_the_largest_that_a_header_can_say_is_written(owned: OwnedShm, compiled: None) -> None:
    most = (SLOTS - 1, (1 << 48) - 1, b"\xff" * 32, (1 << 32) - 1, 255, 255, (1 << 16) - 1)
    owned.apply_all([Seal(*most, (1 << 64) - 1, (1 << 32) - 1)])
    header = unpack(owned.header(SLOTS - 1))
    assert header is not None
    assert tuple(header) == (*most[1:], (1 << 64) - 1, (1 << 32) - 1)


@pytest.mark.parametrize(
    ("slots", "hints"), [(0, 1), (SLOTS, 0), (SLOTS, 3), (SLOTS, 1 << 20), (1 << 20, 4), (-1, 4)]
)
def test_a_file_that_is_too_small_for_its_tables_is_refused(
    owned: OwnedShm, slots: int, hints: int
) -> None:
    write = block_writes().write_headers
    with pytest.raises(ValueError, match="not of that segment"):
        write(head_of(owned), slots, hints, [], Mark, Seal, print)


def test_memory_that_is_closed_or_read_only_is_refused(owned: OwnedShm) -> None:
    write: Callable[..., None] = block_writes().write_headers
    for head in (bytes(1 << 20), memoryview(bytearray(1 << 20)).toreadonly()):
        with pytest.raises((BufferError, TypeError)):
            write(head, SLOTS, 4, [], Mark, Seal, print)


def test_python_writes_where_it_is_asked_to_and_nobody_else_can() -> None:
    assert header_writer("no") is None
    assert header_writer(None, "kvstore.no_such_part") is None
    with pytest.raises(ImportError):
        header_writer("yes", "kvstore.no_such_part")


WRITER = """
import sys
from pathlib import Path
from batch_readers import compiled_module
from kvstore.compiled import part
from kvstore.core.events import Mark, Seal
from kvstore.segment import shm
from kvstore.segment.header import Superblock
where = Path(sys.argv[1])
shm.WRITE_HEADERS = compiled_module(part.BLOCK_WRITES_SOURCE, where).write_headers
owned = shm.OwnedShm(where / "segment", Superblock(7, 3, 0, 128 << 10))
print("ready", flush=True)
generation = 0
while True:
    generation += 1
    key = generation.to_bytes(4, "little") * 8
    seal = Seal(1, generation, key, generation, 0, 1, 0, generation, 5)
    owned.apply_all([Mark(1, 1, generation), seal])
"""
SLOW = "-include " + str(Path(__file__).parents[2] / "support" / "nodes" / "slow_stores.h")


def test_another_process_never_sees_a_sealed_word_over_another_body(tmp_path: Path) -> None:
    """Rule 3: the word comes last, and is taken away before the body changes."""
    block_writes()
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CFLAGS": SLOW},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        reader = AttachedShm(tmp_path / "segment.data", tmp_path / "segment.head")
        seen = set()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            first, image, last = (reader.header(1) for _ in range(3))
            if first[0] == SEALED and first[:8] == image[:8] == last[:8]:
                header = unpack(image)
                assert header is not None
                assert header.key == header.generation.to_bytes(4, "little") * 8
                seen.add(header.generation)
        assert len(seen) > 10
        reader.close()
    finally:
        child.kill()
        child.wait(10)


def test_the_build_that_is_loaded_is_of_the_source_beside_it() -> None:
    loaded = part.load(None, part.BLOCK_WRITES, part.BLOCK_WRITES_SOURCE)
    assert loaded is None or loaded.SOURCE_CRC32 == block_writes().SOURCE_CRC32
