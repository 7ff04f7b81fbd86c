"""An LMCache of another version: its interface is compared at import, and what does not fit is
refused by name. Stand-ins for LMCache's classes; the adapters over the real ones run in
scripts/test-engines, with each version that they were tested with."""

from __future__ import annotations

import logging
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
from each_input import each

from connector.adapters.lmcache import interface
from connector.adapters.lmcache.interface import TESTED, check_interface, names_of_lmcache
from kvstore import UsageError


class Base(ABC):
    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes

    @abstractmethod
    def load(self, keys: list[int]) -> None: ...

    def report(self, keys: list[int], sizes: list[int]) -> None:
        self.size_bytes += sum(sizes)


class Adapter(Base):
    def load(self, keys: list[int]) -> None: ...


CALLS = {"__init__": ("self", "size_bytes"), "report": ("self", "keys", "sizes")}


@pytest.fixture(autouse=True)
def never_warned() -> None:
    interface._warn_unless_tested.cache_clear()


@pytest.fixture
def of_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda found: monkeypatch.setattr(interface, "installed", lambda: found)


@pytest.mark.parametrize("found", TESTED)
def test_a_tested_version_that_fits_is_silent(
    found: str, of_version: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of_version(found)
    check_interface(Adapter, Base, CALLS)
    assert not caplog.records


def test_an_unknown_version_that_fits_is_warned_of_once(
    of_version: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of_version("0.6.0")
    for _ in range(2):
        check_interface(Adapter, Base, CALLS)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(one in record.getMessage() for one in ("0.6.0", *TESTED))


def changed(**methods: Any) -> tuple[type, type]:
    base = type("Base", (Base,), methods)
    return type("Adapter", (base,), {"load": Adapter.load}), base


def new_argument(self: Any, keys: list[int], layout: object) -> None: ...


def renamed_argument(self: Any, names: list[int]) -> None: ...


def required_keyword(self: Any, keys: list[int], *, layout: object) -> None: ...


@each("found", ["0.6.0", TESTED[-1]])
@each(
    ("methods", "named"),
    [
        ({"tags": abstractmethod(lambda self: None)}, "tags"),
        ({"load": abstractmethod(new_argument)}, "load"),
        ({"load": renamed_argument}, "load"),
        ({"load": required_keyword}, "load"),
        ({"report": new_argument}, "report"),
        ({"report": None}, "report"),
        ({"__init__": lambda self: None}, "__init__"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_versions_named(
    found: str, methods: dict[str, Any], named: str, of_version: Any
) -> None:
    of_version(found)
    with pytest.raises(UsageError) as refused:
        check_interface(*changed(**methods), CALLS)
    assert all(one in str(refused.value) for one in (found, *TESTED, named))


def test_a_name_that_moved_is_refused_with_both_versions_named(
    of_version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_version("0.6.0")
    package = types.ModuleType("lmcache")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "lmcache", package)
    monkeypatch.delitem(sys.modules, "lmcache.gone", raising=False)
    for line in ("from lmcache import Gone", "import lmcache.gone"):
        with (
            pytest.raises(UsageError, match=r"0\.6\.0.*(Gone|gone)") as refused,
            names_of_lmcache(),
        ):
            exec(line)
        assert all(one in str(refused.value) for one in TESTED)


def test_what_is_not_installed_is_not_called_a_wrong_version(of_version: Any) -> None:
    of_version("0.6.0")
    with pytest.raises(ModuleNotFoundError), names_of_lmcache():
        exec("import no_such_package_of_anybody")


def test_without_lmcache_the_import_says_so(of_version: Any) -> None:
    of_version(None)
    with pytest.raises(ModuleNotFoundError), names_of_lmcache():
        raise ModuleNotFoundError("No module named 'lmcache'", name="lmcache")


@pytest.mark.lmcache
def test_the_lmcache_that_is_installed_fits() -> None:
    from connector.adapters.lmcache import KVStoreConnectorAdapter, KVStoreL2Adapter

    assert not KVStoreL2Adapter.__abstractmethods__
    assert not KVStoreConnectorAdapter.__abstractmethods__
    assert interface.installed() in TESTED
