"""Tells the service manager that started this process how it is (systemd's sd_notify protocol).

A datagram to the socket that `NOTIFY_SOCKET` names: https://www.freedesktop.org/software/systemd/
man/latest/sd_notify.html.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"


def say_ready() -> None:
    """Say that the start is over. Without a service manager that wants to know, nothing is said."""
    name = os.environ.get(VARIABLE, "")
    if not name.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
        messenger.setblocking(False)
        try:
            messenger.sendto(b"READY=1", name.replace("@", "\0", 1) if name[0] == "@" else name)
        except OSError as e:
            log.warning("%s=%s cannot be told that the start is over: %s", VARIABLE, name, e)
