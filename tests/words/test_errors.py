"""An error means the same wherever it is looked at: message, family and field."""

import copy
import inspect
import multiprocessing
import pickle

import pytest
from each_input import each

from kvstore import errors
from kvstore.errors import KVStoreError, UsageError

KINDS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, KVStoreError)
]


def made(kind):
    return kind("field", "value", "must") if issubclass(kind, UsageError) else kind("message")


@each("kind", KINDS)
@each("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_comes_back_whole_from_a_copy_and_from_a_pickle(kind, again):
    error = made(kind)
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def wrong(number):
    if number == 1:
        raise UsageError("number", number, "must not be 1")
    return number


def test_a_pool_tells_of_a_usage_error_in_a_worker_and_goes_on():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        first, second = (pool.apply_async(wrong, (number,)) for number in (1, 2))
        with pytest.raises(UsageError, match=r"^number=1: must not be 1$"):
            first.get(30.0)
        assert second.get(30.0) == 2
