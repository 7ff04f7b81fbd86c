"""kvstore: keep and share the KV cache of LLM engines.

`Client` is the front door; connectors use `BlockSession`. See docs/architecture.md. Each name is
imported when it is first used: a router needs no client, and a client no node.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.byteorder != "little":
    import platform

    raise ImportError(
        f"kvstore reads headers, records and keys in place, which are little-endian, and this "
        f"machine ({platform.machine()}) is big-endian: use another one"
    )

from kvstore.system.last_resort import name_our_lines

if TYPE_CHECKING:
    from kvstore.batches import in_batches
    from kvstore.client.async_client import AsyncClient
    from kvstore.client.base import (
        AnyReservation,
        BlockRef,
        BlockStore,
        BlockView,
        DeviceReservation,
        HostBlockStore,
        LookupResult,
        MissQuery,
        PoolMapping,
        PrefixMatch,
        Reservation,
        ResetResult,
    )
    from kvstore.client.client import Client
    from kvstore.client.health import Health
    from kvstore.client.local.vram_saver import VramSaver
    from kvstore.client.locator import Holder, HolderRun, HolderRuns, Holders, Locator
    from kvstore.client.missing.explanation import Explanation, FieldDifference, Missing, MissReason
    from kvstore.client.pinned import NotPinned, Pinned, TokenMatch
    from kvstore.client.residency.listener import Residency
    from kvstore.client.session import BlockSession, Verify
    from kvstore.config_file import read_config
    from kvstore.cuda.base import Buffer, CudaDevice, DeviceRange
    from kvstore.cuda.bindings import open_device as cuda_device
    from kvstore.errors import (
        DeadlineError,
        DeviceError,
        IndexRefusedError,
        IndexUnavailableError,
        InternalError,
        KVStoreError,
        NodeUnavailableError,
        NoSpaceError,
        PeerError,
        UsageError,
    )
    from kvstore.index.redis.url import RedisUrl
    from kvstore.keys import Namespace, chained_hashes
    from kvstore.limits import Limits
    from kvstore.secret import tenant_salt
    from kvstore.segment.copying import copy as copy_bytes
    from kvstore.settings.reader import (
        ItemsMax,
        NumberRange,
        check_settings,
        known_names,
        read_settings,
    )
    from kvstore.system.descriptors import raise_limit as raise_open_files_limit
    from kvstore.system.descriptors import share as open_files_share
    from kvstore.system.threads import DaemonThreads
    from kvstore.system.waiting import Waiting
    from kvstore.transport.cuda_memory import DeviceBlock
    from kvstore.transport.stream.security import StreamSecurity
    from kvstore.types import Key, PutResult, PutStatus, Retained, Tier
    from kvstore.vram.owner import vram_for_saves
    from kvstore.vram.pool import VramPool
    from kvstore.weights import weights_fingerprint

__version__ = "0.2.0"

name_our_lines()

__all__ = ["Client", "AsyncClient", "Health", "TokenMatch", "Pinned", "NotPinned"]
__all__ += ["Locator", "Holder", "HolderRun", "HolderRuns", "Holders", "Residency"]
__all__ += ["Explanation", "Missing", "MissReason", "FieldDifference"]
__all__ += ["PutResult", "ResetResult", "Retained", "Tier", "PutStatus"]
__all__ += ["Namespace", "tenant_salt", "weights_fingerprint"]
__all__ += ["Limits", "StreamSecurity", "RedisUrl"]
__all__ += ["read_settings", "known_names", "read_config"]
__all__ += ["check_settings", "NumberRange", "ItemsMax", "Verify"]
__all__ += ["BlockSession", "BlockStore", "LookupResult", "BlockView", "BlockRef", "PrefixMatch"]
__all__ += ["MissQuery", "Reservation", "PoolMapping", "copy_bytes"]
__all__ += ["raise_open_files_limit", "open_files_share", "Waiting"]
__all__ += ["chained_hashes", "in_batches", "DaemonThreads", "Key"]
__all__ += ["VramPool", "VramSaver", "vram_for_saves"]
__all__ += ["DeviceReservation", "AnyReservation", "Buffer", "HostBlockStore"]
__all__ += ["DeviceBlock", "DeviceRange", "CudaDevice", "cuda_device"]
__all__ += ["KVStoreError", "UsageError", "PeerError"]
__all__ += ["IndexUnavailableError", "IndexRefusedError", "NodeUnavailableError"]
__all__ += ["DeadlineError", "NoSpaceError", "DeviceError", "InternalError"]

_IMPORTS = {
    "batches": "in_batches",
    "client.async_client": "AsyncClient",
    "client.base": (
        "AnyReservation, BlockRef, BlockStore, BlockView, DeviceReservation, HostBlockStore, "
        "LookupResult, MissQuery, PoolMapping, PrefixMatch, Reservation, ResetResult"
    ),
    "client.client": "Client",
    "client.health": "Health",
    "client.local.vram_saver": "VramSaver",
    "client.locator": "Holder, HolderRun, HolderRuns, Holders, Locator",
    "client.missing.explanation": "Explanation, FieldDifference, Missing, MissReason",
    "client.pinned": "NotPinned, Pinned, TokenMatch",
    "client.residency.listener": "Residency",
    "client.session": "BlockSession, Verify",
    "config_file": "read_config",
    "cuda.base": "Buffer, CudaDevice, DeviceRange",
    "cuda.bindings": "open_device as cuda_device",
    "errors": (
        "DeadlineError, DeviceError, IndexRefusedError, IndexUnavailableError, InternalError, "
        "KVStoreError, NodeUnavailableError, NoSpaceError, PeerError, UsageError"
    ),
    "index.redis.url": "RedisUrl",
    "keys": "Namespace, chained_hashes",
    "limits": "Limits",
    "secret": "tenant_salt",
    "segment.copying": "copy as copy_bytes",
    "settings.reader": "ItemsMax, NumberRange, check_settings, known_names, read_settings",
    "system.descriptors": "raise_limit as raise_open_files_limit, share as open_files_share",
    "system.threads": "DaemonThreads",
    "system.waiting": "Waiting",
    "transport.cuda_memory": "DeviceBlock",
    "transport.stream.security": "StreamSecurity",
    "types": "Key, PutResult, PutStatus, Retained, Tier",
    "vram.owner": "vram_for_saves",
    "vram.pool": "VramPool",
    "weights": "weights_fingerprint",
}
"""Where the public names are: modules below `kvstore`, and what to import from each."""

if not TYPE_CHECKING:

    def _find(name: str) -> object:
        for module, imports in _IMPORTS.items():
            for each in imports.split(", "):
                attribute, _, alias = each.partition(" as ")
                if name == (alias or attribute):
                    return getattr(import_module(f"kvstore.{module}"), attribute)
        raise AttributeError(
            f"module 'kvstore' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )

    def __getattr__(name: str) -> object:
        globals()[name] = found = _find(name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
