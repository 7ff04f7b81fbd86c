"""Gathers engine blocks into store blocks and scatters them back, wherever the KV lies."""
