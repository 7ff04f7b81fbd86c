"""Save on one host, read on another. Both know the secret and the same Redis:

export KVSTORE_SECRET=... KVSTORE_URL=redis://HOST:6379

a$ kvstore node --listen
a$ python examples/two_hosts.py put
b$ python examples/two_hosts.py get
"""

import sys

from kvstore import Client

with Client() as store:
    if sys.argv[1:] == ["put"]:
        print(store.put("from a", bytes(range(256)) * 4096).status)
    else:
        value = store.get("from a")  # from the memory of that host's node, over TCP
        print(len(value) if isinstance(value, bytes) else None, store.stats()["transports"])
