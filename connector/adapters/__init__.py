"""One module per engine, and the entry points by which engines find them.

Importing this package imports no engine.
"""

from connector.adapters.vllm.plugin import register_vllm

__all__ = ["register_vllm"]
