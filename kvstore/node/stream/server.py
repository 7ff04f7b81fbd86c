"""Accepts streams from other hosts and gives each a thread.

So the node's event loop never waits for a network. What clients may do is in service.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import ssl
import threading
import time
from math import inf

from kvstore.errors import NodeUnavailableError, PeerError, UsageError
from kvstore.limits import (
    STREAM_HANDSHAKE_TIMEOUT_S,
)
from kvstore.machine import REAL
from kvstore.node.config import NodeConfig
from kvstore.node.control.local_session import LocalSessions
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.node.seldom import Seldom
from kvstore.node.stream.disk_reads import DiskReads
from kvstore.node.stream.service import ServedSegment, StreamService
from kvstore.node.stream.unproven import Guest, Unproven
from kvstore.nodedir import Announcement
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_handshake import (
    CLIENT_HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    NodeHandshake,
)
from kvstore.system.descriptors import share
from kvstore.system.on_failure import on_failure
from kvstore.system.tcp import listen
from kvstore.transport.nixl.child import INSTALL
from kvstore.transport.nixl.process import installed
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.nixl.transport import agent_prefix
from kvstore.transport.stream.address import WILDCARDS, Address, own_address, parse_advertise
from kvstore.transport.stream.channel import Channel, hang_up
from kvstore.transport.stream.security import ending
from kvstore.transport.stream.transport import NAME as STREAM

log = logging.getLogger("kvstore.node")

V4_IN_V6 = "::ffff:"
"""The form in which a socket for both names a peer that came by IPv4."""
STOP_TIMEOUT_S = 2.0
END_WARNED_EVERY_S = 6 * 3600.0
"""Pause between two warnings of a certificate that ends soon."""
ACCEPT_POLL_S = 0.2
IDLE_MIN_S = 1.0
"""Time without a request after which a connection may be closed for another client; its own client
connects again."""


class StreamServer:
    """Serves one start of one node until `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        announcement: Announcement,
        inside: LocalSessions,
        segment: ServedSegment,
        nixl: NixlSidecar | None,
        disks: DiskReads | None = None,
    ) -> None:
        """Listen from here on; `segment`, `nixl` and `disks` are this object's to end.

        Raises `UsageError` when the address cannot be used.
        """
        with on_failure(segment.close):
            if nixl is not None and not installed():
                raise UsageError("nixl", config.nixl, f"is not installed: {INSTALL}")
            self._open(config, announcement)
        self._segment = segment
        self.nixl = nixl
        self._disks = disks
        if self.nixl is not None:
            self.transports[NIXL] = agent_prefix(*self._node)
        self._service = StreamService(segment, self._node, inside, nixl, disks)
        self._lock = threading.Lock()
        self._unproven = Unproven()
        self._guests: set[Guest] = set()
        """Connections that have proved that they may come in."""
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._say = Seldom(log)
        self._look_at_end_at = 0.0

    def _open(self, config: NodeConfig, announcement: Announcement) -> None:
        """Listen where `config` says. Raises `UsageError`."""
        assert config.listen is not None
        host, port = config.listen
        self._node = (announcement.node_id, announcement.epoch)
        self._name = announcement.name
        self._security = config.security
        self._guests_max = config.limits.stream_connections_max
        tls = self._security.server_context()
        try:
            self._listener = listen(host, port)
        except (OSError, OverflowError, TypeError, ValueError) as e:  # in use, or can be none
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            why = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e)
            raise UsageError("listen", where, f"cannot be used: {why}") from e
        self._listener.settimeout(ACCEPT_POLL_S)
        v6 = self._listener.family == socket.AF_INET6
        shown, at = own_address(v6=v6) if host in WILDCARDS else host, None
        if config.advertise:
            shown, at = parse_advertise(config.advertise)
        scheme = "tcp" if tls is None else "tls"
        self.address = Address(scheme, shown, at or self._listener.getsockname()[1])
        self.transports = {STREAM: str(self.address)}
        """The transports that the node announces."""

    def start(self) -> None:
        REAL.start_thread(self._accept, "kvstore-accept")
        if self.nixl is not None:
            self.nixl.start()
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
            guests, threads = [*self._guests, *self._unproven], list(self._threads)
        # A plain close would leave it open for as long as the other thread waits in it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self.nixl is not None:
            self.nixl.stop()
        if self._disks is not None:
            self._disks.close()
        for guest in guests:
            hang_up(guest.socket)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for thread in threads:
            thread.join(max(give_up_at - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in threads):
            self._segment.close()

    # --- connections --------------------------------------------------------

    def _accept(self) -> None:
        """Take connections; each gets a thread with its first byte, and not before."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        listener, waiting = self._listener.fileno(), dict[int, Guest]()
        look_again_at = 0.0
        while not self._stopping:
            if time.monotonic() >= look_again_at:
                look_again_at = time.monotonic() + ACCEPT_POLL_S
                self._listen(poll)
                self._look_at_files()
            for fd, _ in poll.poll(ACCEPT_POLL_S * 1e3):
                if fd == listener:
                    guest = self._greet(poll, waiting)
                    if guest is not None:
                        waiting[guest.fd] = guest
                        poll.register(guest.fd, select.POLLIN)
                elif (spoke := waiting.pop(fd, None)) is not None:
                    poll.unregister(fd)
                    self._let_in(spoke)
            too_late = time.monotonic() - STREAM_HANDSHAKE_TIMEOUT_S
            for guest in [one for one in waiting.values() if one.came_at < too_late]:
                self._send_off(guest, poll, waiting)
        for guest in waiting.values():
            guest.socket.close()

    def _look_at_files(self) -> None:
        """Notice files that have changed, or are to, whether somebody connects or not."""
        self._security.secrets()
        self._security.server_context()
        if self._security.tls_cert is not None and time.monotonic() >= self._look_at_end_at:
            self._look_at_end_at = time.monotonic() + END_WARNED_EVERY_S
            if soon := ending(self._security.tls_cert):
                log.warning("node %s: %s: renew it", self._name, soon)

    def _listen(self, poll: select.poll) -> None:
        """Look for connections, from now on or again."""
        with contextlib.suppress(OSError, ValueError):  # it is being stopped
            poll.register(self._listener, select.POLLIN)

    def _greet(self, poll: select.poll, waiting: dict[int, Guest]) -> Guest | None:
        """Accept a connection, if there is one after all; another may have to go for it."""
        try:
            connection, peer = self._listener.accept()
        except TimeoutError:
            return None
        except OSError as e:
            if not self._stopping:
                text = "node %s cannot take connections of other hosts: %s; see `ulimit -n`"
                self._say.warning(text, self._name, e.strerror)
                poll.unregister(self._listener)  # it is tried again, and the others go on
            return None
        guest = Guest(connection, peer[0].removeprefix(V4_IN_V6))
        with self._lock:
            goes = self._unproven.let_in(guest)
        if goes is not None:
            self._send_off(goes, poll, waiting)
        return guest

    def _send_off(self, guest: Guest, poll: select.poll, waiting: dict[int, Guest]) -> None:
        """Hang up on a connection; one that has a thread is closed by its thread."""
        with self._lock:
            self._unproven.leave(guest)
        if waiting.get(guest.fd) is guest:
            del waiting[guest.fd]
            poll.unregister(guest.fd)
            guest.socket.close()
        else:
            hang_up(guest.socket)

    def _let_in(self, guest: Guest) -> None:
        thread = threading.Thread(
            target=self._serve, args=(guest,), name="kvstore-stream", daemon=True
        )
        with self._lock:
            try:
                if not self._stopping:
                    thread.start()
                    self._threads.add(thread)
                    return
            except RuntimeError as e:  # this host has no more threads to give
                self._say.warning("node %s: connection from %s: %s", self._name, guest.address, e)
            self._unproven.leave(guest)
        guest.socket.close()

    def _admit(self, guest: Guest) -> bool:
        """Return whether there is room for one that has proved that it may come in."""
        with self._lock:
            self._unproven.leave(guest)
            if self._stopping or not self._make_room():
                return False
            guest.idle_since = time.monotonic()
            self._guests.add(guest)
            return True

    def _make_room(self) -> bool:
        """Return whether there is room for one more. The caller holds the lock."""
        if len(self._guests) < share(self._guests_max, 4):
            return True
        idle = [(at, id(guest), guest) for guest in self._guests if (at := guest.idle_since)]
        since, _, longest = min(idle, default=(inf, 0, None))
        if longest is None or time.monotonic() < since + IDLE_MIN_S:
            return False
        self._guests.discard(longest)
        hang_up(longest.socket)
        return True

    def _closed_by(self, guest: Guest) -> None:
        with self._lock:
            self._unproven.leave(guest)
            self._guests.discard(guest)
            self._threads.discard(threading.current_thread())
        guest.socket.close()

    def _serve(self, guest: Guest) -> None:
        try:
            guest.socket.setblocking(True)
            guest.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deadline = time.monotonic() + STREAM_HANDSHAKE_TIMEOUT_S
            self._encrypt(guest)
            channel = Channel(guest.socket)
            self._shake_hands(channel, guest, deadline)
            while not self._stopping:
                guest.idle_since = time.monotonic()
                request = self._service.request(channel)
                guest.idle_since = None
                self._service.answer(channel, request, guest.address)
        except (PeerError, UsageError) as e:
            # A client that went away is nobody's fault; one that may not come in is worth a word.
            if isinstance(e, WireError):
                self._say.warning(
                    "node %s closes the connection of %s: %s", self._name, guest.address, e
                )
        except (OSError, ValueError) as e:  # of the TLS handshake; or the segment is closed
            self._say.warning("node %s: connection from %s: %s", self._name, guest.address, e)
        finally:
            self._closed_by(guest)

    def _encrypt(self, guest: Guest) -> None:
        tls = self._security.server_context()
        if tls is None:
            return
        guest.socket.settimeout(STREAM_HANDSHAKE_TIMEOUT_S)
        try:
            encrypted = tls.wrap_socket(
                guest.socket, server_side=True, do_handshake_on_connect=False
            )
            guest.socket = encrypted  # the plain one is an empty shell from here on
            encrypted.do_handshake()
        except ssl.SSLError as e:
            raise WireError(f"no TLS: {e}") from e

    def _shake_hands(self, channel: Channel, guest: Guest, deadline: float) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        secrets_now = self._security.secrets() or (None,)
        shake = NodeHandshake(
            secrets_now[0], nonce, self._node, secrets_now[1:], protected=channel.encrypted
        )
        hello = channel.receive_bytes(CLIENT_HELLO_BYTES, deadline)
        try:
            answer = shake.answer(hello)
        except WireError:
            channel.send([shake.hello()], deadline)  # it may see that it is of another version
            raise
        channel.send([answer], deadline)
        welcome, verdict = shake.judge(channel.receive_bytes(PROOF_BYTES, deadline))
        if welcome and not self._admit(guest):
            raise NodeUnavailableError("this node has no room for one more connection")
        channel.send([verdict], deadline)
        if not welcome:
            raise WireError("it does not know the secret")
        channel.seals = shake.seals()
