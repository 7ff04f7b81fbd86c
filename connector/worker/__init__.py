"""Moves bytes between engine blocks and the store, beside the forward: the worker side."""
