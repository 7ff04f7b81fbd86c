"""Copies KV in the memory of CUDA devices. Only `queue` and `nvrtc` import CUDA."""
