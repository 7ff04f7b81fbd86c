"""Checks that Redis is there, answers soon, and keeps what it is given."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing

from kvstore.cli.checks.base import Context, Finding, Level
from kvstore.cli.options import no_password
from kvstore.cli.output import human_bytes
from kvstore.cli.store import embedded_url
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.embedded_redis.server import find_server
from kvstore.index.open import URL_VARIABLE
from kvstore.index.redis.index import open_index
from kvstore.index.redis.info import server_info
from kvstore.limits import Limits
from kvstore.rundir import run_dir

TIMEOUT_S = 1.0
PINGS = 20
SLOW_PING_S = 0.005
"""A tenth of what a lookup may take before it is a miss."""
OLDEST_MAJOR = 5
WITHOUT_REDIS = "without it lookups are misses and nothing saved can be found"


def look(context: Context) -> list[Finding]:
    url = context.url or os.environ.get(URL_VARIABLE)
    if url:
        return _named(url, context.key_prefix)
    try:
        running = embedded_url(run_dir(context.run_dir))
    except UsageError:
        running = None  # the check of the run directory says why
    if running:
        return _named(running, context.key_prefix)
    try:
        server = find_server()
    except UsageError as e:
        return [
            Finding(Level.FAIL, f"{URL_VARIABLE} is not set and no server is installed", str(e))
        ]
    found = f"none runs; {server.path} (from {server.source}) is started when it is needed"
    return [Finding(Level.OK, found)]


def _named(url: str, key_prefix: str) -> list[Finding]:
    where = no_password(url)
    try:
        findings = [_latency(url, key_prefix, where)]
    except UsageError as e:
        return [Finding(Level.FAIL, str(e), f"correct --url or {URL_VARIABLE}")]
    except IndexUnavailableError as e:
        return [Finding(Level.FAIL, str(e), f"start it, or correct the URL; {WITHOUT_REDIS}")]
    try:
        servers = server_info(url, TIMEOUT_S)
    except IndexUnavailableError as e:
        why = "allow this user INFO to have its version and memory policy checked"
        return [*findings, Finding(Level.WARN, str(e), why)]
    for server in servers:
        findings += _server(server)
    return findings


def _latency(url: str, key_prefix: str, where: str) -> Finding:
    with closing(open_index(url, key_prefix=key_prefix, timeout_s=TIMEOUT_S)) as index:
        index.ping()  # connects
        times_s = []
        for _ in range(PINGS):
            started = time.perf_counter()
            index.ping()
            times_s.append(time.perf_counter() - started)
    median_s = statistics.median(times_s)
    found = f"{where} answers in {median_s * 1e3:.2f} ms (median of {PINGS} pings)"
    if median_s > SLOW_PING_S:
        limit_ms = Limits().redis_timeout_s * 1e3
        do = f"lookups that take over {limit_ms:.0f} ms are misses: use one that is nearer"
        return Finding(Level.WARN, found, do)
    return Finding(Level.OK, found)


def _server(info: dict[str, str]) -> list[Finding]:
    version = info.get("redis_version", "")
    kind = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    findings = [Finding(Level.OK, f"{kind} {info.get('valkey_version', version)}")]
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < OLDEST_MAJOR:
        do = f"use {OLDEST_MAJOR}.0 or newer; older ones are not tested"
        findings = [Finding(Level.WARN, f"Redis {version}", do)]
    limit_bytes = int(info.get("maxmemory", "0"))
    policy = info.get("maxmemory_policy", "unknown")
    found = f"maxmemory {human_bytes(limit_bytes) if limit_bytes else 'not set'}, {policy}"
    do = "set maxmemory and `maxmemory-policy allkeys-lru`"
    if not limit_bytes:
        findings.append(Finding(Level.WARN, found, f"it may grow until its host is full: {do}"))
    elif policy.startswith("volatile-"):
        why = "when it is full, nodes are lost though they live, and other hosts find nothing"
        findings.append(Finding(Level.FAIL, f"{found}: {why}", do))
    elif not policy.startswith("allkeys-"):
        why = "when it is full, new blocks cannot be announced"
        findings.append(Finding(Level.WARN, found, f"{why}: {do}"))
    else:
        findings.append(Finding(Level.OK, found))
    return findings
