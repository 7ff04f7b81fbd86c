"""Whether cuda-python and torch are for the same CUDA, without importing either."""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from kvstore.cuda import bindings
from kvstore.cuda.versions import install_command, misfit, torch_cuda
from kvstore.errors import DeviceError


@pytest.fixture
def bindings_are(monkeypatch):
    def are(version):
        def installed(name):
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", installed)

    return are


@pytest.mark.parametrize(
    ("version", "cuda", "fits"),
    [
        ("13.5.0", "13.0", True),
        ("12.9.1", "12.4", True),
        ("13.5.0", "12.8", False),
        ("12.9.1", "13.0", False),
        ("13.5.0", None, True),
        (None, "12.8", True),
    ],
)
def test_major_versions_must_be_the_same(bindings_are, version, cuda, fits):
    bindings_are(version)
    why = misfit(cuda)
    assert (why == "") is fits
    if why:
        assert version in why
        assert f"for CUDA {cuda}" in why
        assert f"pip install 'cuda-python=={cuda[:2]}.*'" in why


def test_torch_is_asked_only_where_it_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda() is None
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=None)))
    assert torch_cuda() is None, "one for CPUs"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    assert torch_cuda() == "12.8"
    assert install_command(torch_cuda()) == "pip install 'cuda-python==12.*'"
    assert install_command() == "pip install cuda-python"


def test_a_device_that_is_opened_says_once_that_they_do_not_fit(monkeypatch, bindings_are, caplog):
    bindings_are("13.5.0")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    monkeypatch.setattr(bindings, "_devices", {})
    monkeypatch.setattr(bindings, "import_module", lambda name: None)
    monkeypatch.setattr(bindings, "_open", lambda ordinal, driver: object())
    assert bindings.open_device(0) is bindings.open_device(0)
    (record,) = caplog.records
    assert "cuda-python==12.*" in record.getMessage()


def test_without_bindings_those_of_torchs_cuda_are_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(bindings, "import_module", missing)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    with pytest.raises(DeviceError, match=r"cuda-python==12\.\*"):
        bindings.open_device(0)
