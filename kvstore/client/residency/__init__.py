"""Listens to which blocks nodes store and remove."""
