"""Connectors: the producer and consumer sides that tie an engine's KV cache to the store.

The core (`scheduler`, `worker`) knows no engine; `adapters/` translates one engine each.
"""
