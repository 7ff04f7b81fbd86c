"""Bytes from and to nodes of other hosts over TCP, with or without TLS."""
