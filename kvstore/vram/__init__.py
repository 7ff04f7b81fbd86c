"""Nodes that live inside the process that uses them."""
