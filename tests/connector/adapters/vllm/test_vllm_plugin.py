"""vLLM's plug-in: it never raises, whatever vLLM and whatever packages it finds, and says why."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from each_input import each
from own_python import printed

from connector.adapters.vllm.plugin import MADE_FOR

ROOT = Path(__file__).parents[4]

FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
VLLMS = {
    "no vLLM at all": {},
    "nothing of today's in it": {"vllm/__init__.py": "__version__ = '0.5.0'"},
    "a factory of another name": {
        "vllm/__init__.py": "__version__ = '0.6.2'",
        FACTORY: "class ConnectorFactory: ...",
    },
    "no way to register": {
        "vllm/__init__.py": "__version__ = '0.7.0'",
        FACTORY: "class KVConnectorFactory: ...",
    },
    "another signature": {
        "vllm/__init__.py": "__version__ = '1.0.0'",
        FACTORY: """
            class KVConnectorFactory:
                @classmethod
                def register_connector(cls, name, *, loader): ...
            """,
    },
    "a refusal": {
        "vllm/__init__.py": "__version__ = '1.1.0'",
        FACTORY: """
            class KVConnectorFactory:
                @classmethod
                def register_connector(cls, *names):
                    raise RuntimeError("not\\nnow")
            """,
    },
    "a library that is missing": {
        "vllm/__init__.py": "__version__ = '0.32.0'",
        FACTORY: "import ctypes; ctypes.CDLL('libnone.so')",
    },
    "an import that ends the process": {
        "vllm/__init__.py": "__version__ = '0.32.0'",
        FACTORY: "raise NotImplementedError",
    },
    "no version": {"vllm/__init__.py": ""},
}

ENTRY = "from kvstore_vllm_plugin import register_vllm; register_vllm(); print('went on')"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents:
            if parent.name and not (folder / parent / "__init__.py").exists():
                (folder / parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """In an interpreter that has these folders alone and this Python's own library."""
    lines = [f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}", code]
    return subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(lines)],
        cwd=paths[0],
        capture_output=True,
        text=True,
        timeout=60,
    )


@each("kind", VLLMS)
def test_no_vllm_stops_it_and_one_line_says_what_it_was_made_for_and_found(
    tmp_path: Path, kind: str
) -> None:
    there = tmp_path / kind
    there.mkdir()
    write(there, VLLMS[kind])
    ran = run(ENTRY, there, ROOT)
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr
    (line,) = ran.stderr.splitlines()
    assert f"made for vLLM {MADE_FOR}, found " in line
    said = re.search("'(.*)'", VLLMS[kind].get("vllm/__init__.py", "'none'"))
    assert f"found {said[1] if said else 'one that does not say its version'} (" in line


def test_nothing_else_is_imported_into_engines_that_do_not_use_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            FACTORY: """
                class KVConnectorFactory:
                    _registry = {}
                    @classmethod
                    def register_connector(cls, name, module, attribute):
                        cls._registry[name] = (module, attribute)
                """
        },
    )
    ran = run(
        "from kvstore_vllm_plugin import register_vllm; register_vllm(); register_vllm()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "print(KVConnectorFactory._registry)\n"
        "heavy = {'kvstore', 'redis', 'torch', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))",
        tmp_path,
        ROOT,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "{'KVStoreConnector': ('connector.adapters.vllm', 'KVStoreConnector')}",
        "[]",
    ]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("a package", {"connector/__init__.py": "x = 1"}),
        ("a module", {"connector.py": "raise RuntimeError('imported')"}),
        (
            "a package over ours",
            {"connector/__init__.py": "", "connector/adapters/__init__.py": ""},
        ),
    ],
)
def test_another_package_connector_is_named(
    tmp_path: Path, kind: str, files: dict[str, str]
) -> None:
    write(tmp_path, files)
    places = [tmp_path, ROOT]
    if kind == "a package over ours":  # both installed into one folder: the later one's files
        (tmp_path / "kvstore_vllm_plugin.py").write_bytes(
            (ROOT / "kvstore_vllm_plugin.py").read_bytes()
        )
        places = [tmp_path]
    ran = run(ENTRY, *places)
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr
    (line,) = ran.stderr.splitlines()
    assert f"`connector` was found in {tmp_path}/connector" in line
    assert "not ours" in line


def test_a_folder_of_that_name_in_the_way_of_nobody_is_no_clash(tmp_path: Path) -> None:
    """Python prefers a package with an __init__ wherever it is on the path."""
    (tmp_path / "connector").mkdir()
    ran = run("from kvstore_vllm_plugin import *; print(foreign_connector())", tmp_path, ROOT)
    assert ran.stdout == "None\n", ran.stderr


def test_doctor_names_the_clash(tmp_path: Path) -> None:
    write(tmp_path, {"connector.py": ""})
    code = (
        "from kvstore.cli.checks import software\n"
        "software.version_of = lambda *names: '0.32.0'\n"
        "(found,) = software.vllm(None)\n"
        "print(found.level, found.found, found.do)"
    )
    ran = printed(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}", cwd=tmp_path)
    assert f"`connector` is found in {tmp_path}/connector.py, which is not ours" in ran
    assert "remove it" in ran


@pytest.mark.parametrize(
    ("version", "level"), [("0.31.2", "warn"), ("0.33.0", "ok"), ("0.34", "warn")]
)
def test_doctor_warns_of_a_vllm_that_nobody_tried(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    from kvstore.cli.checks import software
    from kvstore.cli.checks.base import Context

    monkeypatch.setattr(software, "version_of", lambda *_: version)
    monkeypatch.setattr(software, "_wanted_vllm", lambda: MADE_FOR)
    point = SimpleNamespace(name="kvstore")
    monkeypatch.setattr(software.metadata, "entry_points", lambda group: [point])
    (found,) = software.vllm(Context(url=None, key_prefix="kv:default", run_dir=None))
    assert found.level.value == level
    assert found.found.startswith(f"{version} (made for {MADE_FOR})")


def test_what_it_is_made_for_is_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{MADE_FOR}"]


def test_the_adapter_beside_another_vllm_says_which_it_is_made_for(tmp_path: Path) -> None:
    """Whoever asks for the connector there is told by name, not by a traceback out of imports."""
    write(tmp_path, {"vllm/__init__.py": "__version__ = '0.20.0'"})
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from connector.adapters.vllm import KVStoreConnector"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("ImportError: kvstore: KVStoreConnector cannot be used: made for vLLM")
    assert "found 0.20.0" in last


@pytest.mark.vllm
def test_the_vllm_that_is_installed_is_one_of_them() -> None:
    import vllm

    from kvstore.cli.checks.software import _within

    assert find_spec("vllm") is not None
    assert _within(vllm.__version__, MADE_FOR), vllm.__version__
