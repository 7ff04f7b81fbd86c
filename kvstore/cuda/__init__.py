"""Gives the store CUDA memory: allocations that other processes can open, and copies.

`base` is the contract; `bindings` implements it over cuda-python, which is imported when a
device is first opened. `kvstore.testing.cuda` has a model of it in shared memory.
"""
