"""What KVSTORE_CUDA_COPIES may say."""

import pytest

from kvstore.cuda import batch
from kvstore.errors import UsageError


def test_words_stand_with_commas_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(batch.VARIABLE, raising=False)
    assert batch.wanted() == frozenset()
    monkeypatch.setenv(batch.VARIABLE, "any-order, low-priority")
    assert batch.wanted() == {batch.ANY_ORDER, batch.LOW_PRIORITY}


def test_a_word_that_is_none_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(batch.VARIABLE, "single,fast")
    with pytest.raises(UsageError, match="single, any-order, overlap, low-priority"):
        batch.wanted()
