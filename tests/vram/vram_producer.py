"""A process that saves blocks to VRAM over the model of a device until it is killed."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

from redis_servers import wait_until

from kvstore.cuda.base import address_of, wait
from kvstore.spi import BlockSession, DeviceReservation, Reservation, VramPool
from kvstore.testing.cuda import ModelCuda

BLOCK_BYTES = 96 << 10
NAMESPACE = 7
PATIENCE_S = 60.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload_of(number: int) -> bytes:
    return key_of(number) * (BLOCK_BYTES // 32)


class Producer:
    """What a connector does when it saves: VRAM first, host memory when that is full."""

    def __init__(self, options, model_dir: Path, size_bytes: int, **pool) -> None:
        self.device = ModelCuda(model_dir)
        self.store = BlockSession(**options, device=self.device)
        self.pool = VramPool(self.store, self.device, size_bytes, **pool)
        self.stream = self.device.stream()

    def save(self, *numbers: int) -> list[str]:
        """Where each block went: "vram", "dram", or why nowhere."""
        went = {}
        keys = {key_of(n): n for n in numbers}
        answers = self.pool.reserve(list(keys), BLOCK_BYTES, NAMESPACE)
        granted = [a for a in answers if isinstance(a, DeviceReservation)]
        payloads = [memoryview(bytearray(payload_of(keys[r.key]))) for r in granted]
        self.stream.copy(
            [
                (r.buffer.address, address_of(payload), BLOCK_BYTES)
                for r, payload in zip(granted, payloads, strict=True)
            ]
        )
        assert wait(self.stream.record(), time.monotonic() + PATIENCE_S)
        for reservation, result in zip(granted, self.pool.commit(granted), strict=True):
            went[reservation.key] = "vram" if result else result.reason
        left = [key for key in keys if key not in went]
        for key, answer in zip(left, self.store.reserve(left, BLOCK_BYTES, NAMESPACE), strict=True):
            if isinstance(answer, Reservation):
                answer.buffer[:] = payload_of(keys[key])
                (answer,) = self.store.commit([answer])
            went[key] = "dram" if answer else answer.reason
        return [went[key] for key in keys]

    def close(self, drain_s: float = 0.0) -> None:
        self.pool.stop(drain_s)
        self.stream.close()
        self.store.close()


def produce(options, model_dir: str, seed: int, reports) -> None:
    """Save until killed; say how far it has come."""
    rng = random.Random(seed)
    producer = Producer(options, Path(model_dir), 2 << 20)
    number = 0
    while True:
        batch = range(number, number + rng.randint(1, 4))
        producer.save(*batch)
        number = batch.stop
        reports.put(number)
        time.sleep(rng.random() * 0.01)


def found_of(session, numbers):
    return session.lookup([key_of(n) for n in numbers])


def host_bytes(session, found):
    """What each found block is, read into the host's memory; None for a miss."""
    got = []
    for view in session.views(found, None, PATIENCE_S):
        data = None if view is None else bytes(view.buffer)
        got.append(data if view is not None and view.valid() else None)
    return got


def in_vram(consumer, found):
    view = consumer.device_view(found)
    if view is None:
        return False
    view.close()
    return True


def demoted(producer, count):
    counts = producer.pool.demoter.counts
    wait_until(lambda: counts["demoted"] >= count, f"{count} blocks went down")
