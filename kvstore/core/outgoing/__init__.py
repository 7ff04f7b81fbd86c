"""Keeps what goes out of a node: records for the index, and which blocks came and left, and why."""
