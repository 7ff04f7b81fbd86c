"""What a client says that a namespace is."""

import pytest
from each_input import each

from kvstore.core.namespaces import Namespaces, namespace_of
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


def test_a_field_is_text_a_number_or_nothing():
    fields = {"a": None, "b": "text", "c": 1, "d": 2.5, "e": True}
    assert namespace_of(Namespace(fields).canonical()) == Namespace(fields)


@each(
    "raw",
    [
        "{}",
        7,
        b"{",
        b"7",
        b"[]",
        b'{"a": []}',
        b'{"a": {"b": 1}}',
        Namespace({str(i): i for i in range(NAMESPACE_FIELDS_MAX + 1)}).canonical(),
    ],
    ids=lambda raw: str(raw)[:20],
)
def test_what_is_no_flat_object_of_few_fields_is_refused_by_name(raw):
    with pytest.raises(UsageError, match=r"^fields="):
        namespace_of(raw)


def test_the_namespaces_told_last_are_kept_each_once():
    one, two, three = (Namespace.named(name) for name in ("one", "two", "three"))
    kept = Namespaces(2)
    for space in (one, two, one):
        kept.told(space)
    assert kept.all() == [two, one]
    kept.told(three)
    assert kept.all() == [one, three]
    assert len(kept) == 2
