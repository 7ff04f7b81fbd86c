"""Keeps LMCache's chunks in the store. Importing this package imports no LMCache.

`KVStoreL2Adapter` is for LMCache's server (`lmcache server`), `KVStoreConnectorAdapter` for
LMCache inside an engine's process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector.adapters.lmcache.l2 import KVStoreL2Adapter
    from connector.adapters.lmcache.remote import KVStoreConnectorAdapter

__all__ = ["KVStoreL2Adapter", "KVStoreConnectorAdapter"]


def __getattr__(name: str) -> object:
    """Import LMCache only when it asks for a class by the name of this package."""
    if name == "KVStoreL2Adapter":
        from connector.adapters.lmcache.l2 import KVStoreL2Adapter

        return KVStoreL2Adapter
    if name == "KVStoreConnectorAdapter":
        from connector.adapters.lmcache.remote import KVStoreConnectorAdapter

        return KVStoreConnectorAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
