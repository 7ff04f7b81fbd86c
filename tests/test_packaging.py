"""What users install: a small core without engines or numerics, typed, with its entry points."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("kvstore", "connector")
CORE_BYTES_MAX = 20_000_000

BLOCKED_IMPORT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "vllm"}:
            raise ImportError(f"{name} is not part of the core install")

sys.meta_path.insert(0, Blocker())
import kvstore, kvstore.cli, kvstore.client, kvstore.node, connector, connector.adapters
"""


def test_core_imports_without_torch_numpy_and_vllm() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=REPOSITORY,
        check=True,
        timeout=60,
    )
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_is_typed_and_licensed(wheel_names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    assert "connector/cuda/paged_copy.cu" in wheel_names, "compiled where it is used"


def test_wheel_holds_every_module_and_nothing_else(wheel_names: set[str]) -> None:
    packaged = {name for name in wheel_names if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in packaged} == set(PACKAGES)
    sources = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert sources == {name for name in packaged if name.endswith(".py")}


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("console_scripts", "kvstore.cli:main"),
        ("vllm.general_plugins", "connector.adapters:register_vllm"),
    ],
)
def test_entry_point_loads(group: str, target: str) -> None:
    (declared,) = (e for e in entry_points(group=group) if e.name == "kvstore")
    assert declared.value == target
    assert callable(declared.load())


def core_distributions() -> dict[str, Distribution]:
    """Everything that `pip install kvstore` brings, ourselves left out."""
    found: dict[str, Distribution] = {}
    wanted = list(distribution("kvstore").requires or ())
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in found:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name] = distribution(requirement.name)
            wanted += found[requirement.name].requires or ()
    return found


def size_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files if path.is_file())


def test_core_install_is_small() -> None:
    sizes = {
        name: size_of(Path(str(file.locate())) for file in found.files or ())
        for name, found in core_distributions().items()
    }
    assert {"redis", "hiredis", "msgpack", "tenacity", "xxhash"} <= set(sizes)
    assert all(sizes.values()), f"not measured: {sizes}"
    sizes |= {package: size_of((REPOSITORY / package).rglob("*.py")) for package in PACKAGES}
    assert sum(sizes.values()) < CORE_BYTES_MAX, sizes
