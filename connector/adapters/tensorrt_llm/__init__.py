"""Runs the store under TensorRT-LLM's KV cache connector interface; docs/engines.md says how."""

from connector.adapters.tensorrt_llm.scheduler import KVStoreScheduler
from connector.adapters.tensorrt_llm.worker import KVStoreWorker

__all__ = ["KVStoreScheduler", "KVStoreWorker"]
