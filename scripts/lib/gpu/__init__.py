"""Tries and measures real engines on a device: what `scripts/gpu-check` starts."""
