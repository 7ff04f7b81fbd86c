"""Holds ports for servers that are started later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Hold ports of this machine, so that nobody else is given them meanwhile.

    A server may bind its own a minute after it was named; without this, any outgoing
    connection may have it by then. Who sets SO_REUSEADDR, as vLLM and aiohttp do, may
    listen there: these sockets do not.
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
            # After the choice, so that nobody else's held port is chosen.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [int(one.getsockname()[1]) for one in held]
