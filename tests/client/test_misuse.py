"""Every parameter of every public call, with things it does not take; and calls after `close`."""

import asyncio
import contextlib
import inspect
from pathlib import Path

import pytest
from each_input import each

from kvstore import AsyncClient, Client, KVStoreError, Limits, Namespace, UsageError
from kvstore.spi import BlockSession

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


ODD = {
    "None": None,
    "True": True,
    "an integer": 5,
    "minus one": -1,
    "a googol": 10**400,
    "a float": 1.5,
    "NaN": float("nan"),
    "text": "x",
    "no text": "",
    "lone surrogate": "\ud800",
    "a byte that is no text": "\udcff",
    "a zero": "a\0b",
    "bytes": b"x",
    "no bytes": b"",
    "a bytearray": bytearray(8),
    "a released view": released(),
    "a list": [1, 2],
    "no list": [],
    "a list of None": [None],
    "a dict": {},
    "a dict of text": {"a": "b"},
    "a set": {1},
    "an object": object(),
    "a class": dict,
    "a generator": (i for i in ()),
    "floats": numpy.zeros(3),
    "two dimensions": numpy.zeros((2, 2), "i4"),
    "a scalar": numpy.array(3),
    "no dimension": torch.tensor(3),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a path": Path("/proc/none/place"),
    "an error": ValueError("x"),
}
GOOD = {
    "key": "k",
    "keys": ["k"],
    "value": b"v",
    "items": {"k": b"v"},
    "tokens": range(256),
    "blocks": [b"block"],
    "out": bytearray(100),
    "replace": False,
    "timeout_s": 1.0,
    "for_s": 60,
    "tenant": "a tenant",
}
OUTS = {"get_many": [bytearray(100)], "get_blocks": [bytearray(100)]}
SECRETS = ("signing_key", "salt")


def public(cls):
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_") and inspect.isfunction(member)
    ]


def parameters(call):
    return [name for name in inspect.signature(call).parameters if name != "self"]


def good(method):
    found = {name: GOOD[name] for name in parameters(getattr(Client, method))}
    return {**found, "out": OUTS[method]} if method in OUTS else found


CALLS = [
    (method, parameter)
    for method in public(Client)
    for parameter in parameters(getattr(Client, method))
]


@each(("method", "parameter"), CALLS)
def test_a_call_takes_an_argument_or_names_it_in_a_usage_error(client, method, parameter):
    client.put("k", b"v")
    refused = set()
    for name, odd in ODD.items():
        try:
            getattr(client, method)(**{**good(method), parameter: odd})
        except UsageError:
            refused.add(name)
        except Exception as e:
            pytest.fail(f"{method}({parameter}={name}): {type(e).__name__}: {e}")
    assert refused


@each("parameter", parameters(Client.__init__))
def test_a_client_takes_a_setting_or_names_it_in_a_usage_error(
    node, parameter, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for name, odd in ODD.items():
        try:
            Client(**{**node.client_options, parameter: odd}).close()
        except UsageError as e:
            shown = str(e)
            assert parameter in shown or parameter in SECRETS or parameter == "url", shown
        except KVStoreError:
            assert parameter == "url"
        except Exception as e:
            pytest.fail(f"{parameter}={name}: {type(e).__name__}: {e}")


@pytest.mark.parametrize("parameter", ["namespace", "block_tokens", "limits", "node_size_bytes"])
def test_settings_of_the_wrong_type_are_refused(node, parameter):
    wrong = {"namespace": 5, "block_tokens": "x", "limits": {}, "node_size_bytes": 1.5}
    with pytest.raises(UsageError, match=f"^{parameter}="):
        Client(**{**node.client_options, parameter: wrong[parameter]})


# `device`, `sees_vram` and `machine` are objects of the engine and of tests, no settings of a user.
@each(
    "parameter",
    [p for p in parameters(BlockSession.__init__) if p not in ("device", "sees_vram", "machine")],
)
def test_a_session_takes_a_setting_or_names_it_in_a_usage_error(
    node, parameter, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for name, odd in ODD.items():
        try:
            BlockSession(**{**node.client_options, parameter: odd}).close()
        except KVStoreError:
            pass
        except Exception as e:
            pytest.fail(f"{parameter}={name}: {type(e).__name__}: {e}")


@each("name", parameters(Limits))
@each("odd", [None, True, "x", -1, 0, float("nan"), float("inf"), [1]])
def test_a_limit_takes_positive_numbers_alone(name, odd):
    with pytest.raises(UsageError, match=rf"^limits\.{name}="):
        Limits(**{name: odd})


@each("name", [name for name in ODD if not name.startswith("a dict")])
def test_a_namespace_is_made_of_named_fields(name):
    with pytest.raises(UsageError, match=r"^namespace="):
        Namespace(ODD[name])
    with contextlib.suppress(UsageError):
        Namespace({"a": ODD[name]})
    with contextlib.suppress(UsageError):
        Namespace.named(ODD[name])


@pytest.mark.parametrize(
    "tokens", [b"abcd" * 100, numpy.full(300, 1.5), "x" * 300, {1: 2}, {1, 2}, torch.rand(300)]
)
def test_what_looks_like_tokens_and_is_none_gets_no_key(client, tokens):
    with pytest.raises(UsageError, match=r"^tokens="):
        client.match_prefix(tokens)


@pytest.mark.parametrize(
    "make", [list, tuple, numpy.array, torch.tensor, lambda t: memoryview(numpy.array(t))]
)
def test_tokens_are_the_same_in_every_container(client, make):
    client.put_blocks(range(512), [b"1", b"2"])
    assert client.match_prefix(make(list(range(512)))).blocks == 2


@each("method", [m for m in public(Client) if m != "close"])
def test_a_closed_client_says_so_at_every_call(node, method):
    client = Client(**node.client_options)
    client.put("k", b"v")
    client.close()
    for arguments in (good(method), {**good(method), "items": {}, "keys": []}):
        given = {name: arguments[name] for name in parameters(getattr(Client, method))}
        if not given.get("keys", ["k"]) and "out" in given:
            given["out"] = None
        with pytest.raises(UsageError, match=r"^client=.*closed"):
            getattr(client, method)(**given)
    with pytest.raises(UsageError, match="closed"), client:
        pass
    client.close()


def test_a_closed_async_client_says_so_at_every_call(node):
    async def talk():
        client = AsyncClient(**node.client_options)
        await client.put("k", b"v")
        await client.close()
        for method in public(AsyncClient):
            if method != "close":
                with pytest.raises(UsageError, match="closed"):
                    await getattr(client, method)(**good(method))
        await client.close()

    asyncio.run(talk())


def test_what_the_callers_own_pairs_raise_comes_through(client):
    def pairs():
        yield "k", b"v"
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        client.put_many(pairs())
