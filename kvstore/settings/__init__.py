"""Reads what operators write: settings that dataclasses declare, their file, limits that move."""
