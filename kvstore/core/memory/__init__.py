"""Keeps the memory of one node: who has which extent, for how long, and what goes for a new one."""
