"""The pages, and the docstrings of modules, name only files that exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    if page.name != "CHANGELOG.md" and page.parent.name != "decisions"
)
MODULES = sorted(
    module for room in ("kvstore", "connector") for module in (ROOT / room).rglob("*.py")
)
# A path, or the bare name of a module, as prose writes it: not inside a URL or a longer path.
NAMED = re.compile(r"(?<![\w/.~$*{}:-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|cu))(?![\w/*-])")
FOLDER = re.compile(r"`((?:kvstore|connector|tests|scripts|docs|benchmarks|examples)/[\w/.-]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)")
NOT_OURS = frozenset({"kv.toml"})
"""Files that a page tells its reader to write."""


@pytest.fixture(scope="module")
def files() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(name for name in listed.stdout.splitlines() if (ROOT / name).exists())


@cache
def folders(files: frozenset[str]) -> frozenset[str]:
    return frozenset(str(folder) for name in files for folder in Path(name).parents)


@cache
def ends(files: frozenset[str]) -> frozenset[str]:
    """What a file may be called by: its path from any folder on."""
    parts = [name.split("/") for name in files]
    return frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))


def missing(text: str, home: Path, files: frozenset[str], *, prose: bool) -> list[str]:
    """Names in `text`, written in a file of folder `home`, that lead nowhere."""

    def exists(name: str) -> bool:
        from_home = os.path.relpath(home / name, ROOT)
        from_top = os.path.normpath(name)
        return (
            not {from_home, from_top}.isdisjoint(files | folders(files))
            or name in NOT_OURS
            or name in ends(files)
        )

    names = set(NAMED.findall(text)) | set(FOLDER.findall(text))
    if prose:
        names |= {link for link in LINK.findall(text) if ":" not in link}
    return sorted(name for name in names if not exists(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path, files: frozenset[str]) -> None:
    text = re.sub(r"```(?!mermaid).*?```", "", page.read_text(), flags=re.DOTALL)
    assert not missing(text, page.parent, files, prose=True)


def test_every_file_that_a_module_names_exists(files: frozenset[str]) -> None:
    wrong = {}
    for module in MODULES:
        said = ast.get_docstring(ast.parse(module.read_text())) or ""
        if lost := missing(said, module.parent, files, prose=False):
            wrong[str(module.relative_to(ROOT))] = lost
    assert not wrong


def test_a_file_that_is_not_there_is_found(files: frozenset[str]) -> None:
    text = "See `core/gone.py`, [here](nowhere/page.md), `kvstore/attic/`; core/node.py is there."
    found = missing(text, ROOT / "docs", files, prose=True)
    assert found == ["core/gone.py", "kvstore/attic/", "nowhere/page.md"]


def answered() -> list[tuple[str, str]]:
    """Of each question of where.md: the file, and what was guessed."""
    rows = [line for line in (ROOT / "docs/where.md").read_text().splitlines() if "? |" in line]
    return [(row.split("|")[2].strip(), row.split("|")[3].strip()) for row in rows]


def test_each_of_the_28_questions_has_one_file() -> None:
    answers = [answer for answer, _ in answered()]
    assert len(answers) == len(set(answers)) == 28
    assert all(re.fullmatch(r"`(kvstore|connector)/[\w/]+\.py`", answer) for answer in answers)


def test_each_guess_that_missed_names_another_file_that_is_there(files: frozenset[str]) -> None:
    for answer, guess in answered():
        told = re.fullmatch(r"(?:half|no): `([\w/.]+)`.*|yes(?: \(as .+\))?", guess)
        assert told is not None, guess
        missed = told[1]
        if missed is None:
            continue
        assert {f"kvstore/{missed}", f"connector/{missed}"} & files, guess
        assert not answer.strip("`").endswith(f"/{missed}"), guess


def test_the_last_line_of_the_score_counts_the_answers() -> None:
    told = re.findall(
        r"^\| .+ \| (\d+) \| (\d+) \| (\d+) \|$", (ROOT / "docs/where.md").read_text(), re.M
    )
    counts = [
        sum(guess.startswith(word) for _, guess in answered()) for word in ("yes", "half", "no")
    ]
    assert [int(count) for count in told[-1]] == counts


def test_every_decision_stands_once_in_the_index_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    headings = {
        page.name: page.read_text().splitlines()[0].removeprefix("# ") for page in folder.glob("0*")
    }
    listed = re.findall(r"^- \[(\d+)\]\((.+)\) (.+)$", (folder / "README.md").read_text(), re.M)
    titles = {name: f"{number}: {title}" for number, name, title in listed}
    assert len(titles) == len(listed)
    assert {n: t.lower() for n, t in titles.items()} == {n: h.lower() for n, h in headings.items()}
