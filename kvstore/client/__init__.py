"""Holds what callers use: `Client` for people, `BlockSession` for connectors."""
