"""kvstore: keep and share the KV cache of LLM engines.

`Client` is the front door. Authors of engines, connectors and routers find the rest in
`kvstore.spi`. See docs/architecture.md. Each name is imported when it is first used.
"""

import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(f"kvstore runs on Linux alone, and this is {sys.platform}: use a Linux host")
if sys.byteorder != "little":
    import platform

    raise ImportError(
        f"kvstore reads headers, records and keys in place, which are little-endian, and this "
        f"machine ({platform.machine()}) is big-endian: use another one"
    )

from kvstore.lazy import on_first_use
from kvstore.system.last_resort import name_our_lines

if TYPE_CHECKING:
    from kvstore.client.async_client import AsyncClient
    from kvstore.client.base import ResetResult
    from kvstore.client.client import Client
    from kvstore.client.explanation import Explanation, MissReason
    from kvstore.client.health import Health
    from kvstore.client.pinned import NotPinned, Pinned, TokenMatch
    from kvstore.client.session import Verify
    from kvstore.errors import (
        DeadlineError,
        InternalError,
        KVStoreError,
        NoSpaceError,
        PeerError,
        UsageError,
    )
    from kvstore.index.redis.url import RedisUrl
    from kvstore.keys import Namespace
    from kvstore.limits import Limits
    from kvstore.secret import tenant_salt
    from kvstore.transport.stream.security import StreamSecurity
    from kvstore.types import PutResult, PutStatus, Retained
    from kvstore.weights import weights_fingerprint

__version__ = "0.2.0"

name_our_lines()

__all__ = ["Client", "AsyncClient", "Health", "TokenMatch", "Pinned", "NotPinned"]
__all__ += ["PutResult", "PutStatus", "ResetResult", "Retained", "Explanation", "MissReason"]
__all__ += ["Namespace", "weights_fingerprint", "tenant_salt"]
__all__ += ["Limits", "StreamSecurity", "RedisUrl", "Verify"]
__all__ += ["KVStoreError", "UsageError", "PeerError"]
__all__ += ["DeadlineError", "NoSpaceError", "InternalError"]

_IMPORTS = {
    "client.async_client": "AsyncClient",
    "client.base": "ResetResult",
    "client.client": "Client",
    "client.health": "Health",
    "client.explanation": "Explanation, MissReason",
    "client.pinned": "NotPinned, Pinned, TokenMatch",
    "client.session": "Verify",
    "errors": "DeadlineError, InternalError, KVStoreError, NoSpaceError, PeerError, UsageError",
    "index.redis.url": "RedisUrl",
    "keys": "Namespace",
    "limits": "Limits",
    "secret": "tenant_salt",
    "transport.stream.security": "StreamSecurity",
    "types": "PutResult, PutStatus, Retained",
    "weights": "weights_fingerprint",
}
"""Where the public names are: modules below `kvstore`, and what to import from each."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _IMPORTS)
