"""What a client says that a namespace is."""

import pytest

from kvstore.core.namespaces import namespace_of
from kvstore.errors import UsageError
from kvstore.keys import Namespace
from kvstore.limits import NAMESPACE_BYTES_MAX, NAMESPACE_FIELDS_MAX


def test_fields_of_a_namespace_are_as_many_and_as_long_as_that_at_most():
    space = Namespace({"model": "m"})
    raw = space.canonical()
    assert namespace_of(raw.ljust(NAMESPACE_BYTES_MAX)) == space
    with pytest.raises(UsageError, match=f"^fields={NAMESPACE_BYTES_MAX + 1}: "):
        namespace_of(raw.ljust(NAMESPACE_BYTES_MAX + 1))
    most = Namespace({str(i): i for i in range(NAMESPACE_FIELDS_MAX)})
    assert namespace_of(most.canonical()) == most
