"""Says why a node cannot be read by the transports of this client."""

from __future__ import annotations

import os
import socket

from kvstore.client.explanation import MissReason, Unreadable, of_other_user
from kvstore.nodedir import Announcement
from kvstore.segment.abandoned import user_of
from kvstore.transport.registry import CUDA_IPC, SHM, VARIABLE, Transports
from kvstore.transport.stream.transport import NAME as STREAM


def why_not_by(transports: Transports, word: Announcement) -> Unreadable | None:
    """Return why that node cannot be read by any of `transports`, as far as is known; None where
    nothing speaks against it."""
    stream, allowed = transports.stream, transports.allowed
    refusal = stream.refusals.why(word)
    here = word.host == socket.gethostname()
    user = user_of(word.data_path) if here else None
    another = None if user == os.geteuid() else user
    if refusal is not None:
        if another is not None and refusal[0] == "secret" and not stream.has_secret:
            return of_other_user(another, f"{refusal[1]}; give both the same")
        return Unreadable(MissReason(f"unreadable-{refusal[0]}"), refusal[1])
    if transports.of(word):
        return None
    if STREAM in word.transports and STREAM in allowed:
        by = "by TLS alone" if word.transports[STREAM].startswith("tls:") else "without TLS"
        detail = f"it serves {by}, this client the other way (KVSTORE_TLS_CA)"
        return Unreadable(MissReason.UNREADABLE_TLS, detail)
    ways = list(word.transports)
    if another is not None:
        lets = f"let this client use the transport {STREAM} ({VARIABLE})"
        return of_other_user(another, lets if STREAM in ways else "start it with --listen")
    if here and CUDA_IPC not in ways:
        ways.append(SHM)
    if excluded := [way for way in ways if way not in allowed]:
        detail = f"it offers {', '.join(excluded)}, this client may use {', '.join(allowed)}"
        return Unreadable(MissReason.UNREADABLE_TRANSPORTS, f"{detail} ({VARIABLE})")
    offers = f"only {', '.join(ways)}" if ways else "nothing"
    detail = f"it offers {offers} to clients like this one: start it with --listen"
    return Unreadable(MissReason.OUT_OF_REACH, detail)
