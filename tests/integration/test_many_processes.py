"""Many processes put and get at once in a pool far too small: no wrong byte, no failed put."""

import subprocess
import sys

from stores import MIB, NodeProcess

WORKER = """
import random, sys, time
from hashlib import blake2b
from pathlib import Path
from kvstore import Client, Limits
rng = random.Random(int(sys.argv[4]))
def content(i):
    unit = blake2b(str(i).encode(), digest_size=32).digest()
    return (unit * (1 + (i * 7919) % 12000))
hits = puts = 0
with Client(sys.argv[1], run_dir=Path(sys.argv[2]), key_prefix=sys.argv[3],
            limits=Limits(redis_timeout_s=5.0, request_timeout_s=10.0)) as client:
    stop = time.monotonic() + 4
    while time.monotonic() < stop:
        ids = [rng.randrange(400) for _ in range(rng.choice([1, 1, 8]))]
        got = client.get_many([f"k{i}" for i in ids])
        for i, value in zip(ids, got):
            if value is not None:
                hits += 1
                if value != content(i):
                    print("WRONG", i); sys.exit(3)
        missing = [i for i, value in zip(ids, got) if value is None]
        for i, result in zip(missing, client.put_many([(f"k{i}", content(i)) for i in missing])):
            puts += 1
            if result.status == "rejected":
                print("REJECTED", result.reason); sys.exit(4)
print(hits, puts)
"""


def test_under_pressure_no_put_fails_and_no_get_is_wrong(redis_server):
    """400 values of up to 384 KiB in a pool of 16 MiB."""
    with NodeProcess(redis_server, size=16 * MIB) as node:
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", WORKER, node.redis.url, str(node.run_dir)),
                    *(node.key_prefix, str(seed)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(4)
        ]
        said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, said
    hits, puts = zip(*(map(int, line.split()) for line in said), strict=True)
    assert sum(hits) > 50
    assert sum(puts) > 500
