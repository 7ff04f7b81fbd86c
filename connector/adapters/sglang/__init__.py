"""Keeps SGLang's KV pages in the store. Importing this package imports no engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector.adapters.sglang.storage import KVStoreHiCache

__all__ = ["KVStoreHiCache"]


def __getattr__(name: str) -> object:
    """Import SGLang only when SGLang asks for the backend by the name of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connector.adapters.sglang import storage

    return getattr(storage, name)
