"""The contract suite over every transport."""

import time
from functools import partial

import pytest
from contract.transport import SECURITY, Place, TransportContract

from kvstore.segment.locate import copy_out
from kvstore.transport.shm import ShmTransport
from kvstore.transport.stream import StreamTransport


def shm_transport(place):
    def attach(word):
        found = place.nodes.segment(word.node_id, word.epoch, time.monotonic())
        return partial(copy_out, found.shm) if found is not None and not found.gone else None

    return ShmTransport(attach)


class TestShm(TransportContract):
    @pytest.fixture
    def place(self, tmp_path):
        place = Place(tmp_path, shm_transport)
        yield place
        place.close()


class TestStream(TransportContract):
    @pytest.fixture
    def place(self, tmp_path):
        place = Place(tmp_path, lambda place: StreamTransport(SECURITY))
        yield place
        place.close()
