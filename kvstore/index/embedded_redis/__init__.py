"""Runs a Redis of our own, on a machine where nobody gave a URL."""
