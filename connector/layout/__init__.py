"""Computes shape and place of KV: geometry, topology, keys of blocks, who reads which part."""
