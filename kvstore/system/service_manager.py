"""Tells the service manager that started this process that its start is over.

The protocol is systemd's (sd_notify(3)): a datagram to the socket that `NOTIFY_SOCKET` names. It is
about the service's own process, so whoever starts another one keeps the variable from it (`OURS`):
a node that an engine starts must not say that the engine is ready.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

OURS = "NOTIFY_SOCKET"


def say_ready() -> None:
    """Report that the start is over, if a service manager wants to know."""
    name = os.environ.get(OURS, "")
    if not name.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
        messenger.setblocking(False)
        try:
            messenger.sendto(b"READY=1", "\0" + name[1:] if name[0] == "@" else name)
        except OSError as e:
            log.warning("%s=%s cannot be told that the start is over: %s", OURS, name, e)
