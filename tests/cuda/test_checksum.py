"""Checksums of payloads in a device's memory, over the model of one."""

import os
import time
from functools import partial
from itertools import accumulate

import pytest
import xxhash
from contract.cuda import MIB, put
from threads_at_once import at_once

from kvstore.cuda import checksum
from kvstore.cuda.checksum import HALF_BYTES, DeviceChecksums
from kvstore.errors import DeviceError
from kvstore.testing.cuda import ModelCuda

PATIENCE_S = 60.0


@pytest.fixture
def device(tmp_path):
    device = ModelCuda(tmp_path)
    yield device
    device.hold.set()


@pytest.fixture
def checksums(device):
    checksums = DeviceChecksums(device)
    yield checksums
    device.hold.set()
    checksums.close()


def placed(device, sizes):
    """Bytes in the device's memory, cut into extents of `sizes` one after the other."""
    data = os.urandom(sum(sizes))
    at = device.allocate(len(data))
    put(device, at, data)
    starts = accumulate(sizes, initial=0)
    return data, [(at + start, size) for start, size in zip(starts, sizes, strict=False)]


def test_it_is_what_the_host_computes_however_the_bytes_are_cut(device, checksums, monkeypatch):
    real = checksum.wait

    def late(event, deadline):
        """All that is queued has been copied by then."""
        done = real(event, deadline)
        time.sleep(0.02)
        return done

    monkeypatch.setattr(checksum, "wait", late)
    cuts = [
        [1],
        [100, 0, 5],
        [HALF_BYTES],
        [HALF_BYTES - 1, 2, HALF_BYTES],
        [3 * HALF_BYTES + 7],
        [0],
    ]
    made = [placed(device, sizes) if sum(sizes) else (b"", [(0, 0)]) for sizes in cuts]
    seen = checksums.of([extents for _, extents in made])
    assert seen == [xxhash.xxh3_64_intdigest(data) for data, _ in made]
    assert device.pageable == sum(1 for sizes in cuts if sum(sizes)), "only what `put` copied"


def test_threads_do_not_mix_their_bytes(device, checksums):
    made = [placed(device, [MIB + i]) for i in range(4)]
    wrong = []

    def look(data, extents):
        seen = [checksums.of([extents])[0] for _ in range(3)]
        wrong.extend(set(seen) - {xxhash.xxh3_64_intdigest(data)})

    at_once([partial(look, *one) for one in made])
    assert wrong == []


def test_what_the_device_refuses_is_an_error_and_the_next_is_right(device, checksums):
    data, extents = placed(device, [MIB])
    with pytest.raises(DeviceError):
        checksums.of([extents, [(4096, 10)]])
    assert checksums.of([extents]) == [xxhash.xxh3_64_intdigest(data)]


def test_a_device_that_hangs_is_an_error_for_good(device, checksums, monkeypatch):
    _, extents = placed(device, [2 * MIB])
    monkeypatch.setattr(checksum, "CUDA_IPC_DRAIN_S", 0.05)
    device.hold.clear()
    with pytest.raises(DeviceError, match="hang"):
        checksums.of([extents])
    device.hold.set()
    with pytest.raises(DeviceError):
        checksums.of([extents])


def test_after_close_nothing_is_locked_and_nothing_computed(device):
    checksums = DeviceChecksums(device)
    _, extents = placed(device, [MIB])
    checksums.of([extents])
    assert device.registered
    checksums.close()
    checksums.close()
    assert not device.registered
    with pytest.raises(DeviceError):
        checksums.of([extents])
