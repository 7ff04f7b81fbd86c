"""Sets of keys, compiled (compiled/key_set.c) and of Python's, are sets, and tell leading keys."""

from __future__ import annotations

import gc
import platform
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_readers import compiled_module
from each_input import each

from kvstore.compiled import key_set, part
from kvstore.compiled.key_set import (
    KEY_BYTES,
    LOOKED_AT_ONCE,
    SECRET_BYTES,
    SOURCE,
    KeySet,
    PythonKeySet,
    count_keys,
    maker,
    split_keys,
)
from kvstore.errors import UsageError

WORD = 8
SECRETS = {
    "drawn": random.Random(1).randbytes(SECRET_BYTES),
    "all keys at one place": bytes(SECRET_BYTES),
    "all keys at the last place": bytes(WORD) + b"\xff" * WORD + bytes(SECRET_BYTES - 2 * WORD),
    "by the head that a run shares": bytes(3 * WORD) + b"\x01" + bytes(SECRET_BYTES - 3 * WORD - 1),
    "by the last bytes": bytes(SECRET_BYTES - WORD) + b"\x01" + bytes(WORD - 1),
}
"""Of the hash. Only who chooses it can choose places: for tests they are."""
ZEROS = bytes(KEY_BYTES)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_module(SOURCE, tmp_path_factory.mktemp("built"))


@pytest.fixture(params=["Python", *SECRETS])
def empty(request: pytest.FixtureRequest) -> Callable[[], KeySet]:
    """What makes an empty set."""
    if request.param == "Python":
        return PythonKeySet
    module = request.getfixturevalue("compiled")
    return lambda: module.KeySet(SECRETS[request.param])  # type: ignore[no-any-return]


def drawn(count: int, seed: int = 0) -> list[bytes]:
    """Keys of which some share heads, some tails, some all but a bit, and one has no bit."""
    rng = random.Random(seed)
    keys = {ZEROS}
    while len(keys) < count:
        one = rng.choice([*keys][-9:]) if rng.random() < 0.7 else rng.randbytes(KEY_BYTES)
        cut = rng.choice([0, 8, 16, 24, 31])
        kind = rng.randrange(3)
        if kind == 0:
            one = one[:cut] + rng.randbytes(KEY_BYTES - cut)
        elif kind == 1:
            one = rng.randbytes(KEY_BYTES - cut) + one[KEY_BYTES - cut :]
        else:
            bit = rng.randrange(KEY_BYTES * 8)
            one = (int.from_bytes(one, "big") ^ 1 << bit).to_bytes(KEY_BYTES, "big")
        keys.add(one)
    return rng.sample(sorted(keys), count)


def same(held: KeySet, model: set[bytes], others: list[bytes]) -> None:
    listed = held.tolist()
    assert len(held) == len(listed) == len(model)
    assert set(listed) == model
    assert all((key in held) == (key in model) for key in others)


def run_of(model: set[bytes], keys: list[bytes], start: int) -> int:
    end = start
    while end < len(keys) and keys[end] in model:
        end += 1
    return end - start


@each("seed", range(3))
def test_it_is_a_set_whatever_comes_and_goes(empty: Callable[[], KeySet], seed: int) -> None:
    rng, keys = random.Random(seed), drawn(400, seed)
    held, model = empty(), set[bytes]()
    for step in range(150):
        some = rng.sample(keys, rng.choice([0, 1, 2, 7, 60]))
        if rng.random() < 0.02:
            held.clear()
            model.clear()
        elif rng.random() < (0.55 if step % 50 < 35 else 0.2):
            some += some[:3]  # twice in one call
            held.update(some)
            model.update(some)
        else:
            held.difference_update(iter(some))
            model.difference_update(some)
        same(held, model, keys)
        wanted = [*rng.sample(sorted(model), len(model) // 2), *rng.sample(keys, 5)]
        for start in (0, 1, len(wanted) // 2, len(wanted), len(wanted) + 9):
            expected = run_of(model, wanted, start)
            assert held.leading(wanted, start) == expected
            assert held.leading(tuple(wanted), start) == expected
            assert held.leading(b"".join(wanted), start) == expected


@each("first_missing", [*range(40), 63, 64, 65, 127, 128, 129, 199])
def test_the_run_ends_at_the_first_that_is_missing(
    empty: Callable[[], KeySet], first_missing: int
) -> None:
    keys, held = drawn(200), empty()
    held.update(key for at, key in enumerate(keys) if at != first_missing)
    for start in range(0, 200, 7):
        expected = first_missing - start if start <= first_missing else 200 - start
        assert held.leading(keys, start) == expected
        assert held.leading(b"".join(keys), start) == expected
    assert held.leading(b"", 0) == held.leading([], 0) == 0
    assert empty().leading(keys, 0) == 0


def test_it_grows_and_is_emptied_one_by_one(compiled: Any) -> None:
    """With the hash as it is used: what is removed leaves nothing behind that look-ups pass by."""
    keys = random.Random(2).sample(drawn(20_000), 20_000)
    held: KeySet = compiled.KeySet(SECRETS["drawn"])
    for at, key in enumerate(keys):
        held.update([key])
        assert len(held) == at + 1
    same(held, set(keys), keys)
    for at, key in enumerate(keys[:-1]):
        held.difference_update([key])
        assert key not in held
        assert held.leading(keys[at + 1 : at + 40], 0) == len(keys[at + 1 : at + 40])
    same(held, {keys[-1]}, keys)


@each(
    ("wrong", "error"),
    [
        (b"", ValueError),
        (b"k" * 31, ValueError),
        (b"k" * 33, ValueError),
        ("k" * 32, TypeError),
        (bytearray(32), TypeError),
        (7, TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_key_is_an_error_and_changes_nothing(
    empty: Callable[[], KeySet], wrong: Any, error: type[Exception]
) -> None:
    keys, held = drawn(50), empty()
    held.update(keys[:40])
    for call in (held.update, held.difference_update):
        with pytest.raises(error):
            call([*keys[35:45], wrong, *keys[:5]])
    for some in ([wrong], [*keys[:5], wrong, *keys[45:]]):
        with pytest.raises(error):
            held.leading(some, 0)
    with pytest.raises(error):
        wrong in held  # noqa: B015
    same(held, set(keys[:40]), keys)


def test_what_is_no_sequence_of_keys_is_an_error(empty: Callable[[], KeySet]) -> None:
    held: Any = empty()
    for call in (held.update, held.difference_update):
        with pytest.raises(TypeError):
            call(7)
    with pytest.raises(TypeError):
        held.leading(7, 0)
    for part_of_one in (b"k", b"k" * 31, b"k" * 33):
        with pytest.raises(ValueError, match="32 bytes each"):
            held.leading(part_of_one, 0)
    with pytest.raises(ValueError, match="number 0"):
        held.leading([], -1)

    def failing() -> Any:
        yield ZEROS
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        held.update(failing())
    assert len(held) == 0


def test_a_subclass_of_bytes_is_a_key(empty: Callable[[], KeySet]) -> None:
    class Raw(bytes):
        pass

    held = empty()
    held.update([Raw(b"k" * 32)])
    assert held.leading([b"k" * 32, Raw(b"k" * 32)], 0) == 2


def test_compiled_a_secret_has_its_length_and_nothing_else_is_taken(compiled: Any) -> None:
    for secret in (b"", bytes(SECRET_BYTES - 1), bytes(SECRET_BYTES + 1)):
        with pytest.raises(ValueError, match="a secret has"):
            compiled.KeySet(secret)
    for wrong in ((), ("text",), (7,)):
        with pytest.raises(TypeError):
            compiled.KeySet(*wrong)


def test_compiled_all_of_a_key_and_of_the_secret_decides_its_place(
    compiled: Any,
) -> None:
    """The order of the list is that of the places."""

    def order(secret: bytes, keys: list[bytes]) -> list[bytes]:
        held: KeySet = compiled.KeySet(secret)
        held.update(keys)
        return held.tolist()

    keys = drawn(40)
    before = order(SECRETS["drawn"], keys)
    for at in range(WORD, SECRET_BYTES, WORD):  # the first word decides no more than a carry
        secret = bytearray(SECRETS["drawn"])
        secret[at : at + WORD] = bytes(byte ^ 0x55 for byte in secret[at : at + WORD])
        assert order(bytes(secret), keys) != before, f"word {at // WORD} says nothing"
    for at in range(KEY_BYTES):
        few = [bytes(at) + bytes([n]) + bytes(KEY_BYTES - at - 1) for n in range(1, 41)]
        assert order(SECRETS["drawn"], few) != sorted(few), f"byte {at} says nothing"


def test_compiled_no_key_is_lost_where_there_is_no_memory(compiled: Any) -> None:
    code = f"""
import importlib.util, resource
spec = importlib.util.spec_from_file_location("_key_set", {compiled.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
keys = [n.to_bytes(32, "big") for n in range(1 << 17)]
more = keys * 64  # a table for so many would have half a GiB
held = module.KeySet(bytes(range(80)))
held.update(keys[:-1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    held.update(more)
    print("no limit")  # where the processor is emulated
except MemoryError:
    print(len(held), held.leading(keys, 0))
held.difference_update(keys[:5])
held.update(keys)
print(len(held), held.leading(b"".join(keys), 0))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if "no limit" in ran.stdout and platform.machine() == "aarch64":
        pytest.skip("the limit of this process's memory is not kept")
    assert (ran.stdout, ran.stderr) == ("131071 131071\n131072 131072\n", "")


def test_compiled_its_memory_is_given_back(compiled: Any) -> None:
    """Of sets that are cleared and of those that end; and no error keeps what it was given."""
    keys = drawn(1000)

    def use() -> None:
        held = compiled.KeySet(SECRETS["drawn"])
        held.update(keys * 30)
        held.clear()
        for times in (1, 4, 30):
            held.update(keys * times)
            held.tolist()
        for wrong in ([*keys, 7], 7, b"k"):
            with pytest.raises((TypeError, ValueError)):
                held.leading(wrong, 0)

    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def references() -> tuple[int, int]:
        gc.collect()  # what was raised holds on to what it was raised for
        return sys.getrefcount(keys[0]), sys.getrefcount(compiled.KeySet)

    for _ in range(5):
        use()
    before = resident(), references()
    for _ in range(100):
        use()
    assert references() == before[1]
    assert resident() - before[0] < 10_000, "KiB, where each use takes thousands"


def test_one_thread_changes_it_while_others_look(empty: Callable[[], KeySet]) -> None:
    """As a listener does: what stays is found at each look, whatever moves beside it."""
    keys = drawn(600)
    stays, comes = keys[:300], keys[300:]
    held = empty()
    held.update(stays)
    ending = threading.Event()

    def change() -> None:
        while not ending.is_set():
            for at in range(0, 300, 30):
                held.update(comes[at : at + 60])
                held.difference_update(comes[at : at + 45])

    changer = threading.Thread(target=change)
    changer.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        raw = b"".join(stays)
        for _ in range(200):
            assert held.leading(raw, 0) == held.leading(stays, 0) == 300
            assert {*held.tolist()} >= {*stays}
            assert 7 <= held.leading([*stays[:7], *comes[:60]], 0) <= 67
    finally:
        sys.setswitchinterval(before)
        ending.set()
        changer.join()


def test_keys_are_counted_and_split_as_bytes_and_as_objects() -> None:
    keys = drawn(5)
    assert split_keys(b"".join(keys)) == keys
    assert split_keys(keys) is keys
    assert count_keys(keys) == count_keys(b"".join(keys)) == 5
    for wrong in (b"k", b"k" * 33):
        with pytest.raises(UsageError, match="keys="):
            count_keys(wrong)
        with pytest.raises(UsageError, match="keys="):
            split_keys(wrong)


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets: list[bytes] = []
    fits: Any = SimpleNamespace(SOURCE_CRC32=0, KeySet=secrets.append)
    monkeypatch.setitem(sys.modules, "built", fits)
    monkeypatch.setattr(key_set, "SOURCE", Path("not installed.c"))
    for wanted in (None, "yes"):
        maker(wanted, "built")()
    assert {*map(len, secrets)} == {SECRET_BYTES}
    assert secrets[0] != secrets[1], "each set has its own"
    assert maker("no", "built") is maker(None, "not_there") is PythonKeySet
    with pytest.raises(ImportError):
        maker("yes", "not_there")
    monkeypatch.setattr(key_set, "SOURCE", Path(part.__file__))
    assert maker(None, "built") is PythonKeySet, "it is of another source"


assert LOOKED_AT_ONCE < 200, "or no run is longer than one look"
