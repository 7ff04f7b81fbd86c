"""kvstore: keep and share the KV cache of LLM engines.

`Client` is the front door; connectors use `BlockSession`. See docs/architecture.md.
"""

from kvstore.client.aio import AsyncClient
from kvstore.client.base import (
    Answers,
    BlockStore,
    BlockView,
    Found,
    PoolMapping,
    Question,
    Reservation,
    Run,
)
from kvstore.client.client import Client
from kvstore.client.explanation import Explanation, FieldDifference, Missing, MissReason
from kvstore.client.health import Health
from kvstore.client.locator import Holder, Holders, Locator
from kvstore.client.pinned import Match, Pinned
from kvstore.client.reset_result import ResetResult
from kvstore.client.session import BlockSession, Verify
from kvstore.cuda.base import CudaDevice, DeviceRange
from kvstore.cuda.bindings import open_device as cuda_device
from kvstore.embedded.vram_pool import DeviceReservation, VramPool
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
from kvstore.hashing import Namespace
from kvstore.limits import Limits
from kvstore.secret import tenant_salt
from kvstore.segment.copying import copy as copy_bytes
from kvstore.settings import ItemsMax, NumberRange, check_settings, read_settings
from kvstore.transport.cuda_memory import DeviceBlock
from kvstore.transport.security import StreamSecurity
from kvstore.types import Key, PutResult, PutStatus
from kvstore.weights import weights_fingerprint

__version__ = "0.2.0"

__all__ = [
    "Client",
    "AsyncClient",
    "Health",
    "Match",
    "Pinned",
    "Locator",
    "Holder",
    "Holders",
    "Explanation",
    "Missing",
    "MissReason",
    "FieldDifference",
    "PutResult",
    "ResetResult",
    "PutStatus",
    "Namespace",
    "tenant_salt",
    "weights_fingerprint",
    "Limits",
    "StreamSecurity",
    "read_settings",
    "check_settings",
    "NumberRange",
    "ItemsMax",
    "Verify",
    "BlockSession",
    "BlockStore",
    "Answers",
    "BlockView",
    "Found",
    "Run",
    "Question",
    "Reservation",
    "PoolMapping",
    "copy_bytes",
    "Key",
    "VramPool",
    "DeviceReservation",
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
