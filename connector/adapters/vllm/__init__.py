"""Translates vLLM's connector calls to the core. Importing this package imports no engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector.adapters.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> object:
    """Import vLLM only when vLLM asks for the connector by the name of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connector.adapters.vllm import connector

    return getattr(connector, name)
