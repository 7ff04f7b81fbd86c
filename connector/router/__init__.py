"""A router for prefill and decode engines that share KV through the store (docs/prefill-decode.md).

`routing` decides and does no I/O; `upstream` talks to engines, `server` to clients.
"""
