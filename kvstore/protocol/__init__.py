"""Encodes and decodes every message that crosses a process. Pure: bytes and values, no I/O.

`control*` is between clients and the node of their host, `stream*` between a client and a node of
another host, `nixl` how a node offers its memory for RDMA.
"""
