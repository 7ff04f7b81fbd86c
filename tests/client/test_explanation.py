"""What an explanation says, in words and as plain data."""

from __future__ import annotations

import pytest

from kvstore import Explanation, MissReason
from kvstore.client.explanation import (
    ABSENT_FIELD,
    FieldDifference,
    ago,
    differences,
    listed,
)
from kvstore.spi import Missing


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(0.04, "0.0 s"), (3.21, "3.2 s"), (119, "119.0 s"), (300, "5 min"), (9000, "2 h")],
)
def test_ages_are_told_in_the_unit_that_fits(age_s, text):
    assert ago(age_s) == text


def test_differences_are_listed_by_name_and_the_first_few_of_many():
    fields = differences({f"f{i:02}": i for i in range(20)}, {"f00": 0})
    assert len(fields) == 19
    assert listed(fields).endswith("and 11 more")
    assert differences({"a": 1}, {"a": 1}) == ()
    assert differences({"a": None}, {}) == (FieldDifference("a", None, ABSENT_FIELD),)


def test_an_explanation_as_plain_data():
    missing = Missing(
        block=2,
        reason=MissReason.DIFFERENT_FINGERPRINT,
        detail="d",
        differing_fields=(FieldDifference("dtype", "a", "b"),),
    )
    explanation = Explanation(
        possible_tokens=64, hit_tokens=32, first_missing=missing, local_tokens=16, request_id="r1"
    )
    assert str(explanation) == (
        "request r1: 32 of 64 tokens hit, 16 more were in the engine; "
        "block 2: different-fingerprint: d"
    )
    assert explanation.as_dict()["first_missing"] == {
        "block": 2,
        "reason": "different-fingerprint",
        "detail": "d",
        "node": "",
        "age_s": None,
        "differing_fields": {"dtype": {"asked": "a", "there": "b"}},
    }
