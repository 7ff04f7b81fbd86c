"""kvstore: keep and share the KV cache of LLM engines.

`Client` is the front door; connectors use `BlockSession`. See docs/architecture.md.
"""

import platform
import sys

if sys.byteorder != "little":
    raise ImportError(
        f"kvstore reads headers, records and keys in place, which are little-endian, and this "
        f"machine ({platform.machine()}) is big-endian: use another one"
    )

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
from kvstore.system.last_resort import name_our_lines
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

__all__ = [
    "Client",
    "AsyncClient",
    "Health",
    "TokenMatch",
    "Pinned",
    "NotPinned",
    "Locator",
    "Holder",
    "HolderRun",
    "HolderRuns",
    "Holders",
    "Residency",
    "Explanation",
    "Missing",
    "MissReason",
    "FieldDifference",
    "PutResult",
    "ResetResult",
    "Retained",
    "Tier",
    "PutStatus",
    "Namespace",
    "tenant_salt",
    "weights_fingerprint",
    "Limits",
    "StreamSecurity",
    "RedisUrl",
    "read_settings",
    "known_names",
    "read_config",
    "check_settings",
    "NumberRange",
    "ItemsMax",
    "Verify",
    "BlockSession",
    "BlockStore",
    "LookupResult",
    "BlockView",
    "BlockRef",
    "PrefixMatch",
    "MissQuery",
    "Reservation",
    "PoolMapping",
    "copy_bytes",
    "raise_open_files_limit",
    "open_files_share",
    "Waiting",
    "chained_hashes",
    "in_batches",
    "DaemonThreads",
    "Key",
    "VramPool",
    "VramSaver",
    "vram_for_saves",
    "DeviceReservation",
    "AnyReservation",
    "Buffer",
    "HostBlockStore",
    "DeviceBlock",
    "DeviceRange",
    "CudaDevice",
    "cuda_device",
    "KVStoreError",
    "UsageError",
    "PeerError",
    "IndexUnavailableError",
    "IndexRefusedError",
    "NodeUnavailableError",
    "DeadlineError",
    "NoSpaceError",
    "DeviceError",
    "InternalError",
]
