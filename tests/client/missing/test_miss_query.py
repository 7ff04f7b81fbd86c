"""What is looked for in place of a missing block or value."""

from kvstore import Namespace
from kvstore.client.explanation import FieldDifference
from kvstore.client.missing.miss_query import BLOCK_TOKENS_TRIED, about_block, about_value

HERE, THERE = Namespace({"model": "m", "layers": 4}), Namespace({"model": "m", "layers": 5})
TOKENS = range(100)


def block(number):
    keys = HERE.block_keys(TOKENS, 16)
    return about_block(number, keys[number], TOKENS, HERE, 16)


def test_a_missing_first_block_is_looked_for_in_other_namespaces_and_sizes():
    question = block(0)
    assert question.key_in(HERE) == question.key
    assert question.key_in(THERE) == THERE.block_keys(TOKENS, 16)[0]
    assert dict(question.others) == {
        FieldDifference("block_tokens", 16, size): HERE.block_keys(TOKENS, size)[0]
        for size in (8, 32, 64)
    }


def test_sizes_that_the_tokens_do_not_fill_are_not_looked_for():
    keys = HERE.block_keys(range(16), 16)
    question = about_block(0, keys[0], range(16), HERE, 16)
    assert [difference.there for difference, _ in question.others] == [8]


def test_where_earlier_blocks_are_there_the_size_was_right():
    assert block(1).others == []
    assert 16 in BLOCK_TOKENS_TRIED


def test_a_missing_value_is_looked_for_by_its_key_alone():
    question = about_value("k", HERE)
    assert (question.block, question.key) == (0, HERE.value_key("k"))
    assert question.key_in(THERE) == THERE.value_key("k")
    assert question.others == ()
