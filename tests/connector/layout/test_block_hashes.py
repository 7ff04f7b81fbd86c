"""Hashes of store blocks: chained over tokens and everything else that shapes the KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.layout.block_hashes import BlockHashes, canonical, extend
from kvstore import UsageError


def nothing(first: int, end: int) -> None:
    return None


def test_the_hashes_are_those_of_version_1() -> None:
    """Golden: a change orphans what is stored and needs another ALGORITHM."""
    hashes = extend([], range(10), 4, nothing)
    assert [h.hex()[:16] for h in hashes] == ["a4c328bf692b31ee", "bdd605d46e42aa9f"]


def test_trap_growing_a_prompt_in_steps_gives_the_same_hashes_as_at_once() -> None:
    tokens = list(range(100, 140))
    asked: list[tuple[int, int]] = []

    def extra(first: int, end: int) -> object:
        asked.append((first, end))
        return ("x", first)

    whole = extend([], tokens, 8, extra)
    assert asked == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]
    grown: list[bytes] = []
    for count in (3, 8, 9, 30, 40):
        grown = extend(grown, tokens[:count], 8, extra)
    assert grown == whole


def test_trap_a_difference_anywhere_before_changes_every_later_hash() -> None:
    base = extend([], range(32), 8, nothing)
    token = extend([], [99, *range(1, 32)], 8, nothing)
    salt = extend([], range(32), 8, lambda first, _: "salt" if first == 0 else None)
    image = extend([], range(32), 8, lambda first, _: ("mm", "id", 3) if first == 16 else None)
    assert not set(base) & set(token)
    assert not set(base) & set(salt)
    assert base[:2] == image[:2]
    assert not set(base[2:]) & set(image[2:])


def test_trap_a_placeholder_token_ends_the_run() -> None:
    tokens = [*range(12), -1, *range(13, 24)]
    assert extend([], tokens, 8, nothing) == extend([], range(8), 8, nothing)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_trap_only_equal_values_have_equal_bytes(a: object, b: object) -> None:
    same = a == b and repr(a) == repr(b)  # True == 1 in Python
    assert (canonical(a) == canonical(b)) == same


@pytest.mark.parametrize(
    ("a", "b"), [(("a", "b"), ("ab",)), ((("a",), "b"), ("a", ("b",))), ("1", 1), (b"a", "a")]
)
def test_neighbours_are_told_apart(a: object, b: object) -> None:
    assert canonical(a) != canonical(b)


def test_trap_what_has_no_canonical_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="object"):
        canonical(("lora", object()))
    with pytest.raises(UsageError, match="float"):
        canonical(1.5)


class TestChain:
    """With blocks of 4 tokens; the engine hashes every 2."""

    def setup_method(self) -> None:
        self.tokens = list(range(12))
        self.engine = [b"%d" % i for i in range(6)]
        self.asked: list[int] = []
        self.chain = BlockHashes(4, self.extra, self.engine_hash)

    def extra(self, first: int, end: int) -> object:
        self.asked.append(first)
        return None

    def engine_hash(self, num_tokens: int) -> bytes | None:
        index = num_tokens // 2 - 1
        return self.engine[index] if 0 <= index < len(self.engine) else None

    def test_each_block_is_hashed_once_while_the_request_grows(self) -> None:
        for count in (3, 4, 7, 12):
            hashes = self.chain.hashes(self.tokens, count)
            assert hashes == extend([], self.tokens[:count], 4, nothing)
        assert self.asked == [0, 4, 8]

    def test_trap_replaced_tokens_are_hashed_again(self) -> None:
        before = list(self.chain.hashes(self.tokens, 8))
        self.tokens[7], self.engine[3] = 99, b"other"
        after = self.chain.hashes(self.tokens, 8)
        assert after == extend([], self.tokens[:8], 4, nothing)
        assert after[0] == before[0]
        assert after[1] != before[1]

    def test_an_extra_without_canonical_bytes_ends_all_hashing(self) -> None:
        chain = BlockHashes(4, lambda first, end: object() if first else None, self.engine_hash)
        assert chain.hashes(self.tokens, 4) == extend([], self.tokens[:4], 4, nothing)
        assert chain.hashes(self.tokens, 12) == []
        assert chain.hashes(self.tokens, 4) == []
