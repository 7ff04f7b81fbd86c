"""Keeps the worker-side connector of this process: one, shared by all that run in it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from connector.limits import GROUP_WAIT_S
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorRole
from connector.transfer.factory import KVConnectorFactory
from kvstore import DeadlineError, UsageError

if TYPE_CHECKING:
    from connector.transfer.config import KVTransferConfig
    from connector.transfer.engine import EngineInfo

log = logging.getLogger(f"kvstore.{__name__}")


class _Group:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connector: KVConnectorBase_V1 | None = None
        self.config: KVTransferConfig | None = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let one thread make or end the connector while the others wait for the outcome."""
        try:
            if not self.lock.acquire(timeout=GROUP_WAIT_S):
                raise DeadlineError(
                    f"another thread has been starting or ending KV transfer for {GROUP_WAIT_S:g} s"
                )
            yield
        finally:  # also when a handler of signals raised just when it was got
            if self.lock._is_owned():  # type: ignore[attr-defined]
                self.lock.release()


_group = _Group()


def _after_fork() -> None:
    """Forget the parent's connector: its threads and sockets are the parent's own, and a lock may
    be held by a thread that is not here."""
    global _group
    _group = _Group()


os.register_at_fork(after_in_child=_after_fork)


def ensure_kv_transfer_initialized(config: KVTransferConfig | None, engine: EngineInfo) -> None:
    """Make this process's worker-side connector unless there is one, or `config` wants none.

    Safe to call again and from several threads: the first call decides, and the
    others return when its connector is there. Raises what `create_connector` does,
    and `DeadlineError` when another thread takes longer than `GROUP_WAIT_S`.
    """
    if config is None or not config.is_kv_transfer_instance:
        return
    group = _group
    with group.changing():
        if group.connector is not None:
            if config != group.config:
                log.warning("KV transfer is initialized already; another config is ignored")
            return
        group.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, engine
        )
        group.config = config


def has_kv_transfer_group() -> bool:
    """Return whether this process has a connector now."""
    return _group.connector is not None


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """Return this process's connector. Raises `UsageError` when there is none."""
    connector = _group.connector
    if connector is None:
        raise UsageError(
            "kv_transfer_group", None, "call ensure_kv_transfer_initialized in this process first"
        )
    return connector


def is_v1_kv_transfer_group(connector: object = None) -> bool:
    """Return whether `connector`, or this process's own, is a connector; False when there is
    none."""
    if connector is None:
        connector = _group.connector
    return isinstance(connector, KVConnectorBase_V1)


def get_kv_connector_cache_layout() -> str:
    """Return how the KV of this process is to lie, "NHD" or "HND": the former unless its connector
    needs the latter. Ask before the KV is allocated."""
    connector = _group.connector
    wanted = connector and type(connector).get_required_kvcache_layout(connector._vllm_config)
    return wanted or "NHD"


def ensure_kv_transfer_shutdown() -> None:
    """End this process's connector, if any. Safe to call again.

    It is gone even when its `shutdown` raises, so that a new one can be made.
    """
    group = _group
    with group.changing():
        connector, group.connector, group.config = group.connector, None, None
        if connector is not None:
            connector.shutdown()
