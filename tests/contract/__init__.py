"""Suites that every implementation of a contract runs.

A package, so that pytest does not put this folder on the path of modules: its `cuda.py` would be
found before cuda-python there, and tests that need that would skip themselves.
"""
