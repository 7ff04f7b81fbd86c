"""The contract suite over every transport."""

import pytest
from contract.transport import SECURITY, Place, TransportContract

from kvstore.transport.stream.transport import StreamTransport


class TestStream(TransportContract):
    @pytest.fixture
    def place(self, tmp_path):
        place = Place(tmp_path, lambda place: StreamTransport(SECURITY))
        yield place
        place.close()
