"""Saves and reads what `Client` stores under a key."""
