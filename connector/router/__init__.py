"""Sends requests to prefill and decode engines that share KV through the store.

`routing` decides and does no I/O; `upstream` talks to engines, `server` to clients, `prefix` to the
index, `discovery` to the DNS. docs/prefill-decode.md is the guide.
"""
