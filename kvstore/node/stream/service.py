"""Serves the requests of clients on other hosts, those of a connection one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import xxhash

from kvstore.core.answers import Grant
from kvstore.core.events import (
    ELSEWHERE,
    Abort,
    Commit,
    Corrupt,
    Drop,
    Explain,
    Introduce,
    Reply,
    Request,
    Reserve,
    Reset,
    Stat,
    Suspect,
    Touch,
)
from kvstore.core.namespaces import namespace_of
from kvstore.core.parts import joined, parts_of
from kvstore.limits import (
    CHECKED_BYTES_PER_S_MAX,
    STREAM_BATCH_BYTES_MAX,
    STREAM_IDLE_TIMEOUT_S,
    STREAM_RESERVED_SHARE,
    STREAM_SLOW_BYTES_PER_S,
)
from kvstore.node.control.local_session import LocalSession, LocalSessions
from kvstore.node.control.turns import TURN_ITEMS
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.node.stream.disk_reads import DiskReads
from kvstore.node.stream.shares import Shares
from kvstore.protocol import control_events
from kvstore.protocol.chunks import Digests, chunked
from kvstore.protocol.control_replies import encoded, encoded_outcome
from kvstore.protocol.stream import (
    GRANTED,
    Asked,
    Frame,
    SaveOffer,
    WireError,
    pack_answers,
    unpack_control,
    unpack_put,
    unpack_read,
)
from kvstore.protocol.stream_reply import Head, Sent, Tail, grouped, pack_heads, pack_tails
from kvstore.protocol.stream_seal import TAG_BYTES, matches
from kvstore.segment.attached import AttachedShm
from kvstore.segment.cuda import ServedCuda
from kvstore.segment.header import fields
from kvstore.segment.locate import Spot, locate
from kvstore.token_bucket import TokenBucket
from kvstore.transport.base import Read
from kvstore.transport.disk import SUSPECT_REASONS
from kvstore.transport.stream.channel import Channel
from kvstore.types import DiskBlock, Key, Location, PutResult, rejected

REQUEST_TIMEOUT_S = 2.0
"""Time for all bytes of a request's frame, once it has begun."""
TRANSFER_TIMEOUT_MAX_S = 60.0
RESERVED_TIMEOUT_S = 5.0
"""Time for which a save's slots are reserved at most, besides the time of its bytes."""
SNAPSHOT_BYTES = 64 << 10
"""A group up to this size is copied first and then sent in one call."""
CHECKSUMS_KEPT_MAX = 1 << 16
CONTROL_EVENTS = (Stat, Explain, Touch, Suspect, Drop, Reset)
"""Events that a client on another host may ask of the core besides reading and saving."""
_VERDICTS = {Read.HIT: Sent.GOOD, Read.MISS: Sent.MISS, Read.FAILED: Sent.FAILED}
Part = memoryview | bytes
"""A part of what is sent."""
NOT_HERE = rejected("this node's slots are written by a device, and not from other hosts")
CHECKSUM_WRONG = rejected("its bytes arrived with another checksum")


ServedSegment = AttachedShm | ServedCuda
"""The segments that can be served; only the first kind takes saves."""


class Served(NamedTuple):
    """A block without a checksum in its header, as it was when it was first served."""

    slot_id: int
    generation: int
    offset: int
    length: int
    checksum: int


class StreamService:
    """Answers clients on other hosts. Thread-safe: each connection's thread calls `answer` for
    itself.

    Headers and payload are read as any reader does, checked before and after (rule 4);
    payload is written only into slots that the core gave to the session (rules 5, 6).
    """

    def __init__(
        self,
        segment: ServedSegment,
        node: tuple[int, int],
        inside: LocalSessions,
        nixl: NixlSidecar | None = None,
        disks: DiskReads | None = None,
    ) -> None:
        """Prepare to serve. `node` is (node id, epoch); `disks` are its own, if it has some."""
        self._segment = segment
        self._node = node
        self._inside = inside
        self._served: dict[Key, Served] = {}
        self._checks = TokenBucket(CHECKED_BYTES_PER_S_MAX)
        self._lock = threading.Lock()
        """Guards `_checks`."""
        self._nixl = nixl
        self._disks = disks
        self._shares = Shares(segment.superblock.size_bytes // STREAM_RESERVED_SHARE)

    def request(self, channel: Channel) -> tuple[Frame, int]:
        """Wait for one request, at most `STREAM_IDLE_TIMEOUT_S`: (type, bytes that follow).

        Raises `PeerError` when the connection is to end.
        """
        idle_until = time.monotonic() + STREAM_IDLE_TIMEOUT_S
        return channel.receive_head(idle_until)

    def answer(self, channel: Channel, request: tuple[Frame, int], client: str) -> None:
        """Receive the rest of `request` and answer. Raises `PeerError` when the connection is to
        end.

        `client` is whose share of what can be reserved, or read from disks, it takes from: the
        address of its host.
        """
        kind, size_bytes = request
        began = time.monotonic()
        body = channel.receive_rest(kind, size_bytes, began + REQUEST_TIMEOUT_S)
        if kind is Frame.READ:
            timeout_s, asked = unpack_read(body, self._node[0])
            _check_batch([one.location.length for one in asked])
            deadline = began + min(timeout_s, TRANSFER_TIMEOUT_MAX_S)
            # A request for both has those in memory alone: a disk would have them wait.
            if self._disks is not None and all(one.location.segment for one in asked):
                self._read_disks(self._disks, channel, asked, client, deadline)
            else:
                self._read(channel, asked, deadline)
        elif kind is Frame.LOOK:
            timeout_s, asked = unpack_read(body, self._node[0])
            heads = _heads([self._found(key, location) for key, location in asked])
            channel.send([pack_heads(heads, channel.seals.sent)], began + REQUEST_TIMEOUT_S)
        elif kind is Frame.PUT:
            timeout_s, namespace_id, fields, offers = unpack_put(body)
            _check_batch([offer.size_bytes for offer in offers])
            self._introduce(namespace_id, fields)
            size_bytes = sum(offer.size_bytes for offer in offers)
            most_s = RESERVED_TIMEOUT_S + size_bytes / STREAM_SLOW_BYTES_PER_S
            deadline = began + min(timeout_s, most_s)
            with self._shares.of(client, size_bytes, deadline):
                self._put(channel, offers, namespace_id, deadline)
        elif kind is Frame.CONTROL:
            self._control(channel, unpack_control(body), began + REQUEST_TIMEOUT_S)
        elif kind is Frame.NIXL:
            way = self._nixl.way() if self._nixl is not None else []
            channel.send_frame(pack_answers(way), time.monotonic() + REQUEST_TIMEOUT_S)
        else:
            raise WireError(f"frame type {kind} from a client")

    # --- reading ------------------------------------------------------------

    def _read(self, channel: Channel, asked: Sequence[Asked], deadline: float) -> None:
        """Send the blocks asked for that are here, group by group. As little as can be is done
        between two sends: a group of payloads leaves nothing of this code in the processor's
        cache."""
        spots = [self._spot(key, location) for key, location in asked]
        there = {i: spot for i, spot in enumerate(spots) if spot is not None}
        out: list[Part] = [pack_heads(_heads(spots), channel.seals.sent)]
        for group in grouped((i, spot.header[2]) for i, spot in there.items()):
            out = self._group(channel, out, [(asked[i].key, there[i]) for i in group], deadline)
        channel.send(out, deadline)
        if there:
            self._inside.tell(Touch(ELSEWHERE, [asked[i].key for i in there]))

    def _read_disks(
        self,
        disks: DiskReads,
        channel: Channel,
        asked: Sequence[Asked],
        client: str,
        deadline: float,
    ) -> None:
        """Send the blocks asked for that are on disks, group by group. What cannot be read after
        all is called off behind its place, which is empty."""
        blocks = [disks.find(*one) for one in asked]
        there = {i: block for i, block in enumerate(blocks) if block is not None}
        seal, used, suspects = channel.seals.sent, list[Key](), list[Key]()
        out: list[Part] = [pack_heads(_heads(blocks), seal)]
        for group in grouped((i, block.length) for i, block in there.items()):
            with disks.read(client, [asked[i] for i in group], deadline) as (payloads, outcomes):
                for payload in payloads:
                    seal.update(payload)
                channel.send([*out, *payloads], deadline)
            verdicts = [_VERDICTS[outcome.read] for outcome in outcomes]
            sums = [there[i].checksum for i in group]
            out = [pack_tails(list(map(Tail, verdicts, sums)), seal)]
            for i, outcome in zip(group, outcomes, strict=True):
                used += [asked[i].key] if outcome.read is Read.HIT else []
                suspects += [asked[i].key] if outcome.reason in SUSPECT_REASONS else []
        channel.send(out, deadline)
        if used:
            self._inside.tell(Touch(ELSEWHERE, used))
        if suspects:
            self._inside.tell(Suspect(ELSEWHERE, suspects))

    def _group(
        self,
        channel: Channel,
        before: list[Part],
        group: Sequence[tuple[Key, Spot]],
        deadline: float,
    ) -> list[Part]:
        """Send `before` and the payloads, from where they are; returns what is to be sent next."""
        seal = channel.seals.sent
        lengths = [spot.header[2] for _, spot in group]
        payloads = self._segment.payloads(
            [(spot.offset, length) for (_, spot), length in zip(group, lengths, strict=True)]
        )
        known = [spot.header[6] or self._served_checksum(key, spot) for key, spot in group]
        snapshot = sum(lengths) <= SNAPSHOT_BYTES
        if snapshot:
            payloads = [memoryview(payload.tobytes()) for payload in payloads]
        digests = None if all(known) else Digests(lengths)
        for chunk in chunked([[payload] for payload in payloads]):
            if digests is not None:
                digests.update(chunk)
            for piece in chunk.pieces:
                seal.update(piece)
            before += chunk.pieces
            if not snapshot:
                channel.send(before, deadline)
                before = []
        checksums = [
            seen if digests is None else seen or digests.value(i) for i, seen in enumerate(known)
        ]
        tails = []
        for (key, spot), seen, checksum in zip(group, known, checksums, strict=True):
            # After the last byte was copied, be it by the kernel.
            same = self._segment.header(spot.slot_id) == spot.image
            tails.append(Tail(Sent.GOOD if same else Sent.MISS, checksum))
            if same and not seen:
                generation, _, length = spot.header[:3]
                served = Served(spot.slot_id, generation, spot.offset, length, checksum)
                self._remember(key, served)
        return [*before, pack_tails(tails, seal)]

    def _served_checksum(self, key: Key, spot: Spot) -> int:
        """Return the checksum of a block when it was first served; 0 when it was not served
        before."""
        served = self._served.get(key)
        same = served is not None and served[:2] == (spot.slot_id, spot.header[0])
        return served.checksum if served is not None and same else 0

    def _remember(self, key: Key, served: Served) -> None:
        if len(self._served) >= CHECKSUMS_KEPT_MAX:
            self._served.clear()
        self._served[key] = served

    def _spot(self, key: bytes, location: Location) -> Spot | None:
        return locate(self._segment, key, location) if location.epoch == self._node[1] else None

    def _found(self, key: Key, location: Location) -> Spot | DiskBlock | None:
        if location.segment and self._disks is not None:
            return self._disks.find(key, location)
        return self._spot(key, location)

    # --- saving -------------------------------------------------------------

    def _introduce(self, namespace_id: int, fields: bytes) -> None:
        if not fields:
            return
        namespace = namespace_of(fields)
        if namespace.id != namespace_id:
            raise WireError("a namespace under another one's id")
        self._inside.tell(Introduce(0, namespace))

    def _put(
        self, channel: Channel, offers: Sequence[SaveOffer], namespace_id: int, deadline: float
    ) -> None:
        """Save what is offered: reserve, receive, check, seal. What ends before leaves nothing."""
        if self._segment.payload is None:
            channel.send_frame(pack_answers([encoded_outcome(NOT_HERE)] * len(offers)), deadline)
            channel.send_frame(pack_answers([]), deadline)
            return
        session = self._inside.open()
        try:
            answers = self._ask(
                session,
                Reserve(
                    0,
                    0,
                    [offer.key for offer in offers],
                    [offer.size_bytes for offer in offers],
                    namespace_id,
                    [offer.kind for offer in offers],
                    [offer.meta_length for offer in offers],
                    [None] * len(offers),
                    [0] * len(offers),
                ),
                deadline,
            )
            granted = {i: one for i, one in enumerate(answers) if isinstance(one, Grant)}
            codes = [GRANTED if isinstance(one, Grant) else encoded_outcome(one) for one in answers]
            channel.send_frame(pack_answers(codes), deadline)
            taken = self._take(channel, session, offers, granted, deadline)
            channel.send_frame(pack_answers(list(map(encoded_outcome, taken))), deadline)
        finally:
            # Nothing of this thread writes any more: what was not sealed is free.
            session.close()

    def _take(
        self,
        channel: Channel,
        session: LocalSession,
        offers: Sequence[SaveOffer],
        granted: dict[int, Grant],
        deadline: float,
    ) -> list[PutResult]:
        """Receive what was granted and commit what is right; returns what became of each."""
        right: list[tuple[int, int, int]] = []
        wrong: list[tuple[int, int]] = []
        for i, (slot, generation, offset) in granted.items():
            offer = offers[i]
            if self._receive(channel, offset, offer, deadline):
                right.append((slot, generation, offer.checksum))
            else:
                wrong.append((slot, generation))
        if granted:
            seen = channel.seals.received.payload_tag()
            if not matches(seen, channel.receive_bytes(TAG_BYTES, deadline)):
                wrong += [(slot, generation) for slot, generation, _ in right]
                right = []
        if wrong:
            session.ask(Abort(0, 0, wrong), deadline)
        if not right:
            return [CHECKSUM_WRONG] * len(wrong)
        outcomes = iter(self._ask(session, Commit(0, 0, right), deadline))
        bad = {slot for slot, _ in wrong}
        return [
            CHECKSUM_WRONG if slot in bad else next(outcomes) for slot, _, _ in granted.values()
        ]

    def _receive(self, channel: Channel, offset: int, offer: SaveOffer, deadline: float) -> bool:
        """Receive the payload of one offer into its slot. Return whether it is what was offered."""
        assert self._segment.payload is not None
        digests = Digests([offer.size_bytes])
        for chunk in chunked([[self._segment.payload[offset : offset + offer.size_bytes]]]):
            channel.receive(list(chunk.pieces), deadline)
            digests.update(chunk)
            for piece in chunk.pieces:
                channel.seals.received.update(piece)
        return digests.value() == offer.checksum

    def _ask(self, session: LocalSession, what: Request, deadline: float) -> Any:
        """Return the core's answer, to as many parts as leave the node's other clients their
        turns."""
        replies: list[Reply] = []
        parts: Sequence[Any] = parts_of(what, TURN_ITEMS)
        for part in parts:
            if isinstance(part, Touch):
                self._inside.tell(part)
            else:
                replies.append(Reply(0, 0, session.ask(part, deadline), False))
        whole = joined(what, replies)
        assert whole is not None
        return whole.body

    # --- the rest -----------------------------------------------------------

    def _control(self, channel: Channel, message: list[object], deadline: float) -> None:
        event = control_events.decode(ELSEWHERE, message)
        if not isinstance(event, CONTROL_EVENTS):
            raise WireError(f"op {message[0]} is not for clients on other hosts")
        if isinstance(event, Touch | Suspect):
            for part in parts_of(event, TURN_ITEMS):
                self._inside.tell(part)
            if isinstance(event, Suspect):
                self._look_at(event.keys)
            return
        with closing(self._inside.open()) as session:
            body = self._ask(session, event, deadline)
        channel.send_frame(pack_answers([encoded(body)]), deadline)

    def _look_at(self, keys: Sequence[Key]) -> None:
        """Check reported blocks that have no checksum in their header (the core judges the others)
        against what they were when they were first served."""
        for key in keys:
            served = self._served.get(key)
            if served is None:
                continue
            slot_id, generation, offset, length, checksum = served
            header = fields(self._segment.header(slot_id))
            if header is None or header[:2] != (generation, key):
                continue
            with self._lock:
                allowed = self._checks.allows(length, time.monotonic())
            if allowed:
                (payload,) = self._segment.payloads([(offset, length)])
                if xxhash.xxh3_64_intdigest(payload) != checksum:
                    # If the slot was reused meanwhile, its generation says so to the core.
                    self._inside.tell(Corrupt(slot_id, generation))


def _heads(found: Sequence[Spot | DiskBlock | None]) -> list[Head]:
    return [Head(Sent.MISS) if one is None else Head(Sent.GOOD, *_described(one)) for one in found]


def _described(found: Spot | DiskBlock) -> tuple[int, int]:
    if isinstance(found, Spot):
        return found.header[4:6]
    return found.kind, found.meta_length


def _check_batch(sizes: Sequence[int]) -> None:
    if len(sizes) > 1 and sum(sizes) > STREAM_BATCH_BYTES_MAX:
        raise WireError(f"{sum(sizes)} bytes in a batch, at most {STREAM_BATCH_BYTES_MAX}")
