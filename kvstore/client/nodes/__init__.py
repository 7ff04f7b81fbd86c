"""Knows which nodes there are, on this host and elsewhere, and reads from them."""
