"""A node's answers about blocks: codes, words, and what is neither."""

import pytest

from kvstore.core import node
from kvstore.protocol.control_replies import CODES, outcome, outcomes
from kvstore.types import EXISTS, IN_PROGRESS, STORED, PutStatus


def test_every_code_of_a_node_has_its_meaning():
    assert CODES[node.STORED_CODE] is STORED
    assert CODES[node.EXISTS_CODE] is EXISTS
    assert CODES[node.IN_PROGRESS_CODE] is IN_PROGRESS
    assert "no space" in CODES[node.NO_SPACE_CODE].reason
    assert len(CODES) == 4


def test_words_are_why_a_block_was_rejected():
    assert outcome("too large").status is PutStatus.REJECTED
    assert outcome("too large").reason == "too large"


@pytest.mark.parametrize("answer", [4, -1, True, 1.0, None, b"x", [1]])
def test_what_is_neither_a_code_nor_words_is_nonsense(answer):
    with pytest.raises(ValueError, match="no outcome"):
        outcome(answer)


def test_there_is_one_outcome_for_each_block():
    assert outcomes(2, [0, "no"])[0] is STORED
    for body in ([], [0], [0, 0, 0]):
        with pytest.raises(ValueError, match="outcomes of 2"):
            outcomes(2, body)
