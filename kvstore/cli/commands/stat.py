"""`kvstore stat` shows nodes in the index and on this host, what they hold and what was found."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from kvstore.cli.options import add_store, no_password, run_dir_of
from kvstore.cli.output import as_json, human_bytes, human_count, screen_columns, table
from kvstore.cli.store import LIMITS, local_nodes, on_disks, reach, store_url
from kvstore.client.explanation import Unreadable
from kvstore.errors import IndexUnavailableError, NodeUnavailableError, PeerError, UsageError
from kvstore.index.redis.index import open_index
from kvstore.index.redis.info import server_info
from kvstore.nodedir import Announcement, Stranger, stranger, strangers

SUMMED = (
    "capacity_bytes",
    "blocks",
    "block_bytes",
    "stored",
    "exists",
    "rejected",
    "evicted",
    "reserved",
    "pinned",
    "unpublished",
)

WHERE = ("NODE", "HOST", "STATE", "SIZE", "USED")
COUNTED = ("blocks", "stored", "exists", "rejected", "evicted", "pinned", "unpublished")

Shown: TypeAlias = dict[str, Any]
"""A JSON object, as `--json` prints it."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--node",
        metavar="NAME",
        help="only this node of this host, without asking Redis; exit status 1 unless it answers",
    )
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    if args.node is not None:
        return _one(args)
    found = collect(store_url(args, run_dir_of(args)), args.key_prefix, run_dir_of(args))
    print(as_json(found) if args.json else _text(found))
    if found["index"]["error"]:
        print(f"kvstore: {found['index']['error']}", file=sys.stderr)
        return 1
    return 0


def _one(args: argparse.Namespace) -> int:
    """Answer a health check: a node that is ready and answers is healthy while Redis is away, and
    not while Redis refuses it (node/readiness.py)."""
    for node in local_nodes(run_dir_of(args), args.key_prefix):
        if node.announcement.name == args.node:
            stats = node.stats()
            why_not = node.directory.why_not_ready()
            if why_not:
                raise NodeUnavailableError(f"node {args.node} is not ready: {why_not}")
            print(as_json(stats) if args.json else table(("COUNTER", "VALUE"), list(stats.items())))
            return 0
    for other in strangers(run_dir_of(args), args.key_prefix):
        if other.name == args.node:
            raise NodeUnavailableError(str(other))
    raise NodeUnavailableError(f"no node {args.node} runs here: `kvstore stat` lists those that do")


def collect(url: str, key_prefix: str, run_dir: Path) -> Shown:
    """Everything there is to show, as plain data. That Redis is away is shown, not raised."""
    announced: dict[int, Announcement] = {}
    others: list[Stranger] = strangers(run_dir, key_prefix)
    index: Shown = {"redis": no_password(url), "key_prefix": key_prefix, "error": ""}
    try:
        announced, elsewhere = _announced(url, key_prefix)
        others += [other for other in elsewhere if other not in others]
        index |= _counters(server_info(url, LIMITS.redis_timeout_s))
    except IndexUnavailableError as e:
        index["error"] = str(e)
    local = {node.announcement.node_id: node for node in local_nodes(run_dir, key_prefix)}
    faults: dict[int, Unreadable | None] = {}
    if not index["error"]:
        with suppress(UsageError):  # `kvstore doctor` says what is wrong with the settings
            reached = reach(url, key_prefix, run_dir, LIMITS.redis_timeout_s)
            faults = {one.announcement.node_id: one.fault for one in reached}
    nodes: list[Shown] = []
    words = announced | {node_id: node.announcement for node_id, node in local.items()}
    for node_id, announcement in sorted(
        words.items(), key=lambda item: (item[1].host, item[1].name)
    ):
        stats: dict[str, int | float] | None = None
        error = ""
        if node_id in local:
            try:
                stats = local[node_id].stats()
            except PeerError as e:
                error = str(e)
        else:
            # Of blocks alone is only known which room they leave.
            used_bytes = max(announcement.size_bytes - announcement.free_bytes, 0)
            stats = (
                {"block_bytes": used_bytes, **announcement.counts} if announcement.counts else None
            )
        nodes.append(
            asdict(announcement)
            | {
                "node_id": f"{node_id:016x}",
                "capacity_bytes": announcement.size_bytes,
                "announced": node_id in announced,
                "local": node_id in local,
                "stats": stats,
                "error": error,
                "unreadable": str(faults.get(node_id) or ""),
            }
        )
    told = [node["stats"] for node in nodes if node["local"] and node["stats"] is not None]
    totals = {name: sum(stats[name] for stats in told) for name in SUMMED}
    return {
        "index": index,
        "nodes": nodes,
        "local_totals": totals,
        "other_versions": [other._asdict() | {"error": str(other)} for other in others],
    }


def _announced(url: str, key_prefix: str) -> tuple[dict[int, Announcement], list[Stranger]]:
    with closing(open_index(url, key_prefix=key_prefix, timeout_s=LIMITS.redis_timeout_s)) as index:
        said = index.nodes()
    words = {node_id: Announcement.unpack(raw) for node_id, raw in said.items()}
    others = [other for raw in said.values() if (other := stranger(raw)) is not None]
    return {
        node_id: announcement for node_id, announcement in words.items() if announcement is not None
    }, others


def _counters(servers: list[dict[str, str]]) -> Shown:
    """Sums over the servers, of all their users: Redis counts a lookup of a key as hit or miss."""

    def summed(field: str) -> int:
        try:
            return sum(int(server.get(field, "0")) for server in servers)
        except ValueError as e:
            raise IndexUnavailableError(f"INFO of Redis: {field} is no number: {e}") from e

    return {
        "servers": len(servers),
        "version": _version(servers[0]) if servers else "?",
        "lookup_hits": summed("keyspace_hits"),
        "lookup_misses": summed("keyspace_misses"),
        "used_memory_bytes": summed("used_memory"),
        "maxmemory_bytes": summed("maxmemory"),
        "evicted_keys": summed("evicted_keys"),
    }


def _version(server: Mapping[str, str]) -> str:
    """Valkey calls itself a Redis of the version that it began from, beside its own."""
    own = server.get("valkey_version")
    return f"Valkey {own}" if own else f"Redis {server.get('redis_version', '?')}"


def _text(found: Shown) -> str:
    index, nodes, totals = found["index"], found["nodes"], found["local_totals"]
    lines = ["no nodes", ""]
    if nodes:
        where = [(*_place(node), *_room(node["capacity_bytes"], node["stats"])) for node in nodes]
        what = [(node["name"], *_counts(node["stats"])) for node in nodes]
        if sum(node["local"] and node["stats"] is not None for node in nodes) > 1:
            where.append(("total here", "", "", *_room(totals["capacity_bytes"], totals)))
            what.append(("total here", *_counts(totals)))
        lines = [table(WHERE, where, left=3, elastic=(0, 1))]
        lines += [text for node in nodes if (text := warm_start(node))]
        lines += [f"{node['name']}: {text}" for node in nodes if (text := on_disks(node["stats"]))]
        lines += ["", table(("NODE", *(name.upper() for name in COUNTED)), what), ""]
    lines += [f"{other['error']}" for other in found["other_versions"]]
    lines += [f"{node['name']}: {why}" for node in nodes if (why := node.get("unreadable"))]
    lines += [f"index       {index['redis']}", f"key prefix  {index['key_prefix']}"]
    if not index["error"]:
        hits, misses = index["lookup_hits"], index["lookup_misses"]
        memory = human_bytes(index["used_memory_bytes"])
        limit = human_bytes(index["maxmemory_bytes"]) if index["maxmemory_bytes"] else "no limit"
        lines += [
            f"key lookups {hits} hits, {misses} misses: for all clients, including heartbeats",
            f"its memory  {memory} of {limit}, {index['evicted_keys']} keys evicted, "
            f"{index['version']}",
        ]
    return "\n".join(lines)


def warm_start(node: Shown) -> str:
    """Return what the node found of its former start, empty when it started empty."""
    stats = node["stats"]
    if not node["local"] or not stats or not (stats["recovered"] or stats["recovery_dropped"]):
        return ""
    text = (
        f"{node['name']}: warm start with {stats['recovered']} blocks, "
        f"{stats['recovery_dropped']} unsealed or damaged dropped, "
        f"{stats['quarantined']} slots held for clients of before"
    )
    return textwrap.fill(text, screen_columns(), subsequent_indent="    ")


def _place(node: Shown) -> tuple[str, str, str]:
    state = "on this host" if node["local"] else "elsewhere"
    if node["error"]:
        state = "does not answer"
    elif not node["announced"]:
        state = "not in the index"
    elif node.get("unreadable"):
        state = node["unreadable"].partition(":")[0]
    return node["name"], node["host"], state


def _room(capacity_bytes: int, stats: Mapping[str, float] | None) -> tuple[str, str]:
    used = "-" if stats is None else human_bytes(stats["block_bytes"])
    return human_bytes(capacity_bytes), used


def _counts(stats: Mapping[str, float] | None) -> tuple[object, ...]:
    if stats is None:
        return tuple("-" for _ in COUNTED)
    return tuple(human_count(stats[name]) if name in stats else "-" for name in COUNTED)
