"""Saves to nodes: of this host, in memory and in VRAM, and of others."""
