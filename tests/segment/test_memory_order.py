"""Rules 1 and 3 where stores and loads may change places, as on ARM: everything that a reader can
see of a node at work, over all orders that the fences leave (docs/decisions/0086).

The stores are those of the real node, between its real fences. A model of the processors tries
them in every order: a store is seen by all others at once (as ARMv8 promises), stores to one place
in their order, and nothing passes a fence. Loads likewise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Drop, Fill, Mark, Reserve, Retain, Seal
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.segment import attached, batch_read, shm
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import PythonReader
from kvstore.segment.header import FREE, SEALED, Superblock, unpack
from kvstore.segment.shm import OwnedShm

NODE, SIZE = 7, 64 << 10
KEYS = Namespace.named("test").block_keys(range(20), 1)
VALUE_BYTES = 4096
MOVED_BYTES = 16384

Unit = str
"""A place in memory: of a slot's header "word" and "body", whose parts the CRC holds together, and
the "first" and the "last" bytes of its payload."""
Store = tuple[Unit, bytes]
LOOK: tuple[Unit, ...] = ("word", "body")
COPY: tuple[Unit, ...] = ("first", "last")


class Watched:
    """A node on real shared memory, and what it stores in one slot, from fence to fence."""

    def __init__(self, base: Path, slot_id: int) -> None:
        self.core = NodeCore(node_id=NODE, epoch=1, size_bytes=SIZE)
        self.segment = OwnedShm(base, Superblock(NODE, 1, 0, SIZE))
        self.slot_id = slot_id
        self.start = self._seen = self._now()
        self.epochs: list[list[Store]] = [[]]

    def _now(self) -> dict[Unit, bytes]:
        header, data = self.segment.header(self.slot_id), self.segment._data
        at = self.slot_id * 4096
        return {"word": header[:8], "body": header[8:], "first": data[at : at + 8]} | {
            "last": data[at + VALUE_BYTES - 8 : at + VALUE_BYTES]
        }

    def note(self) -> None:
        now = self._now()
        self.epochs[-1] += [(unit, now[unit]) for unit in now if now[unit] != self._seen[unit]]
        self._seen = now

    def fence(self) -> None:
        self.note()
        self.epochs.append([])

    def do(self, event: object) -> list[object]:
        """Have the node do it. A message is no fence: the loop may have got several at once."""
        effects = self.core.handle(event, 0.0)  # type: ignore[arg-type]
        for write in effects.writes:
            self.segment.apply(write)
            self.note()
        return list(effects.replies[0].body)

    def put(self, key: bytes, size: int = VALUE_BYTES, *, by_client: bool = False) -> None:
        """With the value in the request, or written by a client."""
        value = key[8:16] * (size // 8)
        inside = None if by_client else value
        (answer,) = self.do(Reserve(1, 1, [key], [size], 3, [0], [0], [inside], [0]))
        if isinstance(answer, Grant):
            self.fence()  # of the kernel's locks: the node has answered before the client writes,
            self.segment._data[answer.offset : answer.offset + size] = value
            self.fence()  # and it has written before it commits
            self.do(Commit(1, 1, [(answer.slot_id, answer.generation, 0)]))


def reused(node: Watched) -> None:
    node.put(KEYS[0])
    node.do(Drop(1, 1, KEYS[:1]))
    node.put(KEYS[1])


def evicted(node: Watched) -> None:
    for key in KEYS[: SIZE // VALUE_BYTES + 1]:
        node.put(key)


def written_by_clients(node: Watched) -> None:
    node.put(KEYS[0], by_client=True)
    node.do(Drop(1, 1, KEYS[:1]))
    node.put(KEYS[1], by_client=True)


def moved(node: Watched) -> None:
    """A retained block is copied by the node to where another was."""
    for key in KEYS[:8]:
        node.put(key, 8192)
    for tenant in (1, 2):
        node.do(Retain(1, 1, KEYS[2 * tenant - 1 : 8 : 4], 60, tenant))
    node.put(KEYS[8], MOVED_BYTES)
    assert node.core.blocks.counts["moved"] == 1


History = Callable[[Watched], None]
HISTORIES: dict[str, tuple[History, int]] = {
    "reused": (reused, 0),
    "evicted": (evicted, 0),
    "written by clients": (written_by_clients, 0),
    "moved": (moved, 4),
}
"""Each with the slot that is looked at."""


class State(NamedTuple):
    """How far the node's stores have come into sight, and the reader's loads."""

    memory: tuple[tuple[Unit, bytes], ...]
    epoch: int
    stored: frozenset[int]
    """Which stores of that epoch."""
    group: int
    loaded: tuple[tuple[Unit, bytes], ...]
    """What the loads have given, those of the present group in whatever order."""


Groups = tuple[tuple[Unit, ...], ...]
AGAIN = tuple(f"{unit} again" for unit in LOOK)
FENCED: Groups = (LOOK, COPY, AGAIN)
"""What a reader loads, from fence to fence: the last tests of this file show that they do."""


def steps(state: State, epochs: list[list[Store]], groups: Groups) -> Iterator[State]:
    """All that may come next."""
    memory, loaded, epoch = dict(state.memory), dict(state.loaded), epochs[state.epoch]
    if len(state.stored) == len(epoch) and state.epoch + 1 < len(epochs):
        yield state._replace(epoch=state.epoch + 1, stored=frozenset())
    waiting = [i for i in range(len(epoch)) if i not in state.stored]
    for i in waiting:
        unit, value = epoch[i]
        if not any(epoch[j][0] == unit for j in waiting if j < i):
            after = tuple(sorted((memory | {unit: value}).items()))
            yield state._replace(memory=after, stored=state.stored | {i})
    missing = [unit for unit in groups[state.group] if unit not in loaded]
    for unit in missing:
        seen = loaded | {unit: memory[unit.removesuffix(" again")]}
        last = len(missing) == 1
        yield state._replace(loaded=tuple(sorted(seen.items())), group=state.group + last)


def outcomes(
    start: dict[Unit, bytes], epochs: list[list[Store]], groups: Groups
) -> tuple[set[bytes], set[bytes]]:
    """The keys that a reader may be given the right bytes for, and those with wrong ones."""
    left = [State(tuple(sorted(start.items())), 0, frozenset(), 0, ())]
    met = set(left)
    right: set[bytes] = set()
    wrong: set[bytes] = set()
    while left:
        state = left.pop()
        if state.group < len(groups):
            new = set(steps(state, epochs, groups)) - met
            met |= new
            left += new
            continue
        seen = dict(state.loaded)
        header = unpack(seen["word"] + seen["body"])
        if header is not None and all(seen[unit] == seen[f"{unit} again"] for unit in LOOK):
            whole = {seen["first"], seen["last"]} == {header.key[8:16]}
            (right if whole else wrong).add(header.key)
    return right, wrong


def watch(
    base: Path, monkeypatch: pytest.MonkeyPatch, history: History, slot_id: int, without: str = ""
) -> Watched:
    """`history`, watched at one slot; `without` the fence of that method of the segment."""
    node = Watched(base / "segment", slot_id)

    def fence() -> None:
        if sys._getframe(1).f_code.co_name != without:
            node.fence()

    monkeypatch.setattr(shm, "FENCE", fence)
    history(node)
    node.segment.close()
    return node


@pytest.mark.parametrize(("history", "slot_id"), [*HISTORIES.values()], ids=[*HISTORIES])
def test_no_order_gives_a_reader_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: History, slot_id: int
) -> None:
    node = watch(tmp_path, monkeypatch, history, slot_id)
    right, wrong = outcomes(node.start, node.epochs, FENCED)
    assert not wrong
    assert len(right) == 2, "both blocks can be read, each in its time"


@pytest.mark.parametrize(
    ("without", "history"),
    [("_seal", "reused"), ("_fill", "reused"), ("_fill", "evicted"), ("_copy", "moved")],
)
def test_without_a_fence_of_the_node_there_is_such_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, history: str
) -> None:
    node = watch(tmp_path, monkeypatch, *HISTORIES[history], without)
    assert outcomes(node.start, node.epochs, FENCED)[1]


@pytest.mark.parametrize("groups", [(LOOK + COPY, AGAIN), (LOOK, COPY + AGAIN)])
@pytest.mark.parametrize("history", ["reused", "written by clients"])
def test_without_a_fence_of_the_reader_there_is_such_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: Groups, history: str
) -> None:
    node = watch(tmp_path, monkeypatch, *HISTORIES[history])
    assert outcomes(node.start, node.epochs, groups)[1]


KEY, VALUE, OTHER = KEYS[0], b"v" * VALUE_BYTES, b"o" * VALUE_BYTES


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "segment", Superblock(NODE, 1, 0, SIZE))
    segment.apply(Fill(0, VALUE))
    segment.apply(Seal(0, 5, KEY, VALUE_BYTES, 0, 3, 0, 0, 0))
    yield segment
    segment.close()


@pytest.fixture
def seen(owned: OwnedShm) -> Iterator[AttachedShm]:
    segment = AttachedShm(owned.data_path, owned.head_path)
    yield segment
    segment.close()


def at_fences(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *does: Callable[[], None]
) -> list[int]:
    """Have the fences of a module do those things, one each; the returned list has a number for
    each that was passed."""
    passed: list[int] = []

    def fence() -> None:
        passed.append(len(passed))
        does[passed[-1]]()

    monkeypatch.setattr(module, "FENCE", fence)
    return passed


def test_a_batch_is_copied_between_two_fences_and_looked_at_again_after_them(
    owned: OwnedShm, seen: AttachedShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Any:
        return PythonReader().read(seen._mapped, [KEY], [None], 1 << 3)[0][0]

    passed = at_fences(
        monkeypatch,
        batch_read,
        lambda: owned.apply(Fill(0, OTHER)),
        lambda: owned.apply(Fill(0, VALUE)),
        lambda: None,
        lambda: owned.apply(Mark(0, FREE, 5)),
    )
    assert read() == OTHER
    assert read() is None
    assert passed == [0, 1, 2, 3]


def test_a_look_at_a_header_is_between_two_fences(
    owned: OwnedShm, seen: AttachedShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = at_fences(
        monkeypatch,
        attached,
        lambda: owned.apply(Mark(0, SEALED, 6)),
        lambda: owned.apply(Mark(0, SEALED, 7)),
    )
    assert int.from_bytes(seen.header(0)[:8], "little") >> 16 == 6
    assert passed == [0, 1]


@pytest.mark.parametrize("each", [False, True])
def test_what_a_hint_leads_to_was_looked_at_before_a_fence(
    owned: OwnedShm, seen: AttachedShm, monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    passed = at_fences(monkeypatch, attached, lambda: owned.apply(Mark(0, FREE, 6)))
    slot_id, image = next(iter(seen.hinted_each([KEY]))) if each else seen.hinted(KEY)
    assert (slot_id, unpack(image) is not None) == (0, True)
    assert passed == [0]
