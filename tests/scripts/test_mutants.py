"""scripts/mutants: bugs are planted in a copy, one at a time, and what nothing notices is told."""

import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "scripts" / "lib"
CODE = '''
"""Words."""
LIMIT = 5


def larger(a: int, b: int) -> int:
    """One of two."""
    if a > b:
        return a
    return b
'''
TESTS = """
from kvstore.core.larger import larger


def test_larger():
    assert larger(1, 2) == 2
    assert larger(2, 1) == 2
"""


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(LIB))
    from mutants import run as mutants

    return mutants


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "kvstore/__init__.py": "",
        "kvstore/core/__init__.py": "",
        "kvstore/core/larger.py": CODE,
        "tests/core/test_larger.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


FILE = Path("kvstore/core/larger.py")


def test_each_change_is_one_bug_in_a_function_and_leaves_the_rest(mutants, tree):
    found = mutants.mutants_of(FILE, tree)
    assert [(m.line, m.words) for m in found] == [
        (8, "if a > b:  ->  if True:"),
        (8, "if a > b:  ->  if False:"),
        (8, "a > b  ->  a >= b"),
    ]
    assert len({m.text for m in found}) == 3
    named = mutants.mutants_of(FILE, tree, texts=False)
    assert [m.name for m in named] == [m.name for m in found]
    assert "if a >= b:" in found[2].text


def test_what_no_test_notices_is_told_and_the_tree_stays_as_it_is(mutants, tree, capfd):
    left = mutants.run(tree, mutants.mutants_of(FILE, tree), jobs=1, sim_seeds=0)
    assert [m.words for m in left] == ["a > b  ->  a >= b"]
    assert "kvstore/core/larger.py:8: larger: a > b  ->  a >= b" in capfd.readouterr().out
    assert (tree / FILE).read_text() == CODE


def test_tests_that_fail_without_a_bug_end_it(mutants, tree):
    (tree / "tests/core/test_larger.py").write_text("def test():\n    assert False\n")
    with pytest.raises(SystemExit, match="without any bug"):
        mutants.run(tree, mutants.mutants_of(FILE, tree), jobs=1, sim_seeds=0)


def test_what_is_accepted_is_still_there_and_has_a_reason(mutants):
    """Who changes such a line asks anew whether a test notices."""
    for path, survivors in mutants.accepted().items():
        names = {mutant.name for mutant in mutants.mutants_of(Path(path), texts=False)}
        assert not set(survivors) - names, path
        assert all(len(reason) > 10 for reason in survivors.values())


def test_all_of_the_scope_has_bugs_to_plant_and_tests_that_are_near(mutants):
    root = LIB.parents[1]
    for path in mutants.sources():
        tests = mutants.nearest_tests(root, path)
        assert tests, path
        assert all((root / name).exists() for name in tests)
    assert len(mutants.mutants_of(Path("kvstore/segment/locate.py"))) > 20


def test_a_lone_module_is_near_to_all_test_files_of_its_name(mutants):
    path = Path("kvstore/nodedir.py")
    assert path in mutants.sources()
    found = mutants.nearest_tests(LIB.parents[1], path)
    assert found == ["tests/words/test_nodedir.py", "tests/words/test_nodedir_words.py"]
