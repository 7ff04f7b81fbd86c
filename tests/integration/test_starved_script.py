"""`scripts/starved`: a run too short to tell anything but that it works."""

import json

import pytest
from starved import run as starved
from starved import ways as starved_ways
from starved.ways import Saves

from kvstore import MissReason
from kvstore.index.memory import MemoryIndex

WAYS = ("scheduler", "index", "client", "read", "save", "clear")


@pytest.fixture(autouse=True)
def no_url(monkeypatch):
    monkeypatch.delenv("KVSTORE_URL", raising=False)


def test_it_counts_every_lookup_and_its_exit_status_says_what_it_found(capsys):
    status = starved.main(["--lookups", "3", "--busy-per-core", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["busy_processes"] == report["cores"]
    assert [report[way]["count"] for way in WAYS] == [3] * len(WAYS)
    assert (status == 0) is report["passed"]
    assert report["scheduler"]["missed"] == 0


def test_a_block_that_is_not_there_is_counted_as_missed_with_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(starved, "PROMPTS", 1)
    save = starved.save

    def save_another(config, client):
        monkeypatch.setattr(starved, "prompt", lambda number: [7] * len(prompt(0)))
        save(config, client)
        monkeypatch.setattr(starved, "prompt", prompt)

    prompt = starved.prompt
    monkeypatch.setattr(starved, "save", save_another)
    assert starved.main(["--lookups", "2", "--busy-per-core", "0"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not report["passed"]
    assert report["save"]["missed"] == 0
    assert report["read"]["reasons"] == {MissReason.ABSENT: 2}
    for way in ("scheduler", "index", "client"):
        reasons = report[way]["reasons"]
        # The node is asked for more than "absent"; it may be too late to answer.
        assert sum(reasons.values()) == 2
        assert set(reasons) <= {MissReason.ABSENT, MissReason.NEVER_STORED}


@pytest.mark.parametrize("wrong", [["--lookups", "0"], ["--busy-per-core", "-1"]])
def test_numbers_that_try_nothing_are_refused(wrong):
    with pytest.raises(SystemExit):
        starved.main(wrong)


def test_a_save_that_is_not_published_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(starved_ways, "PUBLISHED_WITHIN_S", 0.0)
    monkeypatch.setattr(starved, "Saves", lambda *sessions: Saves(*sessions[:2], MemoryIndex()))
    assert starved.main(["--lookups", "1", "--busy-per-core", "0"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["unpublished"] == starved_ways.SAVED_BLOCKS
