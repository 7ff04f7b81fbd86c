"""Builds the compiled parts (`PARTS`) into a wheel, where that can be done.

hatchling calls `CustomBuildHook` for each wheel and each editable install. Without a C compiler,
without Python's headers, or with `KVSTORE_COMPILED=no`, the wheel is one of Python alone, and the
store works all the same. `KVSTORE_COMPILED=yes` makes it an error.

A wheel is for the machine that it is built on, and tagged so (`linux_x86_64`), unless two settings
together say otherwise, as `scripts/wheels` does: `KVSTORE_WHEEL_PLATFORM` is the tag, which no
wheel of Python alone can have (`manylinux_2_17_aarch64`), and `CC` compiles for it. The stable ABI
has the same headers everywhere. What `CC` made must be of the machine that the tag names.

`python hatch_build.py` builds it into this checkout.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
PARTS = {
    Path("kvstore/segment/batch_read.c"): Path("kvstore/segment/_batch_read.abi3.so"),
    Path("kvstore/compiled/block_keys.c"): Path("kvstore/compiled/_block_keys.abi3.so"),
    Path("kvstore/compiled/fence.c"): Path("kvstore/compiled/_fence.abi3.so"),
    Path("kvstore/compiled/block_writes.c"): Path("kvstore/compiled/_block_writes.abi3.so"),
    Path("kvstore/compiled/key_set.c"): Path("kvstore/compiled/_key_set.abi3.so"),
    Path("kvstore/segment/disk/images.c"): Path("kvstore/segment/disk/_images.abi3.so"),
}
"""Sources, and what is made of each. All are built, or none is in the wheel."""
COMPILE_TIMEOUT_S = 120.0
PLATFORM = "KVSTORE_WHEEL_PLATFORM"
PLATFORMS = re.compile(r"(many|musl)?linux(_[0-9]+_[0-9]+)?_(x86_64|aarch64)")
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")


class CannotBuildError(Exception):
    """Says why there is no compiled part."""


def compiler() -> list[str]:
    """The words that call a C compiler: what `CC` says, else any that is here. Raises
    `CannotBuildError` when there is none."""
    wanted = os.environ.get("CC", "")
    others = [sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang"]
    for words in map(shlex.split, [wanted] if wanted else others):
        if words and shutil.which(words[0]):
            return words
    raise CannotBuildError(f"there is no C compiler ({wanted or 'CC, cc, gcc, clang'})")


def here() -> str:
    """The platform tag of this machine, by which no index takes a wheel."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def machine_of(library: Path) -> str:
    """The machine that a shared library is for, as platform tags name it."""
    with library.open("rb") as file:
        head = file.read(20)
    if head[:6] != b"\x7fELF\x02\x01":
        return "no little-endian machine of 64 bits"
    number = int.from_bytes(head[18:20], "little")
    return ELF_MACHINES.get(number, f"ELF machine {number}")


def build(source: Path, target: Path, platform: str = "") -> None:
    """Compile `source` into the module `target`, for a platform tag, else for this machine. Raises
    `CannotBuildError`."""
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        raise CannotBuildError(f"it is for CPython on Linux, not {sys.implementation.name} here")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotBuildError("CPython without a GIL has no stable ABI")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise CannotBuildError(f"Python's headers are not in {include}")
    with tempfile.TemporaryDirectory(prefix="kvb-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        crc = crc32(source.read_bytes())
        command = [*compiler(), *FLAGS, f"-DSOURCE_CRC32={crc}u", f"-I{include}"]
        command += [*shlex.split(os.environ.get("CFLAGS", "")), str(source), "-o", str(made)]
        command += shlex.split(os.environ.get("LDFLAGS", ""))
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise CannotBuildError(f"{shlex.join(command)}: {e}") from e
        if ran.returncode:
            raise CannotBuildError(f"{shlex.join(command)}: {ran.stderr[-2000:]}")
        machine, platform = machine_of(made), platform or here()
        if not platform.endswith(f"_{machine}"):
            raise CannotBuildError(
                f"{command[0]} compiles for {machine}, and {platform} is asked for: set {PLATFORM} "
                "and CC together"
            )
        made.replace(target)  # whoever has the former one loaded keeps that


def wheel_platform() -> str:
    """The platform tag that is asked for, else that of this machine. Raises `CannotBuildError`."""
    platform = os.environ.get(PLATFORM, "")
    if platform and not PLATFORMS.fullmatch(platform):
        raise CannotBuildError(f"{PLATFORM}={platform}: must be a tag as manylinux_2_17_aarch64")
    return platform or here()


def wheel_tag(platform: str = "") -> str:
    """One wheel is for every CPython from 3.11 on, on this kind of machine or that of the tag."""
    return f"cp311-abi3-{platform or here()}"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Adds the compiled part to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are gathered."""
        wanted = os.environ.get("KVSTORE_COMPILED", "")
        if self.target_name != "wheel" or wanted == "no":
            return
        root = Path(self.root)
        try:
            if version == "editable":
                for source, module in PARTS.items():
                    build(root / source, root / module)
                return
            self._scratch = tempfile.TemporaryDirectory(prefix="kvb-")
            made = {Path(self._scratch.name) / module.name: module for module in PARTS.values()}
            platform = wheel_platform()
            for source, target in zip(PARTS, made, strict=True):
                build(root / source, target, platform)
        except (CannotBuildError, OSError) as e:
            if wanted == "yes" or os.environ.get(PLATFORM):
                raise
            self.app.display_warning(f"without the compiled part: {e}")
            return
        for target, module in made.items():
            build_data["force_include"][str(target)] = str(module)
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag(platform)


if __name__ == "__main__":
    try:
        for each, target in PARTS.items():
            build(ROOT / each, ROOT / target)
            print(target)
    except CannotBuildError as e:
        sys.exit(f"hatch_build.py: {e}")
