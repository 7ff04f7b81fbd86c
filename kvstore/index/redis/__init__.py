"""Keeps the index in Redis: one server, behind Sentinel, or a cluster of them."""
