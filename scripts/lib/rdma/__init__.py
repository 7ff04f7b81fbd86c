"""Tests whether NIXL reads work between two hosts: `scripts/rdma-check`."""
