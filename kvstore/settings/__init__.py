"""Reads what operators write: settings that dataclasses declare, and their file."""
