"""Prints what torch, the bindings and the kernel's compiler are, and whether they fit together."""

from __future__ import annotations

import torch
from cuda.bindings import driver, nvrtc

from connector.copiers.cuda.nvrtc import compiled

driver.cuInit(0)
print("torch", torch.__version__, "for CUDA", torch.version.cuda)
print("driver for CUDA", driver.cuDriverGetVersion()[1])
print("NVRTC", *nvrtc.nvrtcVersion()[1:])
for name in (
    "HOST_REGISTER_SUPPORTED",
    "READ_ONLY_HOST_REGISTER_SUPPORTED",
    # Without it each copy is a call of its own.
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "UNIFIED_ADDRESSING",
    "ASYNC_ENGINE_COUNT",
):
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    print(name, driver.cuDeviceGetAttribute(attribute, 0)[1])
print("the kernel has", len(compiled(torch.cuda.get_device_capability(0))), "bytes")
