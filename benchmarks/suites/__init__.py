"""Holds one file per suite, with its name: what suites share lies a folder above."""
