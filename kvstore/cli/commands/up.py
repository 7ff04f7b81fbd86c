"""`kvstore up` runs Redis and memory nodes in the foreground, and leaves nothing of them behind."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from kvstore.cli.commands.node import add_disks, add_memory, disk_options, node_bytes
from kvstore.cli.engine_command import transfer_config
from kvstore.cli.fleet import Fleet, node_names
from kvstore.cli.node_table import NodeTable
from kvstore.cli.options import (
    KEY_PREFIX_DEFAULT,
    STOP_SIGNALS,
    add_store,
    add_verbose,
    at_least_one,
    log_options,
    no_password,
    run_dir_of,
    start_logging,
)
from kvstore.cli.store import embedded_url
from kvstore.errors import UsageError
from kvstore.index.embedded_redis.server import resolve_url
from kvstore.index.open import URL_VARIABLE
from kvstore.index.redis.url import parse_url
from kvstore.node import NodeConfig
from kvstore.nodedir import NodeDir
from kvstore.rundir import RUN_DIR_ENV
from kvstore.segment.cgroup import check_limit, memory_limit
from kvstore.segment.header import SHM_DIR
from kvstore.segment.shm import check_room
from kvstore.system import numa, service_manager

NODES_MAX = 64
EACH = "each"
"""`--numa each`: every node on one NUMA node, in turn."""
REDIS_END_TIMEOUT_S = 3.0
POLL_S = 0.02


class Stop:
    """Notes which signal asked us to end. Only noted: what is half done is undone in order."""

    def __init__(self) -> None:
        self.number = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def asked(self) -> bool:
        return self.number != 0

    @property
    def exit_code(self) -> int:
        return 128 + signal.SIGINT if self.number == signal.SIGINT else 0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=at_least_one, default=1, metavar="N", help="how many (default: 1)"
    )
    add_memory(parser)
    add_disks(parser)
    parser.set_defaults(policy=NodeTable().policy)
    add_store(parser)
    add_verbose(parser)


def run(args: argparse.Namespace) -> int:
    start_logging(args)
    if args.nodes > NODES_MAX:
        raise UsageError("nodes", args.nodes, f"at most {NODES_MAX} nodes on one host")
    if args.disk and args.nodes > 1:
        must = f"is for one node, not for {args.nodes}: start each with its own, by `kvstore node`"
        raise UsageError("disk", args.disk, must)
    run_dir = run_dir_of(args)
    size_bytes = check_memory(args, run_dir, node_names(args.nodes))
    where = _numa_of_each(args.numa or numa.NONE, args.nodes)
    if args.url:
        parse_url(args.url)
    stop = Stop()
    with resolve_url(args.url, run_dir=run_dir) as redis:
        _say(f"Redis {no_password(redis.url)} ({redis.source})")
        options = ["--size", str(size_bytes), "--policy", args.policy]
        options += ["--key-prefix", args.key_prefix, *log_options(args)]
        options += disk_options(args)
        # By the environment: command lines, with a password, are for everyone to read.
        env = {URL_VARIABLE: redis.url}
        fleet = Fleet(args.nodes, options, run_dir=run_dir, env=env, numa=where)
        try:
            fleet.start(stop.asked, _say)
            if not stop.asked():
                print(_how_to_use(args, redis.url, run_dir), flush=True)
                service_manager.say_ready()
            fleet.tend(stop.asked, _say)
        finally:
            fleet.stop()
    if redis.embedded is not None:
        wait_for_redis_end(run_dir, _say)
    return stop.exit_code


def check_memory(args: argparse.Namespace, run_dir: Path, names: Sequence[str]) -> int:
    """Return the size of each of the nodes called so. A wrong one is told here, once, and not by
    each node."""
    size_bytes = node_bytes(args.size, nodes=len(names))
    segment_bytes = NodeConfig(run_dir=run_dir, size_bytes=size_bytes).segment_bytes
    check_limit(segment_bytes, memory_limit(), nodes=len(names))
    waiting = sum(NodeDir(run_dir, name).kept_for_s() > 0 for name in names)
    check_room(SHM_DIR, segment_bytes * (len(names) - waiting))
    return size_bytes


def _numa_of_each(value: str, nodes: int) -> list[str]:
    """Return the `--numa` of each node: one NUMA node after another where `value` is `each`."""
    if value != EACH:
        numa.chosen(value)
        return [value] * nodes
    there = numa.nodes_with_memory()
    if not there:
        raise UsageError("numa", value, "cannot be had: this kernel has no NUMA nodes")
    return [str(there[i % len(there)]) for i in range(nodes)]


def _say(line: str) -> None:
    print(f"kvstore up: {line.removeprefix('kvstore ')}", flush=True)


def _how_to_use(args: argparse.Namespace, url: str, run_dir: Path) -> str:
    target = parse_url(url)
    secret = bool(target.password or target.sentinel_password)
    shown = "(the URL you gave: its password is not shown)" if secret else url
    extra = {"url": shown}
    lines = ["", "Use it:", ""]
    lines.append(f"    export {URL_VARIABLE}={shown if secret else shlex.quote(url)}")
    if args.run_dir is not None:
        lines.append(f"    export {RUN_DIR_ENV}={shlex.quote(str(run_dir))}")
        extra["run_dir"] = str(run_dir)
    if args.key_prefix != KEY_PREFIX_DEFAULT:
        extra["key_prefix"] = args.key_prefix
    lines += [
        "    vllm serve MODEL \\",
        f"        --kv-transfer-config {shlex.quote(json.dumps(transfer_config(extra)))}",
        "",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)


def wait_for_redis_end(run_dir: Path, say: Callable[[str], None]) -> None:
    """Wait for the Redis that ends with its last user: when that was us, it is gone first."""
    give_up_at = time.monotonic() + REDIS_END_TIMEOUT_S
    while (run_dir / "redis").exists() and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    if embedded_url(run_dir) is not None:
        say("Redis stays: others use it")
