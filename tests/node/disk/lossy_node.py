"""A node's core, its disks' logs and writers, as they are, over disks that lose power: one event
at a time, without threads, and an oracle that knows what may be found.

Clients, and now and then the writer of another disk, act between any two events of a writer. What
is answered is noted: from then on only what was saved later may be found, in this start or any
later one. What is not answered yet holds for this start alone.
"""

from __future__ import annotations

import logging
import mmap
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from xxhash import xxh3_64_intdigest

from kvstore.core.answers import Grant
from kvstore.core.disk import tier
from kvstore.core.events import (
    NOBODY,
    Clear,
    Commit,
    Copy,
    Drop,
    Event,
    Fill,
    Reply,
    Reserve,
    Reset,
    Suspect,
    Touch,
    Vacate,
)
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.resets import Resets
from kvstore.errors import DeadlineError, PeerError
from kvstore.node.control.turns import Turns
from kvstore.node.disk import disks, writer
from kvstore.segment import header
from kvstore.segment.disk import device
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.format import Geometry
from kvstore.segment.disk.table import DiskTable
from kvstore.testing.sim.models.disk import PAGE, PowerLossError, SimDisk
from kvstore.types import STORED, DiskBlock, Key, Kind

REGION_BYTES, LOG_BYTES, REGIONS = 12 * PAGE, 256 << 10, 4
SIZE = Geometry(REGION_BYTES, LOG_BYTES, REGIONS).start(REGIONS) * PAGE
NODE, CLIENT = 7, 1
KEYS = [bytes([number]) * 32 for number in range(1, 21)]
SPACES = [1, 2, 3]
MEMORY_BYTES = 16 * PAGE
LIVES, STEPS = 6, 250
ENDS_CHANCE = 0.02
"""Of a power loss as soon as a client was told that something is gone."""
TABLE_BLOCKS = 10
"""For which the table has one window: it is full now and then."""


def kind_of(key: Key) -> Kind:
    return Kind.BLOCK if key[0] % 2 else Kind.BYTES


def space_of(key: Key) -> int:
    return SPACES[key[0] % len(SPACES)]


class Power(SimDisk):
    """A disk that ends the node with its power."""

    def __init__(self, node: LossyNode, rng: random.Random) -> None:
        super().__init__(SIZE, rng)
        self.node = node

    def _step(self) -> None:
        try:
            super()._step()
        except PowerLossError:
            self.node.is_dead = True
            raise


class Anonymous:
    """A machine whose shared memory has no name."""

    def remove_memory(self, path: Path) -> None:
        pass

    def create_memory(self, path: Path, size_bytes: int) -> mmap.mmap:
        return mmap.mmap(-1, size_bytes)


class Loop:
    """Calls back when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        self.calls.append(lambda: call(*args))

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        if not delay_s:
            self.call_soon_threadsafe(call, *args)

    def go_on(self) -> None:
        while self.calls:
            self.calls.pop(0)()


class LossyNode:
    """One node with two disks, and its oracle, over power losses."""

    def __init__(
        self, seed: int, *, is_quiet: bool = False, keys: Mapping[bytes, bytes] | None = None
    ) -> None:
        """`is_quiet`: nothing happens but what the test does, and blocks are written at once."""
        self.rng = random.Random(seed)
        self.is_quiet = is_quiet
        self.keys = keys or {}
        self.is_dead = False
        self.files = [Power(self, self.rng) for _ in range(2)]
        self.may_fail = seed % 3 == 1
        self.may_be_away = seed % 3 == 2 and not is_quiet
        self.away = -1
        """The disk that the next start does without."""
        self.noted: set[bytes] = set()
        self.known = Resets()
        """What other nodes know of resets."""
        self.allowed: dict[Key, dict[bytes, int]] = {key: {} for key in KEYS}
        """What may be found, with the number of the act that saved it last."""
        self.acts = self.runs = self.hits = self.adopted = 0
        self.seen: dict[str, int] = {}
        self.rotten: list[tuple[Power, int, bytes]] = []

    # --- a start ------------------------------------------------------------------------

    def open(self, disk: Any, number: int, node_id: int, **how: Any) -> DiskDevice:
        if number == self.away:
            raise OSError("it is away")
        sizes = {"region_bytes": REGION_BYTES, "log_bytes": LOG_BYTES}
        return DiskDevice.open(self.files[number], number, node_id, **sizes, keys=self.keys)

    def start(self) -> None:
        rng = self.rng
        self.runs += 1
        self.now = float(self.runs * 1000)
        self.asks = 0
        if not self.is_quiet:
            self.away = 0 if self.may_be_away and rng.random() < 0.3 else -1
        self.ends_soon = False
        self.favoured: list[Key] = []
        self.at_least = dict.fromkeys(KEYS, 0)
        """The act of this start that dropped or replaced the key last."""
        self.waiting: dict[int, tuple[int, list[Key], Callable[[], None]]] = {}
        self.memory = memoryview(bytearray(MEMORY_BYTES))
        self.core = NodeCore(node_id=NODE, epoch=self.runs, size_bytes=MEMORY_BYTES)
        config: Any = SimpleNamespace(
            name="lossy",
            run_dir=None,
            disks=[SimpleNamespace(directory=n, size_bytes=SIZE) for n in range(2)],
            disk_forced=True,
            disk_keys=self.keys,
            disk_blocks=TABLE_BLOCKS,
            disk_writes_per_day=0.0,
            disk_write="through" if self.is_quiet else rng.choice(tier.WRITE_MODES),
        )
        self.disks = disks.NodeDisks(config, NODE, self.known, self.runs)
        for number, ids in self.disks.resets():
            self.core.handle(Reset(NOBODY, 0, number, ids), self.now)
        self.loop: Any = Loop()
        self.tier = self.disks.start(
            config, Path("data"), (NODE, self.runs), self.loop, Turns(self.loop)
        )
        self.core.use_disks(self.tier)
        self.is_serving = True
        self.working: Any = None
        self.disks.serve(lambda: (self, self))  # type: ignore[arg-type,return-value]
        self.writers: dict[int, Any] = dict(
            zip(self.disks.devices, self.disks._writers, strict=True)
        )
        for number, one in self.writers.items():
            one._tell_of(number, self.disks.devices[number])
        for number, one in self.writers.items():
            one._adopt(number, one._devices[number])
        self.adopted += self.tier.counts["adopted"]

    # --- what the writer has of the node ------------------------------------------------

    @property
    def payload(self) -> memoryview:
        self.between()  # a slot may be another block's when it is copied
        return self.memory

    def header(self, slot_id: int) -> bytes:
        slot = self.core.blocks.allocator.slot(slot_id)
        if slot is None or slot.state is not SlotState.SEALED:
            return bytes(header.HEADER_BYTES)
        what = (slot.generation, slot.key, slot.length, slot.granule, slot.kind)
        return header.pack((*what, slot.meta_length, slot.checksum, slot.namespace_id))

    def close(self) -> None:
        pass

    def tell(self, what: Any) -> None:
        self.favour(what)
        self.between()
        self.carry_out(what._replace(session=2))

    def hint(self, event: Any) -> None:
        self.carry_out(event)

    def ask(self, what: Any, deadline: float, take_back: Any = None) -> Any:
        self.favour(what)
        self.between()
        (reply,) = self.carry_out(what._replace(session=2))
        self.favour(reply.body)
        # Where a region was given up for the next is where most could go wrong.
        for _ in range(8 if isinstance(what, Vacate) else 1):
            self.between()
        if not self.is_quiet and self.rng.random() < 0.01:
            if take_back is not None:
                self.tell(take_back(reply.body))
            raise DeadlineError("timed out")
        return reply.body

    def favour(self, what: Any) -> None:
        """Have clients act on what the writer is about: most races are over that."""
        fields = ("blocks", "promote", "written")
        found = [one for name in fields for one in getattr(what, name, None) or ()]
        blocks = [getattr(one, "block", one) for one in found]
        if keys := [block.key for block in blocks if block is not None]:
            self.favoured = keys

    def between(self) -> None:
        """Let clients act between two events of the writer, or the power fail."""
        if self.is_quiet:
            return
        if self.rng.random() < 0.3:
            self.act()
        if self.rng.random() < 0.02:
            self.write(self.rng.choice([*self.writers.values(), None]))
        if self.rng.random() < 0.004:
            self.is_dead = True
            raise PowerLossError

    # --- what the daemon does -------------------------------------------------------------

    def carry_out(self, event: Event) -> list[Reply]:
        if self.is_dead:
            raise PowerLossError
        effects = self.core.handle(event, self.now)
        for write in effects.writes:
            if isinstance(write, Fill):
                self.memory[write.offset : write.offset + len(write.value)] = write.value
            assert not isinstance(write, Copy)
        self.disks.carried_out(self.core.blocks.counts["evicted"])
        for reply in effects.replies:
            if reply.after_log:
                self.disks.hold(reply, self.answer)
            else:
                self.answer(reply)
        return effects.replies

    def answer(self, reply: Reply) -> None:
        number, keys, then = self.waiting.pop(reply.request, (0, [], lambda: None))
        if isinstance(reply.body, PeerError):
            self.count("not_confirmed")
            return
        # Just told: what is lost now must not have been what the answer stands on.
        self.ends_soon = self.ends_soon or (bool(keys) and self.rng.random() < ENDS_CHANCE)
        for key in keys:
            values = self.allowed[key]
            self.allowed[key] = {v: act for v, act in values.items() if act >= number}
            self.at_least[key] = max(self.at_least[key], number)
        then()

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    # --- what clients do ------------------------------------------------------------------

    def request(
        self, event: Any, keys: list[Key], then: Callable[[], None] = lambda: None
    ) -> list[Reply]:
        """Ask for what leaves nothing of these keys that was saved before."""
        self.acts += 1
        if not isinstance(event, Clear | Reset):  # those take their time
            self.at_least.update(dict.fromkeys(keys, self.acts))
        self.waiting[self.acts] = (self.acts, keys, then)
        return self.carry_out(event._replace(session=CLIENT, request=self.acts))

    def save(self, key: Key) -> None:
        rng, kind = self.rng, kind_of(key)
        version = 0 if kind is Kind.BLOCK else rng.randrange(3)
        value = random.Random(key[0] * 10 + version).randbytes(
            1 + (key[0] + 7 * version) * 1900 % 9000
        )
        how = ([kind], [0], [None], [0])
        reserve = Reserve(CLIENT, 0, [key], [len(value)], space_of(key), *how)
        grant = self.carry_out(reserve)[0].body[0]  # type: ignore[index]
        if not isinstance(grant, Grant):
            return
        self.memory[grant.offset : grant.offset + len(value)] = value
        checksum = rng.choice([0, xxh3_64_intdigest(value)])
        self.allowed[key][value] = self.acts + 1
        commit = Commit(CLIENT, 0, [(grant.slot_id, grant.generation, checksum)])
        (reply,) = self.request(commit, [key] if kind is not Kind.BLOCK else [])
        assert reply.body == [STORED]

    def clear(self) -> None:
        space = self.rng.choice(SPACES)
        self.request(Clear(0, 0, space), [key for key in KEYS if space_of(key) == space])

    def reset(self) -> None:
        ids = self.rng.choice([(), (SPACES[0],), (SPACES[1], SPACES[2])])
        number = self.core.resets.next_number(self.runs << 20 | self.acts)
        keys = [key for key in KEYS if not ids or space_of(key) in ids]
        heard = self.rng.random() < 0.5
        self.request(
            Reset(0, 0, number, ids), keys, lambda: self.known.add(number, ids) if heard else None
        )

    def get(self, key: Key) -> None:
        """Compare what is found with the oracle."""
        slot = self.core.blocks.by_key.get(key)
        if slot is not None and slot.state is SlotState.SEALED:
            found: bytes | None = bytes(self.memory[slot.offset : slot.offset + slot.length])
        else:
            block = self.on_disk(key)
            where = block and self.disks.devices.get(block.place.device)
            try:
                found = where.read(block) if block and where else None
            except OSError:
                return
            self.hits += found is not None
        if found is not None:
            act = self.allowed[key].get(found)
            assert act is not None, f"key {key[0]} was dropped, or is another value"
            assert act >= self.at_least[key], f"key {key[0]} was dropped in this start"

    def act(self) -> None:
        rng, draw = self.rng, self.rng.random()
        # What is on a disk is what can come back.
        there = [key for key in KEYS if self.on_disk(key) is not None]
        key = rng.choice(rng.choice([self.favoured, self.favoured, there, KEYS]) or KEYS)
        if draw < 0.5:
            self.save(key)
        elif draw < 0.7:
            self.request(Drop(0, 0, [key]), [key])
        elif draw < 0.704:
            self.clear()
        elif draw < 0.708:
            self.reset()
        elif draw < 0.84:
            self.carry_out(Touch(CLIENT, rng.sample(KEYS, 4)))
        elif draw < 0.86:
            self.carry_out(Suspect(CLIENT, [key]))
        else:
            self.get(key)

    # --- what befalls it ------------------------------------------------------------------

    def befall(self) -> None:
        file, rng = self.rng.choice(self.files), self.rng
        draw = rng.random()
        pages = [page for page in file.pages if page >= 2 + LOG_BYTES // PAGE]
        if draw < 0.3 and pages:
            page = rng.choice(pages)
            if page not in file.pending:
                self.rotten.append((file, page, file.pages[page]))
                file.flip(page, rng.randrange(PAGE * 8))
        elif draw < 0.6 and self.rotten:
            file, page, good = self.rotten.pop()
            if page not in file.pending:
                file.pages[page] = good  # it was the way to it that was bad
        elif draw < 0.65:
            file.unreadable = set() if file.unreadable else {self.some_page()}
        elif draw < 0.7:
            file.lose_page = -1 if file.lose_page >= 0 else self.some_page()
        elif draw < 0.75 and not self.may_be_away:
            file.failing_writes = 1
        elif self.may_fail:
            file.failing_syncs = 1

    def some_page(self) -> int:
        """Return a page of a region: often its header, or its first entries."""
        start, rng = Geometry(REGION_BYTES, LOG_BYTES, REGIONS).start, self.rng
        place = rng.choice([0, 1, rng.randrange(REGION_BYTES // PAGE)])
        return start(rng.randrange(REGIONS)) + place

    def write(self, one: Any) -> None:
        """Have a writer do once what is to be done, unless it is at it."""
        working = self.working
        if one is not None and one._devices and one is not working and working is not self:
            self.working = self if working is not None else one
            try:
                with suppress(DeadlineError):
                    one._round()
            finally:
                self.working = working

    def step(self) -> None:
        draw = self.rng.random()
        self.now += self.rng.choice([0.001, 0.001, 1.0, 10.0])
        if draw < 0.35:
            self.act()
        elif draw < 0.75:
            self.write(self.rng.choice([*self.writers.values(), None]))
        elif draw < 0.88:
            if self.disks._commits.is_set():
                self.disks._commits.clear()
                self.disks._commit_each()
        elif draw < 0.96:
            self.loop.go_on()
        else:
            self.befall()

    def settle(self) -> None:
        """Write all that is to be written, and answer all that waits."""
        for _ in range(4):
            for one in self.writers.values():
                self.write(one)
            self.commit()

    def commit(self) -> None:
        for _ in range(2):
            self.loop.go_on()
            self.disks._commits.clear()
            self.disks._commit_each()
        self.loop.go_on()

    def on_disk(self, key: Key) -> DiskBlock | None:
        assert self.disks.table is not None
        return self.disks.table.find(key)

    def live(self, steps: int) -> None:
        """Start, and go on until the power fails, or the process is killed."""
        rng = self.rng
        for file in self.files:
            file.power_fails_in = rng.choice([None, rng.randrange(2000)])
            file.unreadable = {self.some_page()} if rng.random() < 0.2 else set()
        try:
            self.start()
            if rng.random() < 0.5:
                self.look_at_all()
            for _ in range(rng.randrange(1, steps)):
                self.step()
                if self.ends_soon:
                    self.is_dead = True
                    break
        except PowerLossError:
            pass
        if self.is_dead or rng.random() < 0.5:
            for file in self.files:
                file.power_loss()
        for file in self.files:
            file._closed, file.power_fails_in = False, None
            file.failing_writes = file.failing_syncs = 0
        self.is_dead = False

    def story(self) -> None:
        """Live several times, and look at what is there in the end."""
        for _ in range(LIVES):
            self.live(STEPS)
        self.check()

    def check(self) -> None:
        """Start once more, in quiet, and look at each key."""
        self.is_quiet = True
        self.start()
        self.look_at_all()

    def look_at_all(self) -> None:
        for key in KEYS:
            self.get(key)


@contextmanager
def without_threads(node: LossyNode) -> Iterator[None]:
    """Have the node's disks opened by it, and no thread begin."""
    idle = SimpleNamespace(start=lambda: None, join=lambda timeout: None, is_alive=lambda: False)
    threads = SimpleNamespace(Thread=lambda **how: idle, Event=threading.Event)
    with ExitStack() as stack:
        for module in (disks, writer):
            stack.enter_context(patch.object(module, "threading", threads))
            stack.enter_context(patch.object(module, "log", logging.getLogger("silent")))
        drawn = SimpleNamespace(urandom=node.rng.randbytes)
        stack.enter_context(patch.object(device, "os", drawn))
        stack.enter_context(patch.object(writer, "SPILL_BYTES", 1 << 17))
        stack.enter_context(patch.object(disks, "open_disk", node.open))
        stack.enter_context(patch.object(disks, "closed_disks", lambda *of: set(node.noted)))
        stack.enter_context(patch.object(disks, "note_closed", lambda *w: node.noted.add(w[-1])))
        stack.enter_context(patch.object(tier, "VALUE_BYTES_MIN", 1))
        table = lambda path, *how: DiskTable(path, *how, machine=Anonymous())  # noqa: E731
        stack.enter_context(patch.object(disks, "DiskTable", table))
        yield
