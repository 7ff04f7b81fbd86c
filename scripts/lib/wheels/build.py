"""Makes the wheels of an index, and has auditwheel judge their tags: `wheels.build TOOLS DIRECTORY
[KIND...]`, with the Python that has ziglang and auditwheel."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
GLIBC = "2.17"
"""The oldest that aarch64 has ever had, and Debian, Ubuntu and RHEL since 2014."""
KINDS = ("x86_64", "aarch64", "pure")
BUILD_TIMEOUT_S = 600.0
"""Zig compiles parts of a C library when it is first called."""


class WheelsError(Exception):
    """Says which wheel is not what its name says, or could not be made."""


def settings(kind: str, tools: str) -> dict[str, str]:
    """What hatch_build.py is told for that kind of wheel."""
    if kind == "pure":
        return {"KVSTORE_COMPILED": "no", "KVSTORE_WHEEL_PLATFORM": ""}
    zig = [tools, "-m", "ziglang", "cc", "-target", f"{kind}-linux-gnu.{GLIBC}"]
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{kind}"
    return {
        "KVSTORE_COMPILED": "yes",
        "KVSTORE_WHEEL_PLATFORM": tag,
        "CC": shlex.join(zig),
        "CFLAGS": "",
        "LDFLAGS": "-s",
    }


def run(command: list[str], **environment: str) -> str:
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if ran.returncode:
        raise WheelsError(f"{shlex.join(command)}: {(ran.stdout + ran.stderr)[-2000:]}")
    return ran.stdout


def make(kind: str, tools: str, directory: Path) -> Path:
    """One wheel, in `directory`. Raises `WheelsError`."""
    with tempfile.TemporaryDirectory(prefix="kvw-") as scratch:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch]
        run(build, **settings(kind, tools))
        (made,) = Path(scratch).glob("*.whl")
        if kind == "pure":
            if not made.stem.endswith("-py3-none-any"):
                raise WheelsError(f"{made.name}: has a compiled part")
        else:
            judge(made.name, run([tools, "-m", "auditwheel", "show", str(made)]))
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / made.name
        kept.write_bytes(made.read_bytes())
    return kept


def judge(name: str, said: str) -> None:
    """Raise `WheelsError` unless the tag in the wheel's name is the one that auditwheel finds its
    symbols to allow."""
    words = " ".join(said.split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', words)
    tag = name.removesuffix(".whl").rsplit("-", 1)[1]
    if found is None or found[1] != tag:
        allowed = "auditwheel names none" if found is None else f"its symbols need {found[1]}"
        raise WheelsError(f"{name}: is tagged {tag}, and {allowed}")


def main(tools: str, directory: str, *kinds: str) -> int:
    for kind in kinds:
        if kind not in KINDS:
            print(f"wheels: {kind}: must be one of {', '.join(KINDS)}", file=sys.stderr)
            return 2
    for kind in kinds or KINDS:
        try:
            made = make(kind, tools, Path(directory))
        except (WheelsError, subprocess.TimeoutExpired) as e:
            print(f"wheels: {e}", file=sys.stderr)
            return 1
        print(f"{made} ({made.stat().st_size} bytes)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
