"""The pages, and the docstrings of modules, name only files that exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from each_input import each

from kvstore.transport.stream.address import STREAM_PORT

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    if page.name != "CHANGELOG.md" and page.parent.name != "decisions"
)
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[01]*.md"))
RECORD_WORDS_MAX = 400
"""Of prose: tables of what was tried do not count."""
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


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def test_each_of_the_34_questions_has_one_file() -> None:
    rows = [line for line in (ROOT / "docs/where.md").read_text().splitlines() if "? |" in line]
    answers = [row.split("|")[2].strip() for row in rows]
    assert len(answers) == len(set(answers)) == 34
    assert all(re.fullmatch(r"`(kvstore|connector)/[\w/]+\.py`", answer) for answer in answers)


def test_the_readme_is_short_and_every_claim_names_its_command() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
    rows = re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / "docs/claims.md").read_text(), re.M)[2:]
    assert len(rows) > 20
    for claim, command in rows:
        scripts = re.findall(r"`(scripts/[\w-]+)((?: [\w/.-]+)*)`?", command)
        assert scripts, claim
        for script, words in scripts:
            files = [word for word in words.split() if word.startswith("tests/")]
            assert all((ROOT / name).exists() for name in (script, *files)), command


def prose_words(record: str) -> int:
    return sum(len(line.split()) for line in record.splitlines() if not line.startswith("|"))


def test_no_decision_record_is_longer_than_a_page() -> None:
    words = {record.name: prose_words(record.read_text()) for record in RECORDS}
    assert RECORDS
    assert {name: n for name, n in words.items() if n > RECORD_WORDS_MAX} == {}


def test_the_words_of_tables_do_not_count() -> None:
    assert prose_words("# 0001: Title\n\nTwo words.\n\n| a | b |\n|---|---|\n| c | d |\n") == 5


def test_every_decision_record_names_files_that_exist(files: frozenset[str]) -> None:
    wrong = {
        record.name: lost
        for record in RECORDS
        if (lost := missing(record.read_text(), record.parent, files, prose=True))
    }
    assert wrong == {}


def test_every_decision_stands_once_in_the_index_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    headings = {page.name: page.read_text().splitlines()[0].removeprefix("# ") for page in RECORDS}
    listed = re.findall(r"^- \[(\d+)\]\((.+)\) (.+)$", (folder / "README.md").read_text(), re.M)
    titles = {name: f"{number}: {title}" for number, name, title in listed}
    assert len(titles) == len(listed)
    assert {n: t.lower() for n, t in titles.items()} == {n: h.lower() for n, h in headings.items()}


def test_nodes_listen_at_one_port_wherever_one_is_named() -> None:
    """A second node of one host takes the next."""
    shipped = [*PAGES, *(ROOT / "deploy").rglob("*.*"), *(ROOT / "examples").glob("*.py")]
    shipped.append(ROOT / "docker-compose.yml")
    named = {
        (str(path.relative_to(ROOT)), int(port))
        for path in shipped
        for port in re.findall(r"""listen["']?(?: = |=| )["']?[^\s"']*:(\d+)""", path.read_text())
    }
    assert {path for path, _ in named} >= {"docs/systemd.md", "docker-compose.yml", "docs/rdma.md"}
    assert {port for _, port in named} <= {STREAM_PORT, STREAM_PORT + 1}, named
