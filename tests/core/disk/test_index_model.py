"""The index that tests of the core use does what the table does."""

import pytest
from contract.disk_index import DiskIndexContract
from disk_index import DictIndex

from kvstore.core.disk.base import DiskIndex


class TestDictIndex(DiskIndexContract):
    @pytest.fixture
    def index(self) -> DiskIndex:
        return DictIndex()
