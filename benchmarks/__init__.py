"""Measures the store: one file for each suite, run by `scripts/bench`."""
