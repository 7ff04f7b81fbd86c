"""Images as far as they can be checked without Docker: what their wheel is built from, and how."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build
from kvstore.compiled.part import COMPILED

REPOSITORY = Path(__file__).parents[2]
STAGES = {
    re.split(r"\s+", stage)[2]: stage
    for stage in (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")[1:]
}
"""What the Dockerfile says of each stage, by name."""
COMPILER = "apt-get install -qq --no-install-recommends gcc libc6-dev"


def built_from(root: Path, out: Path) -> set[str]:
    """The files of the wheel that is built there, with the compiled part."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=root,
        env={**os.environ, COMPILED: "yes"},
        check=True,
        timeout=120,
    )
    (wheel,) = out.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def copy_context(to: Path) -> None:
    """What Docker is given: all is left out but what the file says, and of that what it says."""
    lines = (REPOSITORY / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    taken = [line.removeprefix("!") for line in lines if line.startswith("!")]
    left_out = [line for line in lines[1:] if not line.startswith("!")]
    assert all(line.startswith("**/") for line in left_out)
    for name in taken:
        source, target = REPOSITORY / name, to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in left_out))
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copyfile(source, target)


@pytest.mark.long
def test_what_an_image_is_built_from_makes_the_whole_wheel_with_the_compiled_part(
    tmp_path: Path,
) -> None:
    part = next(iter(hatch_build.PARTS))
    try:
        hatch_build.build(REPOSITORY / part, tmp_path / "tried.so")
    except hatch_build.CannotBuildError as e:
        pytest.skip(f"nothing can be compiled here: {e}")
    context = tmp_path / "context"
    context.mkdir()
    copy_context(context)
    names = built_from(context, tmp_path / "from the context")
    assert set(map(str, hatch_build.PARTS.values())) <= names
    assert names == built_from(REPOSITORY, tmp_path / "from the checkout")


def test_the_wheel_of_images_is_compiled_and_the_compiler_stays_behind() -> None:
    assert COMPILER in STAGES["wheel"]
    assert f"{COMPILED}=yes /opt/uv/bin/uv build" in STAGES["wheel"]
    assert [name for name, stage in STAGES.items() if "gcc" in stage] == ["wheel"]
    for name in ("engine", "engine-gpu", "store"):
        assert "--mount=type=bind,from=wheel,source=/dist" in STAGES[name]
        assert "from=wheel /" not in STAGES[name], "nothing else of it"
