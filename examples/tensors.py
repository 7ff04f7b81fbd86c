"""Arrays and tensors come back as they were put: dtype, shape, bits. Needs torch and numpy."""

import numpy as np
import torch

from kvstore import Client

with Client() as store:
    store.put("hidden", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    print(store.get("hidden"))  # a bfloat16 tensor of shape (2, 3)
    store.put("logits", np.linspace(0, 1, 4, dtype=np.float32))
    print(store.get("logits"))  # a float32 array of 4

    room = torch.empty(2, 3, dtype=torch.bfloat16)  # read into memory that is there
    store.get("hidden", out=room)
    print(room.sum().item())  # 15.0
