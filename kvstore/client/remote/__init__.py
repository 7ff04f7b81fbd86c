"""Finds nodes of other hosts, reads from many of them at once and saves to one of them."""
