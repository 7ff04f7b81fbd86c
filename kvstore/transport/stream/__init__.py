"""Reads from, and saves to, nodes of other hosts over TCP, with or without TLS."""
