"""`kvstore node` runs a memory node in the foreground, until a signal or its last client's end."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from kvstore import rundir
from kvstore.cli.node_table import NodeTable, node_table
from kvstore.cli.options import (
    STOP_SIGNALS,
    add_store,
    add_verbose,
    no_password,
    size_bytes,
    start_logging,
    use_config,
)
from kvstore.cli.output import human_bytes
from kvstore.cli.vram_node import serve_vram
from kvstore.config_file import ConfigFile, read_config
from kvstore.core.disk.tier import WRITE_MODES
from kvstore.core.memory.eviction import POLICIES
from kvstore.errors import UsageError
from kvstore.index.open import open_guarded
from kvstore.node import Node, NodeConfig
from kvstore.node.config import SIZE_BYTES_DEFAULT
from kvstore.node.control.permissions import group_id
from kvstore.node.idle_shutdown import end_with
from kvstore.nodedir import NodeDir, sweep
from kvstore.secret import disk_keys, read_secret, secret
from kvstore.segment.abandoned import free_abandoned, segments
from kvstore.segment.cgroup import memory_limit, size_within
from kvstore.segment.disk.file import FILE_NAME, remove_file
from kvstore.segment.header import SHM_DIR
from kvstore.segment.shm import files_bytes
from kvstore.settings.toml_file import CONFIG
from kvstore.system import numa, service_manager
from kvstore.transport.stream.address import STREAM_PORT, parse_listen
from kvstore.transport.stream.security import (
    SECRET,
    SECRET_FILE,
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    StreamSecurity,
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_store(parser, file=True)
    add_memory(parser)
    parser.add_argument(
        "--vram",
        type=size_bytes,
        metavar="SIZE",
        help="own so much VRAM, for engines that keep blocks there, and no memory in /dev/shm",
    )
    parser.add_argument(
        "--device",
        type=int,
        metavar="NUMBER",
        help=f"the CUDA device of --vram (default: {NodeTable().device})",
    )
    parser.add_argument("--name", help=f"unique on this host (default: {NodeTable().name})")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML with its settings, where no option says otherwise (default: {CONFIG})",
    )
    parser.add_argument("--only-options", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--end-with-last-client",
        action="store_true",
        help="stop when the last client is gone, or when none comes",
    )
    parser.add_argument(
        "--group", metavar="NAME", help="let members of this group ask how it is (default: none)"
    )
    add_stream(parser)
    add_disks(parser)
    parser.add_argument(
        "--events",
        metavar="ENDPOINT",
        help="tell routers here, over ZeroMQ, which blocks are stored and removed: PORT (on this "
        "host alone), tcp://HOST:PORT or ipc://PATH; the port after it is used too",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="answer Prometheus (/metrics) and probes (/live, /ready) here; without HOST at every "
        "address",
    )
    parser.add_argument(
        "--page",
        nargs="?",
        const="",
        metavar="FILE",
        help="show the cluster to browsers at the address of --metrics too; where others reach "
        "that, to those who know the password in FILE (default: not at all)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        default=None,
        help="leave the memory for the next start of this name when told to stop",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="start nothing: free what dead nodes of this run directory left behind, and of others "
        "what no start can take over; with --disk, only the files of these disks",
    )
    parser.add_argument("--end-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    add_verbose(parser)


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options for how much memory a node takes and how it uses it."""
    parser.add_argument(
        "--size",
        type=size_bytes,
        metavar="SIZE",
        help=f"of a node, in /dev/shm (default: {human_bytes(SIZE_BYTES_DEFAULT)}, or less where "
        "the container's memory limit allows less)",
    )
    parser.add_argument(
        "--numa",
        metavar="WHERE",
        help="take the memory from all NUMA nodes in turn (interleave), from the one of this "
        "number, or with `up` for each node from the next one (each); "
        f"default: {NodeTable().numa}",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        help=f"what goes when it is full (default: {NodeTable().policy})",
    )


def node_bytes(asked: int | None, *, nodes: int = 1) -> int:
    """Return the size that was asked for, else the default as far as the container's limit allows
    it."""
    if asked is not None:
        return asked
    return size_within(SIZE_BYTES_DEFAULT, memory_limit(), nodes=nodes)


def add_disks(parser: argparse.ArgumentParser) -> None:
    """Add the options for where a node keeps copies of its blocks."""
    parser.add_argument(
        "--disk",
        action="append",
        metavar="DIR",
        help="keep copies of blocks in this directory too, on ext4 or XFS; once for each disk "
        "(docs/disk.md)",
    )
    parser.add_argument(
        "--disk-size",
        action="append",
        type=size_bytes,
        metavar="SIZE",
        help="of each --disk, in their order; one for all where it is given once",
    )
    parser.add_argument(
        "--disk-write",
        choices=WRITE_MODES,
        help="write blocks ahead of their eviction, when the node is idle too, or each at once "
        "(default: idle)",
    )
    parser.add_argument(
        "--disk-writes-per-day",
        type=float,
        metavar="NUMBER",
        help="write each disk over at most so often in 24 hours (default: without limit)",
    )
    parser.add_argument(
        "--disk-force",
        action="store_true",
        default=None,
        help="use a --disk on another file system too",
    )


def disk_options(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_disks` as they were given, for a node that is started."""
    words = [f"--disk={directory}" for directory in args.disk or []]
    words += [f"--disk-size={size}" for size in args.disk_size or []]
    for name in ("disk_write", "disk_writes_per_day"):
        if (value := getattr(args, name)) is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    return [*words, "--disk-force"] if args.disk_force else words


def add_stream(parser: argparse.ArgumentParser) -> None:
    """Add the options for how a node serves other hosts."""
    group = parser.add_argument_group(
        "other hosts", f"The secret that both sides know is in {SECRET} or {SECRET_FILE}."
    )
    group.add_argument(
        "--listen",
        nargs="?",
        const=f":{STREAM_PORT}",
        metavar="HOST[:PORT]",
        help=f"serve other hosts here (:PORT: at every address; default: :{STREAM_PORT})",
    )
    group.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        help="the name or address they reach it by, and the port where that is another",
    )
    group.add_argument(
        "--open",
        action="store_true",
        default=None,
        help="serve without a secret whoever can connect",
    )
    group.add_argument(
        "--nixl",
        nargs="?",
        const="read-only",
        choices=("read-only", "writable"),
        help="let them read by RDMA through NIXL too; experimental (docs/rdma.md)",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help=f"PEM (or {TLS_CERT})")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help=f"PEM (or {TLS_KEY})")
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help=f"demand certificates of clients, signed by these (or {TLS_CA})",
    )


def _security(args: argparse.Namespace) -> StreamSecurity:
    """Return the environment's security, with what the command line says in its place."""
    files = {name: getattr(args, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    given = {name: path for name, path in files.items() if path is not None}
    return dataclasses.replace(StreamSecurity.from_environment(), **given)


def run(args: argparse.Namespace) -> int:
    start_logging(args)
    if args.end_with_parent is not None:
        end_with(args.end_with_parent)
    if args.config is not None:
        use_config(args.config)
    if args.clean and args.disk:
        return _clean_disks(args.disk)
    file = read_config()
    table = node_table(file if not args.only_options else ConfigFile(), args)
    run_dir = rundir.run_dir(table.run_dir)
    if args.clean:
        return _clean(run_dir)
    config = NodeConfig(
        run_dir=run_dir,
        name=table.name,
        size_bytes=node_bytes(table.size_in_bytes),
        policy=table.policy,
        key_prefix=table.key_prefix,
        end_with_last_client=args.end_with_last_client,
        listen=parse_listen(table.listen, "listen", STREAM_PORT) if table.listen else None,
        advertise=table.advertise,
        open_to_all=table.open,
        security=_security(args),
        nixl=table.nixl,
        events=table.events,
        metrics=parse_listen(table.metrics, "metrics") if table.metrics else None,
        page=args.page is not None,
        page_password=secret("page", read_secret("page", Path(args.page))) if args.page else None,
        keep=table.keep,
        group=group_id(table.group) if table.group else None,
        limits=file.limits(),
        disks=table.disks,
        disk_write=table.disk_write,
        disk_writes_per_day=table.disk_writes_per_day,
        disk_keys=disk_keys() if table.disks else {},
        disk_forced=table.disk_force,
    )
    if table.vram_in_bytes is not None:
        if args.end_with_last_client:
            raise UsageError("--end-with-last-client", True, "is not for a node with `vram`")
        return serve_vram(table, table.vram_in_bytes, config)
    opened = open_guarded(
        table.url, key_prefix=table.key_prefix, run_dir=config.run_dir, limits=config.limits
    )
    try:
        # Its threads do as this one does; a Redis that was started has its memory already, and so
        # has a segment that waits for this start.
        waiting = NodeDir(run_dir, config.name).kept_for_s() > 0
        numa.place_memory(table.numa, 0 if waiting else files_bytes(config.segment_bytes))
        return asyncio.run(_serve(Node(config, opened.index), no_password(opened.url)))
    finally:
        opened.close()


def _clean_disks(directories: Sequence[str]) -> int:
    for directory in map(Path, directories):
        freed = remove_file(directory)
        path = directory / FILE_NAME
        print(f"{path}: {human_bytes(freed)} freed" if freed else f"{path}: there is none")
    return 0


def _clean(run_dir: Path) -> int:
    removed = sweep(run_dir, kept=True)
    for name in removed:
        print(f"node {name} is dead: removed what it left behind")
    freed = free_abandoned(homeless=True)
    for segment in freed:
        print(f"{segment.base}: {human_bytes(segment.size_bytes)} of a dead node freed")
    if not removed and not freed:
        print(f"no dead node in {run_dir}, nothing of one in {SHM_DIR} that none can take over")
    for segment in segments():
        if not segment.owned and segment.waits_s:
            print(
                f"{segment.base}: {human_bytes(segment.size_bytes)} wait another "
                f"{segment.waits_s / 60:.0f} min for the next start of {segment.home_named}"
            )
    return 0


async def _serve(node: Node, redis: str) -> int:
    """Serve until the end; 0 when it ended as asked, 130 after Ctrl-C."""
    ended_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        ended_by.append(number)
        node.stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)

    def say_ready() -> None:
        print(
            f"kvstore node {node.config.name}: ready, {human_bytes(node.config.segment_bytes)}, "
            f"Redis {redis}, pid {os.getpid()}",
            flush=True,
        )

    # Its own host is served with or without an index: who waits for this node waits no longer.
    await node.serve(on_serving=service_manager.say_ready, on_ready=say_ready)
    return 128 + signal.SIGINT if signal.SIGINT in ended_by else 0
