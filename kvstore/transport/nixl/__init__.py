"""Reads from nodes of other hosts by RDMA, through NIXL, whose agent has a process of its own."""
