"""Ends an embedded node with its last client, or when none comes.

A client whose connection is lost but whose process lives is still a client
(rule 5): it may write. `Sessions` knows them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.node.control.liveness import Sessions

FIRST_CLIENT_TIMEOUT_S = 20.0
"""Whoever started the node may have died before it could connect."""
EMPTY_S = 1.0
"""A script that is run again at once finds what it stored the last time."""
POLL_S = 0.1

log = logging.getLogger("kvstore.node")


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
            admitted = sessions.admitted
            empty_since = loop.time()
        patience_s = EMPTY_S if admitted else FIRST_CLIENT_TIMEOUT_S
        if loop.time() - empty_since >= patience_s:
            log.info("no client for %.0f s: the node ends", patience_s)
            end()
            return
