"""Runs the process that offers a node's memory through NIXL.

That process maps the segment and does nothing but let UCX work, so that whatever a reader's
death or a forged address does to UCX is done to it alone: the node goes on, its clients use
streams, and another such process is started after a while.
"""

from __future__ import annotations

import logging
import threading
import time

from kvstore.cuda.base import Shared
from kvstore.errors import PeerError
from kvstore.limits import NIXL_OWNER_RETRY_AFTER_MAX_S
from kvstore.nodedir import Announcement
from kvstore.transport.nixl.child import WAY
from kvstore.transport.nixl.process import START_TIMEOUT_S, NixlProcess, wait_for
from kvstore.transport.nixl.transport import agent_prefix

log = logging.getLogger("kvstore.node")

RETRY_AFTER_S = 1.0
STEADY_S = 60.0
"""A process that lived this long is restarted at once, without a longer pause than before."""
ANSWER_TIMEOUT_S = 1.0
"""The process has nothing else to do: if it does not answer by then it hangs, and is killed."""
STOP_TIMEOUT_S = 2.0


class NixlSidecar:
    """Keeps one such process alive, until `stop`. Thread-safe."""

    def __init__(
        self,
        announcement: Announcement,
        access: str,
        vram: Shared | None = None,
        ordinal: int = 0,
    ) -> None:
        """Prepare the sidecar. `access` is "read-only" or "writable", for its mapping of the
        payload. With `vram` the payload is memory of the device `ordinal`, whose descriptor stays
        open until `stop`."""
        self._word = announcement
        self._access = access
        self._vram = vram
        self._ordinal = ordinal
        self._stopping = threading.Event()
        self._started: NixlProcess | None = None
        self._process: NixlProcess | None = None
        """The same process once it is ready."""
        self._thread = threading.Thread(target=self._run, name="kvstore-nixl", daemon=True)
        self.starts = 0

    def start(self) -> None:
        """Start the process in the background; until it is ready there is no endpoint."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def way(self) -> list[object]:
        """Return the endpoint, as `unpack_endpoint` of protocol/nixl.py takes it; empty while there
        is none. A process that does not answer within `ANSWER_TIMEOUT_S` is killed."""
        process = self._process
        if process is None:
            return []
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            asked = process.ask(WAY, deadline=deadline)
            way = wait_for(asked, deadline, "it does not answer")
        except PeerError as e:
            log.warning("node %s: its NIXL process %d: %s", self._word.name, process.pid, e)
            process.kill()
            return []
        return way if isinstance(way, list) else []

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            began = time.monotonic()
            try:
                self._live()
                reason = "it ended"
            except (PeerError, OSError) as e:
                reason = str(e)
            if self._stopping.is_set():
                return
            steady = time.monotonic() - began >= STEADY_S
            wait_s = RETRY_AFTER_S if steady or not wait_s else wait_s * 2
            wait_s = min(wait_s, NIXL_OWNER_RETRY_AFTER_MAX_S)
            log.warning(
                "node %s cannot be read through NIXL for %.0f s: %s",
                self._word.name,
                wait_s,
                reason,
            )

    def _live(self) -> None:
        """Start one and wait for its end. Raises `PeerError` when it does not start."""
        announcement = self._word
        self.starts += 1
        name = f"{agent_prefix(announcement.node_id, announcement.epoch)}{self.starts}"
        process = self._new_process(name)
        self._started = process
        try:
            if self._stopping.is_set():  # `stop` has looked for it already
                return
            process.ready(time.monotonic() + START_TIMEOUT_S)
            self._process = process
            log.info("node %s can be read through NIXL, agent %s", announcement.name, name)
            while not self._stopping.is_set() and not process.join(STOP_TIMEOUT_S / 4):
                pass
        finally:
            self._process = None
            process.kill()

    def _new_process(self, name: str) -> NixlProcess:
        word, vram = self._word, self._vram
        arguments = [name, word.head_path, self._access]
        if vram is None:
            return NixlProcess("owner", [*arguments, word.data_path])
        memory = [str(vram.fd), str(vram.size_bytes), str(self._ordinal), vram.name.hex()]
        return NixlProcess(
            "vram-owner", [*arguments, str(word.size_bytes), *memory], pass_fds=(vram.fd,)
        )

    def stop(self) -> None:
        """Kill the process and start no other. Waits at most `STOP_TIMEOUT_S`."""
        self._stopping.set()
        if self._started is not None:
            self._started.kill()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
