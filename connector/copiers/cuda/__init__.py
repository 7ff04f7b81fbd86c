"""KV in the memory of CUDA devices: planning and copying. Only `queue` and `nvrtc` import CUDA."""
