"""Keeps blocks in a preallocated file on a disk: its format, its log, and what a start finds."""
