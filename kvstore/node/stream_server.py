"""The node's side of streams: serves blocks to other hosts and takes theirs.

A thread per connection, so that the event loop never waits for a network. Threads
read headers and payload as any reader does, checked before and after (rule 4), and
write payload only into slots that the core gave to their session (rules 5, 6).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from kvstore.core import wire
from kvstore.core.events import Abort, Commit, Explain, Introduce, Reserve, Stat, Touch
from kvstore.core.namespaces import namespace_of
from kvstore.core.stream_wire import (
    CLIENT_HELLO_BYTES,
    FRAME_HEAD_BYTES,
    GRANTED,
    NONCE_BYTES,
    PROOF_BYTES,
    Asked,
    Frame,
    Joint,
    NodeHandshake,
    Offer,
    Sent,
    WireError,
    frame_head,
    pack_answers,
    pack_joint,
    unpack_answers,
    unpack_put,
    unpack_read,
)
from kvstore.errors import PeerError, UsageError
from kvstore.limits import STREAM_BATCH_BYTES_MAX, STREAM_CONNECTIONS_MAX
from kvstore.node.config import NodeConfig
from kvstore.node.inside import Inside, InsideSession
from kvstore.nodedir import Announcement
from kvstore.segment.locate import Spot, locate
from kvstore.segment.shm import AttachedShm
from kvstore.transport.address import WILDCARDS, Address, own_address
from kvstore.transport.channel import Channel
from kvstore.transport.chunks import Digest, chunked
from kvstore.types import Location

log = logging.getLogger("kvstore.node")

HANDSHAKE_TIMEOUT_S = 2.0
IDLE_TIMEOUT_S = 600.0
"""A connection without a request for so long is closed; clients connect again."""
REQUEST_TIMEOUT_MAX_S = 60.0
STOP_TIMEOUT_S = 2.0
ACCEPT_POLL_S = 0.2
SAY_EVERY_S = 10.0
SNAPSHOT_BYTES = 64 << 10
"""Blocks up to this size are copied before they are sent, and then many travel at once."""
FLUSH_BYTES = 256 << 10
CONTROL_EVENTS = (Stat, Explain, Touch)
"""What a client on another host may ask of the core besides reading and saving."""


class StreamServer:
    """Serves one start of one node until `stop`."""

    def __init__(self, config: NodeConfig, word: Announcement, inside: Inside) -> None:
        """Listens from here on. Raises `UsageError` when it cannot."""
        assert config.listen is not None
        host, port = config.listen
        self._node = (word.node_id, word.epoch)
        self._name = word.name
        self._secret = config.security.secret
        self._tls = config.security.server_context()
        self._inside = inside
        self._shm = AttachedShm(Path(word.data_path), Path(word.head_path), writable=True)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as e:
            self._shm.close()
            raise UsageError("listen", f"{host}:{port}", f"cannot be used: {e}") from e
        self._listener.settimeout(ACCEPT_POLL_S)
        shown = config.advertise or (own_address() if host in WILDCARDS else host)
        scheme = "tcp" if self._tls is None else "tls"
        self.address = Address(scheme, shown, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._said_at = float("-inf")

    def start(self) -> None:
        threading.Thread(target=self._accept, name="kvstore-accept", daemon=True).start()
        log.info("node %s serves streams at %s", self._name, self.address)

    def stop(self) -> None:
        """End every connection; waits at most `STOP_TIMEOUT_S`. Safe to call twice.

        Called by the event loop, for which a thread may be waiting: that thread ends by
        itself, and what it holds goes with the node.
        """
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            connections, threads = list(self._connections), list(self._threads)
        # A plain close would leave it open for as long as the other thread waits in it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for thread in threads:
            thread.join(max(give_up_at - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            self._shm.close()

    # --- connections --------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as e:
                if not self._stopping:
                    log.warning("node %s: cannot accept: %s", self._name, e)
                    time.sleep(ACCEPT_POLL_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, peer[0]), name="kvstore-stream", daemon=True
            )
            with self._lock:
                if self._stopping or len(self._connections) >= STREAM_CONNECTIONS_MAX:
                    connection.close()
                    continue
                self._connections.add(connection)
                self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        channel = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
            channel = Channel(self._encrypted(connection))
            self._shake_hands(channel, deadline)
            while not self._stopping:
                self._answer(channel)
        except (PeerError, UsageError) as e:
            # A client that went away is nobody's fault; one that may not come in is worth a word.
            if isinstance(e, WireError):
                self._say("node %s hangs up on %s: %s", self._name, peer, e)
        except (OSError, ValueError) as e:  # of the TLS handshake; or the segment is closed
            self._say("node %s: connection from %s: %s", self._name, peer, e)
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())
            if channel is not None:
                channel.close()
            connection.close()

    def _say(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning(text, *args)

    def _encrypted(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            encrypted: ssl.SSLSocket = self._tls.wrap_socket(connection, server_side=True)
        except ssl.SSLError as e:
            raise WireError(f"no TLS: {e}") from e
        with self._lock:
            # The plain socket is an empty shell from here on.
            self._connections.discard(connection)
            self._connections.add(encrypted)
        return encrypted

    def _shake_hands(self, channel: Channel, deadline: float) -> None:
        shake = NodeHandshake(self._secret, secrets.token_bytes(NONCE_BYTES), self._node)
        channel.send([shake.answer(channel.receive_bytes(CLIENT_HELLO_BYTES, deadline))], deadline)
        welcome, verdict = shake.judge(channel.receive_bytes(PROOF_BYTES, deadline))
        channel.send([verdict], deadline)
        if not welcome:
            raise WireError("it does not know the secret")

    def _answer(self, channel: Channel) -> None:
        """One request, from its first byte to the last one of its answer."""
        idle_until = time.monotonic() + IDLE_TIMEOUT_S
        kind, size_bytes = frame_head(channel.receive_bytes(FRAME_HEAD_BYTES, idle_until))
        began = time.monotonic()
        body = channel.receive_bytes(size_bytes, began + HANDSHAKE_TIMEOUT_S)
        if kind is Frame.READ:
            timeout_s, asked = unpack_read(body, self._node[0])
            _check_batch([one.location.length for one in asked])
            self._read(channel, asked, began + min(timeout_s, REQUEST_TIMEOUT_MAX_S))
        elif kind is Frame.PUT:
            timeout_s, namespace_id, fields, offers = unpack_put(body)
            _check_batch([offer.size_bytes for offer in offers])
            self._introduce(namespace_id, fields)
            self._put(channel, offers, namespace_id, began + min(timeout_s, REQUEST_TIMEOUT_MAX_S))
        elif kind is Frame.CONTROL:
            self._control(channel, unpack_answers(body), began + HANDSHAKE_TIMEOUT_S)
        else:
            raise WireError(f"frame type {kind} from a client")

    # --- reading ------------------------------------------------------------

    def _read(self, channel: Channel, asked: Sequence[Asked], deadline: float) -> None:
        out: list[memoryview | bytes] = []
        waiting_bytes = 0
        verdict, checksum = Sent.NOTHING, 0
        used: list[bytes] = []
        for key, location in asked:
            spot = self._spot(key, location)
            if spot is None:
                out.append(pack_joint(Joint(verdict, checksum, Sent.MISS, 0, 0, 0)))
                verdict, checksum = Sent.NOTHING, 0
                continue
            used.append(key)
            _, _, length, _, kind, meta_length, stored, _ = spot.header
            out.append(pack_joint(Joint(verdict, checksum, Sent.GOOD, kind, meta_length, length)))
            payload = self._shm.payload[spot.offset : spot.offset + length]
            if length <= SNAPSHOT_BYTES:
                copied = payload.tobytes()
                out.append(copied)
                waiting_bytes += length
                checksum = stored or xxhash.xxh3_64_intdigest(copied)
            else:
                checksum = self._send_large(channel, out, payload, stored, deadline)
                out, waiting_bytes = [], 0
            # After the last byte was copied, be it by the kernel.
            same = self._shm.header(spot.slot_id) == spot.image
            verdict = Sent.GOOD if same else Sent.MISS
            if waiting_bytes >= FLUSH_BYTES:
                channel.send(out, deadline)
                out, waiting_bytes = [], 0
        out.append(pack_joint(Joint(verdict, checksum, Sent.NOTHING, 0, 0, 0)))
        channel.send(out, deadline)
        if used:
            self._inside.tell(Touch(0, used))

    def _spot(self, key: bytes, location: Location) -> Spot | None:
        return locate(self._shm, key, location) if location.epoch == self._node[1] else None

    @staticmethod
    def _send_large(
        channel: Channel,
        before: list[memoryview | bytes],
        payload: memoryview,
        stored: int,
        deadline: float,
    ) -> int:
        """Send what waits and then `payload`, in place; its checksum."""
        hasher = Digest()
        for chunk in chunked([payload]):
            if not stored:
                hasher.update(chunk)
            channel.send([*before, *chunk], deadline)
            before = []
        return stored or hasher.value()

    # --- saving -------------------------------------------------------------

    def _introduce(self, namespace_id: int, fields: bytes) -> None:
        if not fields:
            return
        namespace = namespace_of(fields)
        if namespace.id != namespace_id:
            raise WireError("a namespace under another one's id")
        self._inside.tell(Introduce(0, namespace))

    def _put(
        self, channel: Channel, offers: Sequence[Offer], namespace_id: int, deadline: float
    ) -> None:
        """Reserve, take the payload, check it, seal; what ends before that leaves nothing."""
        session = self._inside.open()
        try:
            answers = session.ask(
                lambda number, request: Reserve(
                    number,
                    request,
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
            granted = {i: answer for i, answer in enumerate(answers) if isinstance(answer, tuple)}
            codes = [GRANTED if i in granted else answer for i, answer in enumerate(answers)]
            channel.send([pack_answers(codes)], deadline)
            channel.send(
                [pack_answers(self._take(channel, session, offers, granted, deadline))], deadline
            )
        finally:
            # Nothing of this thread writes any more: what was not sealed is free.
            session.close()

    def _take(
        self,
        channel: Channel,
        session: InsideSession,
        offers: Sequence[Offer],
        granted: dict[int, tuple[int, int, int]],
        deadline: float,
    ) -> list[int | str]:
        """Receive what was granted and commit what is right; what became of each."""
        right: list[tuple[int, int, int]] = []
        wrong: list[tuple[int, int]] = []
        for i, (slot, generation, offset) in granted.items():
            offer = offers[i]
            if self._receive(channel, offset, offer, deadline):
                right.append((slot, generation, offer.checksum))
            else:
                wrong.append((slot, generation))
        if wrong:
            session.ask(lambda number, request: Abort(number, request, wrong), deadline)
        if not right:
            return [CHECKSUM_WRONG] * len(wrong)
        outcomes = iter(
            session.ask(lambda number, request: Commit(number, request, right), deadline)
        )
        bad = {slot for slot, _ in wrong}
        return [
            CHECKSUM_WRONG if slot in bad else next(outcomes) for slot, _, _ in granted.values()
        ]

    def _receive(self, channel: Channel, offset: int, offer: Offer, deadline: float) -> bool:
        """The payload of one offer into its slot; whether it is what was offered."""
        hasher = Digest()
        for chunk in chunked([self._shm.payload[offset : offset + offer.size_bytes]]):
            channel.receive(list(chunk), deadline)
            hasher.update(chunk)
        return hasher.value() == offer.checksum

    # --- the rest -----------------------------------------------------------

    def _control(self, channel: Channel, message: list[object], deadline: float) -> None:
        event = wire.decode(0, message)
        if not isinstance(event, CONTROL_EVENTS):
            raise WireError(f"op {message[0]} is not for clients on other hosts")
        if isinstance(event, Touch):
            self._inside.tell(event)
            return
        session = self._inside.open()
        try:
            body = session.ask(
                lambda number, request: event._replace(session=number, request=request), deadline
            )
        finally:
            session.close()
        channel.send([pack_answers([body])], deadline)


CHECKSUM_WRONG = "its bytes arrived with another checksum"


def _check_batch(sizes: Sequence[int]) -> None:
    if len(sizes) > 1 and sum(sizes) > STREAM_BATCH_BYTES_MAX:
        raise WireError(f"{sum(sizes)} bytes in a batch, at most {STREAM_BATCH_BYTES_MAX}")
