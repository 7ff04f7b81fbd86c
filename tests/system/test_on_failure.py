"""What a block began is undone when it does not end, and only then."""

from __future__ import annotations

import pytest

from kvstore.system.on_failure import on_failure


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, GeneratorExit])
def test_what_leaves_the_block_is_raised_on_when_all_is_undone(error: type[BaseException]) -> None:
    undone: list[tuple[str, int]] = []

    def undo(name: str, *, times: int) -> bool:
        undone.append((name, times))
        return True

    with pytest.raises(error), on_failure(undo, "outer", times=1), on_failure(undo, "in", times=2):
        raise error
    assert undone == [("in", 2), ("outer", 1)]


def test_a_block_that_ends_undoes_nothing() -> None:
    def made() -> int:
        with on_failure(pytest.fail, "it has ended"):
            return 7

    assert made() == 7
