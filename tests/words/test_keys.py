import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Namespace, UsageError
from kvstore import keys as hashing
from kvstore.keys import RUN_BLOCKS

ONE = Namespace({"model": "m", "dtype": "bf16"})
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_namespaces_are_equal_exactly_when_their_fields_are():
    assert Namespace({"dtype": "bf16", "model": "m"}) == ONE
    assert Namespace({"model": "m", "dtype": "fp16"}) != ONE
    assert Namespace({"model": "m"}) != ONE


def test_types_of_fields_count():
    assert Namespace({"layers": 1}) != Namespace({"layers": "1"})


@given(tokens, st.integers(1, 50))
def test_there_is_one_key_of_32_bytes_for_each_full_block(sequence, block_tokens):
    keys = ONE.block_keys(sequence, block_tokens)
    assert len(keys) == len(sequence) // block_tokens
    assert all(len(key) == 32 for key in keys)
    assert len(set(keys)) == len(keys)


@given(tokens, tokens, st.integers(1, 20))
def test_keys_depend_on_the_prefix_and_on_nothing_behind_it(head, tail, block_tokens):
    keys = ONE.block_keys(head, block_tokens)
    assert ONE.block_keys(head + tail, block_tokens)[: len(keys)] == keys


@given(st.lists(st.integers(0, 99), min_size=8, max_size=64), st.integers(0, 7))
def test_a_changed_token_changes_every_key_from_its_block_on(sequence, at):
    changed = list(sequence)
    changed[at] += 1
    before, after = ONE.block_keys(sequence, 4), ONE.block_keys(changed, 4)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


def test_two_namespaces_never_share_a_key():
    other = Namespace({"model": "m", "dtype": "fp16"})
    sequence = list(range(64))
    assert not set(ONE.block_keys(sequence, 4)) & set(other.block_keys(sequence, 4))
    assert ONE.value_key("x") != other.value_key("x")
    hashes = [bytes([i]) * 32 for i in range(8)]
    assert not set(ONE.engine_keys(hashes)) & set(other.engine_keys(hashes))


def test_a_run_of_blocks_shares_its_tag_and_the_next_run_has_another():
    keys = ONE.block_keys(range(3 * RUN_BLOCKS), 1)
    runs = [{key[:8] for key in keys[i : i + RUN_BLOCKS]} for i in range(0, len(keys), RUN_BLOCKS)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert len(set.union(*runs)) == 3


def test_the_second_runs_tag_comes_from_the_block_before_it():
    keys = ONE.block_keys(range(RUN_BLOCKS + 1), 1)
    assert keys[RUN_BLOCKS][:8] == keys[RUN_BLOCKS - 1][8:16]


def test_engine_hashes_make_one_key_per_group_from_the_groups_last_hash():
    hashes = [bytes([i]) * 32 for i in range(7)]
    keys = ONE.engine_keys(hashes, 3)
    assert len(keys) == 2
    assert keys[0][8:] == ONE.engine_keys([hashes[2]])[0][8:]
    assert keys[1][8:] == ONE.engine_keys([hashes[5]])[0][8:]


def test_tokens_may_be_any_sequence_of_integers():
    numpy = pytest.importorskip("numpy")
    assert ONE.block_keys(numpy.arange(64), 8) == ONE.block_keys(list(range(64)), 8)
    assert ONE.block_keys(tuple(range(64)), 8) == ONE.block_keys(range(64), 8)


def test_str_and_bytes_of_the_same_name_are_the_same_key():
    assert ONE.value_key("näme") == ONE.value_key("näme".encode())


def test_a_salt_is_in_keys_as_a_whole_and_not_as_the_few_bits_that_its_field_says():
    """Who reads the fields, which nodes tell of, can compute none of the keys."""
    salted = Namespace({"model": "m"}, salt=b"a secret of the tenant")
    guessed = Namespace(salted.fields)
    assert guessed.fields == salted.fields
    assert guessed != salted
    assert guessed.value_key("x") != salted.value_key("x")
    assert not set(guessed.block_keys(range(8), 4)) & set(salted.block_keys(range(8), 4))
    assert guessed.engine_keys([b"h" * 32]) != salted.engine_keys([b"h" * 32])


def test_two_salts_that_their_field_does_not_tell_apart_give_different_keys(monkeypatch):
    real = hashing.blake2b

    def same_id(data=b"", *, digest_size, **options):
        return real(b"" if digest_size == 4 else data, digest_size=digest_size, **options)

    monkeypatch.setattr(hashing, "blake2b", same_id)
    one, other = (Namespace({"model": "m"}, salt=salt) for salt in (b"one salt", b"other salt"))
    assert one.fields == other.fields
    assert one.value_key("x") != other.value_key("x")


@each(
    ("call", "field"),
    [
        (lambda: ONE.value_key(""), "key"),
        (lambda: ONE.value_key("x" * 5000), "key"),
        (lambda: ONE.value_key(5), "key"),
        (lambda: ONE.value_key(None), "key"),
        (lambda: ONE.block_keys([1, 2], 0), "block_tokens"),
        (lambda: ONE.block_keys([-1, 2], 1), "tokens"),
        (lambda: ONE.block_keys([2**40], 1), "tokens"),
        (lambda: ONE.block_keys(["a"], 1), "tokens"),
        (lambda: ONE.engine_keys([b"x"], 0), "blocks_per_key"),
        (lambda: Namespace.named(""), "namespace"),
    ],
)
def test_bad_input_is_refused_by_name(call, field):
    with pytest.raises(UsageError, match=f"^{field}="):
        call()


def test_names_tokens_and_engine_hashes_of_the_same_bytes_give_different_keys():
    raw = bytes(range(32))
    tokens = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 32, 4)]
    (block,), (engine,) = ONE.block_keys(tokens, 8), ONE.engine_keys([raw])
    assert len({ONE.value_key(raw), block, engine}) == 3
