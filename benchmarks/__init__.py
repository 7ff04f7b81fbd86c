"""Measures the store: a suite is a file in suites/, run by `scripts/bench`."""
