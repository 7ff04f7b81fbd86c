"""Registers the connector with vLLM, and says which vLLM it is made for. Imports no engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VLLM_CONNECTOR = "KVStoreConnector"
"""The registered name, which is also the class name: vLLM looks statistics up by it."""
MADE_FOR = ">=0.32,<0.34"
"""Versions of vLLM that the adapter is tested with: those of the extra `vllm` in pyproject.toml."""

log = logging.getLogger(f"vllm.{__name__}")  # only loggers below vLLM's own are shown at INFO


def register_vllm() -> None:
    """Make `"kv_connector": "KVStoreConnector"` known to vLLM, in whichever process runs this.

    Never raises, whatever vLLM it finds: it runs in engines that do not use the store, too. vLLM
    runs its plug-ins in every process, some more than once.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if VLLM_CONNECTOR in getattr(KVConnectorFactory, "_registry", {}):
            return
        KVConnectorFactory.register_connector(
            VLLM_CONNECTOR, "connector.adapters.vllm", VLLM_CONNECTOR
        )
    except Exception as e:
        log.warning("kvstore: %s is not registered: %s", VLLM_CONNECTOR, _why(e))


@contextmanager
def of_vllm() -> Iterator[None]:
    """Wrap imports out of vLLM: what is missing there is an ImportError that says which vLLM this
    adapter is made for and which it found."""
    try:
        yield
    except (ImportError, AttributeError) as e:
        raise ImportError(f"kvstore: {VLLM_CONNECTOR} cannot be used: {_why(e)}") from e


def _why(error: Exception) -> str:
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None) or "one that does not say its version"
    if module is None:
        found = "none"
    text = " ".join(str(error).split())
    return f"made for vLLM {MADE_FOR}, found {found} ({type(error).__name__}: {text})"
