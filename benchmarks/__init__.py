"""Measurements: one file a suite, run by `scripts/bench`."""
