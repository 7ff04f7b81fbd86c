"""Ends an embedded node with its last client, or when none comes.

A client whose connection is lost but whose process lives is still a client
(rule 5): it may write. `Sessions` knows them all.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Callable

from kvstore.node.control.liveness import Sessions

FIRST_CLIENT_TIMEOUT_S = 20.0
"""Time for the first client: whoever started the node may have died before it could connect."""
EMPTY_S = 1.0
"""Time without clients after which the node stops: a script that is run again at once finds what it
stored."""
POLL_S = 0.1
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("kvstore.node")


def end_with(parent: int) -> None:
    """Get SIGTERM when the process that started us ends, however it ends."""
    _when_parent_ends(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


def _when_parent_ends(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


async def wait_for_last_client(sessions: Sessions, end: Callable[[], None]) -> None:
    """Call `end`, and return, once the last client has been gone for `EMPTY_S`, or none has come
    for `FIRST_CLIENT_TIMEOUT_S`."""
    loop = asyncio.get_running_loop()
    empty_since = loop.time()
    admitted = 0
    while True:
        await asyncio.sleep(POLL_S)
        # Counted, not only seen: a client may come and go between two looks.
        if len(sessions) or sessions.admitted != admitted:
            if not admitted:  # from here on it is they who count
                _when_parent_ends(0)
            admitted = sessions.admitted
            empty_since = loop.time()
        patience_s = EMPTY_S if admitted else FIRST_CLIENT_TIMEOUT_S
        if loop.time() - empty_since >= patience_s:
            log.info("no client for %.0f s: the node ends", patience_s)
            end()
            return
