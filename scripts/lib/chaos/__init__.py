"""Serves real engines while faults strike the store: `scripts/chaos`."""
