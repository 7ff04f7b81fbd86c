"""A reader over one mapped segment and one node on another host, without either of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stores import announcement

from kvstore.client.explanation import MissReason, Unreadable
from kvstore.client.nodes.known import Attached, KnownNode
from kvstore.client.nodes.readability import Readability
from kvstore.client.reader import Place, Reader
from kvstore.core.events import Fill, Mark, Seal
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.nodedir import Announcement, NodeDir
from kvstore.record import RecordSigner
from kvstore.segment.attached import AttachedShm
from kvstore.segment.shm import OwnedShm
from kvstore.types import Key, Location

KEY = b"k" * 32
VALUE = b"v" * 1000
HERE = Location(7, 1, 0, 3, 1, 0, len(VALUE), 0)
AWAY = HERE._replace(node_id=8)
ReaderOf = Callable[..., Reader]
"""Makes one of an index, and options of `Reader`."""
SIGNER = RecordSigner(b"a secret of some length", "kv:t")


def key_of(number: int) -> Key:
    return bytes([number]) * 8 + number.to_bytes(4, "little") + bytes([number]) * 20


class Nodes:
    """One mapped segment, of node 7."""

    machine = REAL

    def __init__(self, owned: OwnedShm) -> None:
        shm = AttachedShm(owned.data_path, owned.head_path)
        word = announcement(node_id=7, epoch=1)
        self.attached = Attached(word, shm, NodeDir(Path("/"), "n"), ours=True)
        self.mapped: tuple[Attached, ...] = (self.attached,)
        self.unmapped: tuple[Attached, ...] = ()
        """Those that `map_all` finds."""
        self.in_vram: dict[tuple[int, int], Announcement] = {}
        """Starts whose VRAM can be read."""
        self.gone = 0
        self.checks = 0
        self.finds: list[bool] = []

    def check(self, now: float) -> None:
        self.checks += 1

    def map_all(self, now: float) -> bool:
        found, self.unmapped = self.unmapped, ()
        self.mapped += found
        return bool(found)

    def map_ours(self, now: float) -> bool:
        return False

    def ours(self, now: float, *, find: bool) -> list[Attached]:
        self.check(now)
        self.finds.append(find)
        return [one for one in self.mapped if one.ours]

    def every(self, now: float) -> tuple[Attached, ...]:
        self.check(now)
        self.map_all(now)
        return self.mapped

    def segment(self, node_id: int, epoch: int, now: float) -> Any:
        return self.attached if (node_id, epoch) == (7, 1) else None

    def entry(self, node_id: int, epoch: int) -> KnownNode:
        known = KnownNode(epoch)
        known.attached = self.segment(node_id, epoch, 0.0)
        known.in_vram = self.in_vram.get((node_id, epoch))
        return known

    def get(self, node_id: int) -> None:
        """Nothing is known of it."""

    def only_others(self) -> None:
        """Its nodes are this user's."""


class Remote:
    """Node 8 on another host, while it is `reached`."""

    def __init__(self, **announced: Any) -> None:
        self.word = announcement(node_id=8, epoch=1, **announced)
        self.reached = True
        self.vram: Any = None

    def why_not(self, node_id: int, epoch: int) -> Unreadable:
        return Unreadable(MissReason.OUT_OF_REACH, "")

    def node(self, node_id: int, epoch: int, now: float) -> Any:
        return self.word if self.reached and (node_id, epoch) == (8, 1) else None


def readable(nodes: object, remote: object = None) -> Readability:
    """What can be read of these; without `remote`, of no other host."""
    if remote is None:
        remote = Remote()
        remote.reached = False
    return Readability(nodes, remote, verifies=False)  # type: ignore[arg-type]


class Counting(MemoryIndex):
    """Remembers the batches that were looked up, and fails after so many of them."""

    def __init__(self, answers: float = float("inf")) -> None:
        super().__init__()
        self.asked: list[list[Key]] = []
        self._answers = answers

    def match(self, keys: Sequence[Key]) -> list[bytes]:
        self._ask(keys)
        return super().match(keys)

    def lookup(self, keys: Sequence[Key]) -> list[bytes | None]:
        self._ask(keys)
        return super().lookup(keys)

    def _ask(self, keys: Sequence[Key]) -> None:
        self.asked.append(list(keys))
        if len(self.asked) > self._answers:
            raise IndexUnavailableError("away")


def save(
    segment: OwnedShm,
    granule: int = 0,
    *,
    key: Key = KEY,
    slot_id: int = 3,
    meta_length: int = 0,
    checksum: int = 0,
    kind: int = 1,
    value: bytes = VALUE,
    generation: int = 1,
) -> None:
    segment.apply(Mark(slot_id, generation, 1))
    segment.apply(Fill(slot_id * 4096, value))
    whole = Seal(slot_id, generation, key, len(value), granule, kind, meta_length, checksum, 0)
    segment.apply(whole)


def found_by(reader: Reader, key: Key = KEY, *, remembered: bool = False) -> Place:
    """The place of a block that is in the mapped segment."""
    (place,) = reader.search([key], remembered=remembered)
    assert isinstance(place, Place)
    return place


def nobody(**methods: Any) -> Any:
    """Something with these methods alone."""
    return SimpleNamespace(**methods)
