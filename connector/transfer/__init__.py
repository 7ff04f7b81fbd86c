"""Transfers KV with the API of `vllm.distributed.kv_transfer`, for engines and connectors.

It has configuration, the base of connectors, the factory, aggregation of workers' reports,
several connectors as one, lookup buffer and pipe.
"""
