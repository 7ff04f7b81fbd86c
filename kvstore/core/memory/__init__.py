"""Keeps the memory of one node: who has which extent, for how long, and what is evicted."""
