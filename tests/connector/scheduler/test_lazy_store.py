"""A store that cannot be opened costs an engine one try in a while, whatever the reason."""

import pytest

from connector.limits import STORE_RETRY_S
from connector.scheduler.lazy_store import LazyStore
from kvstore.spi import NodeUnavailableError
from kvstore.testing.blockstore import MemoryBlockStore


class Opener:
    """Fails with `error` until it is None, and counts."""

    def __init__(self, error):
        self.error = error
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return MemoryBlockStore()


@pytest.mark.parametrize("error", [NodeUnavailableError("away"), RuntimeError("a bug")])
def test_a_store_that_could_not_be_opened_is_left_alone_for_a_while(error, caplog):
    now = [0.0]
    opener = Opener(error)
    store = LazyStore(opener, lambda: now[0])
    for _ in range(3):
        for _ in range(5):
            assert store.get() is None
        now[0] += STORE_RETRY_S
    assert opener.calls == 3
    said = [record.getMessage() + str(record.exc_text) for record in caplog.records]
    assert sum(str(error) in text for text in said) == 1
    opener.error = None
    assert store.get() is store.opened is not None
    store.close()
    assert store.get() is None
