"""Read a value where it lies, in shared memory: no copy, and no eviction while it is in use."""

import numpy as np

from kvstore import Client

with Client() as store:
    store.put("numbers", np.arange(100_000, dtype=np.int64))
    pinned = store.pin("numbers")
    assert pinned  # false on a miss
    numbers = pinned.numpy()  # pinned.tensor() is a torch tensor
    pinned.close()
    print(numbers.sum())
    print(numbers.flags.writeable)  # False: it is everybody's
print(numbers[-1])  # as long as this array, or a slice of it, lives, so does the memory
