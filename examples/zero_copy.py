"""Read a value where it lies, in shared memory: no copy, and no eviction while it is in use."""

import numpy as np

from kvstore import Client

with Client() as store:
    store.put("numbers", np.arange(100_000, dtype=np.int64))
    pinned = store.pin("numbers")
    assert pinned is not None  # a miss
    with pinned:
        numbers = np.frombuffer(pinned.buffer, np.int64)
        print(numbers.sum())
        print(numbers.flags.writeable)  # False: it is everybody's
        last = int(numbers[-1])  # what is needed later is copied
    print(last)
