"""Checks whether this process, with its secret, certificates and transports, can read each node."""

from __future__ import annotations

import os

from kvstore.cli.checks.base import Context, Finding, Level
from kvstore.cli.store import LIMITS, embedded_url, reach
from kvstore.client.explanation import MissReason
from kvstore.client.nodes.readability import Reach
from kvstore.index.open import URL_VARIABLE
from kvstore.rundir import run_dir
from kvstore.transport.registry import VARIABLE

REMEDIES = {
    MissReason.OTHER_USER: "the node is well: run both as one user, or do what is said",
    MissReason.UNREADABLE_SECRET: "give this process and the node the same KVSTORE_SECRET",
    MissReason.UNREADABLE_TLS: "make KVSTORE_TLS_CA, and the names in the certificate, fit",
    MissReason.UNREADABLE_TRANSPORTS: f"allow one that the node offers ({VARIABLE})",
    MissReason.UNREADABLE_REFUSED: "see the node's log: it may have all connections that it takes",
    MissReason.UNREADABLE_UNMAPPED: "the node is well: give both the same /dev/shm (`--ipc host`), "
    "and this process the right to open it and room for its size (`ulimit -v`)",
    MissReason.UNREADABLE_DISK: "mount its directory under the same path, readable, for this "
    "process, or start the node with --listen: its stream then reads it for others",
    MissReason.OUT_OF_REACH: "see whether it lives, and can be reached at its address from here",
}


def look(context: Context) -> list[Finding]:
    here = run_dir(context.run_dir)
    url = context.url or os.environ.get(URL_VARIABLE) or embedded_url(here)
    if not url:
        return []  # nobody says which there are
    return [*map(_finding, reach(url, context.key_prefix, here, LIMITS.request_timeout_s / 2))]


def _finding(one: Reach) -> Finding:
    why = one.fault
    if why is not None:
        away = why.reason in (MissReason.OUT_OF_REACH, MissReason.OTHER_USER)
        level = Level.WARN if away else Level.FAIL
        return Finding(level, f"node {one.name}: {why}", REMEDIES[why.reason])
    if one.unreadable is not None:
        return Finding(Level.INFO, f"node {one.name} serves its own host alone")
    if one.disks is not None:
        text = f"node {one.name}, its memory can be read, {one.disks}"
        return Finding(Level.WARN, text, REMEDIES[one.disks.reason])
    return Finding(Level.OK, f"node {one.name} can be read from here")
