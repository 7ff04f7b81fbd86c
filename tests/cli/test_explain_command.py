"""`kvstore explain`: its words, its JSON, and what it refuses."""

import json

import pytest
from each_input import each
from places import Place

from kvstore import Client, Namespace
from kvstore.cli.store import LIMITS

TOKENS = list(range(64))
FIELDS = {"model": "m", "dtype": "bfloat16"}


def client_of(store: Place, **options: object) -> Client:
    url = f"unix://{store.run_dir}/redis/redis.sock"
    return Client(url, run_dir=store.run_dir, limits=LIMITS, block_tokens=16, **options)


def explain(store: Place, *args: str, stdin: str = "") -> str:
    ran = store.here("explain", *args, stdin=stdin.encode())
    assert (ran.returncode, ran.stderr) == (0, b"")
    return ran.stdout.decode()


def test_a_prompt_that_is_there_in_part_is_explained_on_one_line(store: Place) -> None:
    with client_of(store) as client:
        assert all(client.put_blocks(TOKENS, [b"x" * 100] * 2))
    path = store.run_dir / "tokens"
    path.write_text(" ".join(map(str, TOKENS)))
    line = explain(store, "--tokens", str(path), "--block-tokens", "16")
    assert line.startswith("32 of 64 tokens hit; block 2: never-stored: never stored at node-0 ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("text", [json.dumps(TOKENS), "\n".join(map(str, TOKENS)), "0,1, 2 ,3"])
def test_tokens_come_as_json_or_as_words(store: Place, text: str) -> None:
    found = explain(store, "--tokens", "-", "--block-tokens", "1", "--json", stdin=text)
    assert json.loads(found)["possible_tokens"] in (4, 64)


def test_the_field_that_differs_is_named(store: Place) -> None:
    with client_of(store, namespace=Namespace({**FIELDS, "dtype": "float16"})) as client:
        assert all(client.put_blocks(TOKENS, [b"x" * 100] * 4))
    args = ("--tokens", "-", "--block-tokens", "16", "--namespace-fields", json.dumps(FIELDS))
    found = json.loads(explain(store, *args, "--json", stdin=json.dumps(TOKENS)))
    missing = found["first_missing"]
    assert (found["possible_tokens"], found["hit_tokens"]) == (64, 0)
    assert (missing["reason"], missing["node"]) == ("different-fingerprint", "node-0")
    assert missing["differing_fields"] == {"dtype": {"asked": "bfloat16", "there": "float16"}}
    line = explain(store, *args, stdin=json.dumps(TOKENS))
    assert "dtype: 'bfloat16' asked, 'float16' there" in line


def test_a_plain_value_is_explained_by_its_key(store: Place) -> None:
    assert store.here("put", "value", stdin=b"1").returncode == 0
    assert explain(store, "--key", "value") == "value: hit\n"
    assert explain(store, "--key", "nothing").startswith("nothing: never-stored: ")
    line = explain(store, "--key", "value", "--namespace", "mine")
    assert line.startswith("value: different-fingerprint: ")
    found = json.loads(explain(store, "--key", "value", "--namespace", "mine", "--json"))
    assert (found["key"], found["hit"]) == ("value", False)
    assert found["missing"]["differing_fields"] == {"name": {"asked": "mine", "there": "default"}}
    assert json.loads(explain(store, "--key", "value", "--json")) == {
        "key": "value",
        "hit": True,
        "on_disk": False,
        "missing": None,
    }


@each(
    ("args", "stdin", "said"),
    [
        (["--tokens", "-"], "one two", "tokens='-': must be numbers"),
        (["--tokens", "-"], "[1, [2]]", "tokens='-': must be numbers"),
        (["--tokens", "-"], "[" * 5000, "tokens='-': must be numbers"),
        (["--tokens", "-"], "4294967296 " * 256, "tokens="),
        (["--tokens", "/nonexistent"], "", "tokens='/nonexistent': cannot be read"),
        (["--key", "k", "--namespace-fields", "[1]"], "", "namespace-fields='[1]'"),
        (["--key", ""], "", "key=''"),
    ],
)
def test_wrong_input_is_refused_by_its_name(
    store: Place, args: list[str], stdin: str, said: str
) -> None:
    ran = store.here("explain", *args, stdin=stdin.encode())
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith(f"kvstore: {said}")


def test_without_a_store_it_says_how_to_start_one(place: Place) -> None:
    ran = place.kv("explain", "--key", "k")
    assert ran.returncode == 1
    assert b"no store runs here" in ran.stderr


def test_a_redis_that_is_away_is_the_reason(place: Place) -> None:
    ran = place.kv("explain", "--key", "k", "--url", "redis://127.0.0.1:1")
    assert ran.returncode == 0
    assert ran.stdout.startswith(b"k: index-error: ")
