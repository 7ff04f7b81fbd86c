"""What callers write and what they get back: names, truth, types; of both clients alike."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from each_input import each

import kvstore
from kvstore import (
    AsyncClient,
    Client,
    Explanation,
    MissReason,
    Retained,
    StreamSecurity,
    UsageError,
)
from kvstore.limits import PROMPT_TOKENS_MAX
from kvstore.spi import BlockSession, Locator, Residency

if TYPE_CHECKING:
    from stores import NodeProcess

SECRET = "correct horse battery staple"


def public(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(member)
    }


def test_both_clients_have_the_same_calls_with_the_same_arguments_and_answers() -> None:
    sync, other = public(Client), public(AsyncClient)
    assert sync == other
    assert list(inspect.signature(Client).parameters) == (
        list(inspect.signature(AsyncClient).parameters)
    )


# --- retain ---------------------------------------------------------------------------


def test_what_is_retained_is_true_and_everything_else_false() -> None:
    assert [one for one in Retained if one] == [Retained.YES]
    for one in Retained:
        assert f"{one}" == str(one) == f"{one:s}" == one.name
        assert f"{one:>15}" == one.name.rjust(15)
    assert [int(one) for one in Retained] == list(range(len(Retained))), "part of the protocol"


def test_a_value_is_retained_for_a_time(client: Client) -> None:
    client.put("k", b"v")
    assert client.retain("k", for_s=60)
    assert not client.retain("absent", for_s=60)
    assert str(client.retain("k", 60)) == "YES"
    assert client.retain_blocks(list(range(256)), for_s=60) == [Retained.ABSENT]
    with pytest.raises(UsageError, match=r"^for_s=-1"):
        client.retain("k", for_s=-1)


# --- get ------------------------------------------------------------------------------


def test_a_default_is_never_taken_for_out(client: Client) -> None:
    client.put("k", b"v")
    buffer = bytearray(b"not touched")
    for call in (
        lambda: client.get("k", buffer),  # type: ignore[call-overload]
        lambda: client.get("absent", None),  # type: ignore[call-overload]
        lambda: client.get_many(["k"], [buffer]),  # type: ignore[call-overload]
    ):
        with pytest.raises(TypeError, match="positional"):
            call()
    assert buffer == b"not touched"
    assert bytes(client.get("k", out=buffer) or b"") == b"v"


# --- pin ------------------------------------------------------------------------------


def test_a_pin_is_true_and_that_of_a_miss_false_and_none_in_its_with(client: Client) -> None:
    client.put("k", b"v")
    client.put("empty", b"")
    with client.pin("k") as pinned:
        assert pinned
        assert bytes(pinned.buffer) == b"v"
    assert client.pin("empty"), "whatever its length"
    missed = client.pin("absent")
    assert not missed
    with missed as nothing:
        assert nothing is None
    missed.close()
    missed.close()


def test_an_async_pin_is_the_same(node: NodeProcess) -> None:
    async def pins() -> None:
        async with AsyncClient(**node.client_options) as c:
            await c.put("k", b"v")
            with await c.pin("k") as pinned:
                assert pinned
            with await c.pin("absent") as nothing:
                assert nothing is None

    asyncio.run(pins())


# --- delete ---------------------------------------------------------------------------


def test_many_are_deleted_at_once(client: Client) -> None:
    client.put_many({"a": b"1", "b": b"2"})
    assert client.delete_many(["a", "absent", "b"]) == [True, False, True]
    assert client.get_many(["a", "b"]) == [None, None]
    assert client.delete_many([]) == []
    with pytest.raises(UsageError, match=r"^keys="):
        client.delete_many("ab")
    with pytest.raises(UsageError, match=r"^key="):
        client.delete_many([5])  # type: ignore[list-item]


# --- explain --------------------------------------------------------------------------


def test_values_and_blocks_are_explained_alike(client: Client) -> None:
    tokens = list(range(256))
    told = [client.explain(tokens), client.explain_key("k"), client.explain_key(b"\xff")]
    assert {type(one) for one in told} == {Explanation}
    assert {one.reason for one in told} == {MissReason.NEVER_STORED}
    assert str(told[1]).startswith("k: never-stored: never stored at")
    assert str(told[2]).startswith("\\xff: never-stored: ")
    client.put_blocks(tokens, [b"block"])
    client.put("k", b"v")
    for one in (client.explain(tokens), client.explain_key("k")):
        assert one.first_missing is None
        assert one.reason is None
        assert one.as_dict()["first_missing"] is None
    assert str(client.explain_key("k")) == "k: hit"


# --- of one process -------------------------------------------------------------------


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_is_of_one_process_says_so_in_one_sentence(
    node: NodeProcess, copied: Callable[[object], object]
) -> None:
    options = node.client_options
    where = {name: options[name] for name in ("url", "key_prefix", "run_dir")}
    client = Client(**options)
    client.put("k", b"v")
    opened: list[Any] = [client, AsyncClient(**options), BlockSession(**where), Locator(**where)]
    opened.append(Residency([f"ipc://{node.run_dir}/nobody"]))
    with client.pin("k") as pinned:
        for one in (*opened, pinned):
            said = rf"^{type(one).__name__}=.* cannot be pickled or copied: make a new one there"
            with pytest.raises(UsageError, match=said):
                copied({"in": [one]} if copied is not copy.copy else one)
    assert client.get("k") == b"v"
    for one in opened:
        if not isinstance(one, AsyncClient):
            one.close()


# --- tokens ---------------------------------------------------------------------------


def test_more_tokens_than_any_prompt_has_are_refused_before_they_are_made(client: Client) -> None:
    numpy = pytest.importorskip("numpy")
    for tokens in (
        range(10**9),
        range(PROMPT_TOKENS_MAX + 1),
        range(10**30),
        numpy.broadcast_to(numpy.int64(1), 10**9),
    ):
        calls: list[Callable[[], object]] = [
            lambda t=tokens: client.match_prefix(t),
            lambda t=tokens: client.put_blocks(t, [b"block"]),
            lambda t=tokens: client.get_blocks(t, [bytearray(10)]),
            lambda t=tokens: client.retain_blocks(t, 60),
            lambda t=tokens: client.explain(t),
        ]
        for call in calls:
            with pytest.raises(UsageError, match=rf"^tokens=.* at most {PROMPT_TOKENS_MAX} int"):
                call()
    assert client.match_prefix(numpy.arange(512)).tokens == 0


# --- settings -------------------------------------------------------------------------


class Place:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("kind", [str, Path, Place])
def test_a_path_is_text_or_what_has_one(node: NodeProcess, kind: Callable[[Path], Any]) -> None:
    options = {**node.client_options, "run_dir": kind(node.run_dir)}
    with Client(**options) as client:
        assert client.put("k", b"v")
        assert client.session.run_dir == node.run_dir


@each("cls", [Client, AsyncClient, BlockSession])
@each(
    ("setting", "value"),
    [
        ("security", SECRET),
        ("security", SECRET.encode()),
        ("security", {"secret": SECRET}),
        ("signing_key", [SECRET]),
        ("salt", {"salt": SECRET}),
        ("url", f"redis://:{SECRET}\0@host".replace(" ", "")),
        ("url", f"redis://:{SECRET}@host".encode()),
        ("url", f"http://:{SECRET}@host".replace(" ", "")),
        ("url", f"redis://:{SECRET}@host:port".replace(" ", "")),
    ],
)
def test_no_message_repeats_a_secret(cls: type, setting: str, value: object) -> None:
    if setting == "salt" and cls is BlockSession:
        return

    def opens() -> None:
        opened = cls(**{setting: value})
        if isinstance(opened, AsyncClient):
            asyncio.run(opened.ping())

    with pytest.raises(UsageError) as refused:
        opens()
    said = repr(refused.value) + str(refused.value)
    assert SECRET not in said
    assert "horse" not in said
    assert refused.value.field == setting


@pytest.mark.parametrize("value", [SECRET, 5, {"secret": SECRET}])
def test_a_secret_that_is_no_bytes_is_refused_without_being_shown(value: Any) -> None:
    with pytest.raises(UsageError, match=f"^secret='{type(value).__name__}': must be bytes"):
        StreamSecurity(secret=value)


def test_what_a_miss_gives_is_public() -> None:
    assert isinstance(kvstore.NotPinned(), kvstore.NotPinned)
