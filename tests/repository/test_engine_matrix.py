"""docs/engines.md says of engines and features what the tests say."""

import engine_matrix as matrix


def test_the_matrix_of_the_document_is_the_one_that_the_tests_make():
    assert matrix.in_document() == matrix.text(), "run python tests/engine_matrix.py"


def test_a_row_that_a_test_names_is_in_the_matrix():
    shown = {(cover.row, cover.engine) for cover in matrix.covers()}
    assert ("full attention", "vllm") in shown
    assert {engine for _, engine in shown} == set(matrix.ENGINES)
