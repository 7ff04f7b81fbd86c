"""`kvstore node --vram` runs a process that owns VRAM, which engines save to and read from."""

from __future__ import annotations

import os
import signal
import threading

from kvstore.cli.node_table import NodeTable
from kvstore.cli.options import STOP_SIGNALS
from kvstore.cli.output import human_bytes
from kvstore.client.session import BlockSession
from kvstore.cuda.bindings import open_device
from kvstore.errors import InternalError
from kvstore.node import NodeConfig
from kvstore.system import service_manager
from kvstore.vram.pool import VramPool

LOOK_EVERY_S = 1.0


def serve_vram(table: NodeTable, size_bytes: int, config: NodeConfig) -> int:
    """Serve until a signal, other hosts as `config` says; then blocks go down to the host's other
    nodes. 130 after Ctrl-C.

    Raises `DeviceError`, `NoSpaceError` and `UsageError`, and `InternalError` when the node has
    ended by itself.
    """
    ended_by: list[int] = []
    ending = threading.Event()

    def stop(number: int, _frame: object) -> None:
        ended_by.append(number)
        ending.set()

    device = open_device(table.device)
    # What goes down gets a checksum, whether it came with one or not: a reader may want one.
    store = BlockSession(
        table.url,
        key_prefix=config.key_prefix,
        run_dir=config.run_dir,
        limits=config.limits,
        verify="always",
    )
    try:
        name = table.name if table.name != NodeTable().name else f"vram-{table.device}"
        pool = VramPool(store, device, size_bytes, name=name, takes_saves=True, like=config)
        for number in STOP_SIGNALS:
            signal.signal(number, stop)
        try:
            service_manager.say_ready()
            print(
                f"kvstore node {name}: ready, {human_bytes(size_bytes)} of VRAM of device "
                f"{table.device}, pid {os.getpid()}",
                flush=True,
            )
            while not ending.wait(LOOK_EVERY_S):
                if pool.node.ended:
                    raise InternalError(f"node {name} has ended")
        finally:
            pool.stop()
    finally:
        store.close()
    return 128 + signal.SIGINT if signal.SIGINT in ended_by else 0
