"""Makes the folder that a GPU machine without a registry needs, on a machine that reaches one.

    python scripts/lib gpu.packing FOLDER [--python 3.12] [--vllm] [--arch 90]

    FOLDER/*.whl         what the product and its tests need beside torch for CUDA
    FOLDER/vllm/*.whl    what vLLM needs beside that (vllm-<version>.txt)
    FOLDER/vllm.tar.xz   vLLM with the code of one architecture
    FOLDER/fa3.tar.xz    FlashAttention 3, which vLLM takes by default on architecture 90. Without
                         it engines run with Triton's attention.

`scripts/gpu-check --wheels FOLDER` takes all that it finds there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from gpu.carve import Carved, pack

ROOT = Path(__file__).parents[3]
VLLM = "0.32.0"
VLLM_WHEELS, VLLM_FILES, ATTENTION_FILES = "vllm", "vllm.tar.xz", "fa3.tar.xz"
VLLM_OBJECTS = ("_C_stable_libtorch", "cumem_allocator", "spinloop", "fs_io_C")
ATTENTION_OBJECTS = ("_vllm_fa3_C",)
ATTENTION_ARCH = 90
NOT_NEEDED = (
    *("*/include/*", "*.hpp", "*.cuh", "*/static/*.js", "*/configs/*/nvidia_b*.json"),
    *("vllm/benchmarks/*", "vllm/vllm-rs"),
    # Kernels of other architectures, as source.
    *("vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*"),
)
GLIBC_MINORS = range(39, 16, -1)


def needed() -> list[str]:
    """Return what the project and its tests need; numpy comes with torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = project["optional-dependencies"]["test"]
    tests = [one for one in tests if one.startswith(("pytest", "hyp"))]
    return [one.partition(";")[0].strip() for one in [*project["dependencies"], *tests]]


def needed_by_vllm() -> list[str]:
    """Return what vLLM needs beside torch, transformers and what the project needs."""
    lines = Path(__file__).with_name(f"vllm-{VLLM}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def download(folder: Path, python: str, wanted: Sequence[str], *, closed: bool = False) -> None:
    """Fetch wheels for a Python of that version on x86-64; `closed` lists have all they need."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms]
    command += ["--no-deps"] if closed else []
    subprocess.run([*command, "-d", str(folder), *wanted], check=True)


def pack_vllm(wheel: Path, folder: Path, arch: int) -> dict[str, Carved]:
    """Write vLLM's files, and on the one architecture that has it FlashAttention 3."""
    carved = pack(wheel, folder / VLLM_FILES, arch, VLLM_OBJECTS, drop=NOT_NEEDED)
    if arch == ATTENTION_ARCH:
        # Level 1: a fifth larger than at level 6, in a tenth of the time.
        out = folder / ATTENTION_FILES
        carved |= pack(wheel, out, arch, ATTENTION_OBJECTS, rest=False, preset=1)
    return carved


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--vllm", action="store_true", help=f"also vLLM {VLLM}")
    parser.add_argument(
        "--arch", type=int, default=ATTENTION_ARCH, help="of the GPU, as 90 for 9.0"
    )
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    download(folder, options.python, needed())
    if options.vllm:
        download(folder / VLLM_WHEELS, options.python, needed_by_vllm(), closed=True)
        with tempfile.TemporaryDirectory() as scratch:
            download(Path(scratch), options.python, [f"vllm=={VLLM}"], closed=True)
            (wheel,) = Path(scratch).glob("vllm-*.whl")
            for name, (before, after, without) in pack_vllm(wheel, folder, options.arch).items():
                print(f"{name}: {before >> 20} MiB of code, {after >> 20} kept; {without} without")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total / (1 << 20):.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
