"""vLLM's engine core around a model engine: only scheduler and executor are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from connector.adapters.vllm import engine_hooks


def core_class() -> Any:
    """Return vLLM's own class, with our hooks in it."""
    from vllm.v1.engine.core import EngineCore

    engine_hooks.watch_engine_core()
    return EngineCore


def core_of(engine: Any) -> Any:
    """Return an engine core without its processes."""
    core = object.__new__(core_class())
    core.scheduler = engine.scheduler
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method, *args, **kwargs: [],
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
        add_lora=lambda request: True,
        sleep=lambda level: None,
        discard=lambda what: None,
        wake_up=lambda tags: None,
        is_sleeping=False,
    )
    core.batch_queue = None
    core.mm_receiver_cache = None
    core._weight_version = "default"
    # 0.33 tells other connectors' peers of memory that comes back.
    core._set_kv_connector_handshake_metadata = lambda: None
    return core
