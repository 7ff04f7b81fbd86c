"""Reads blocks that lie in VRAM of this host, and keeps VRAM in which those of others arrive."""
