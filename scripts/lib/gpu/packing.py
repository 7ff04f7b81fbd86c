"""Makes the folder that a GPU machine without a registry needs, on a machine that reaches one.

    python scripts/lib gpu.packing FOLDER [--python 3.12] [--vllm] [--arch 90]

    FOLDER/*.whl         what the product and its tests need beside torch for CUDA
    FOLDER/vllm/*.whl    what vLLM needs beside that (vllm-<version>.txt)
    FOLDER/vllm.tar.xz   vLLM with the code of one architecture
    FOLDER/fa3.tar.xz    FlashAttention 3, which vLLM takes by default on architecture 90. Without
                         it engines run with Triton's attention.

`scripts/gpu-check --wheels FOLDER` takes all that it finds there.

In vLLM's wheel each kernel is there a dozen times, for every kind of GPU. In a shared object that
is kept, every fat binary (NVIDIA's container of code by architecture, in the section `.nv_fatbin`)
is rewritten in place: the code of the wanted architecture moves to its front, the rest is zeros,
which pack to nothing. No address in the file changes, so nothing is linked anew, and no CUDA is
needed. A kernel that the wheel has no such code for has none afterwards either.
"""

from __future__ import annotations

import fnmatch
import io
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")
"""Magic, version, bytes of the header, bytes of what follows it."""
ENTRY_HEADER = struct.Struct("<HHIQ")
"""Kind, version, bytes of the header, bytes of the payload."""
ENTRY_ARCH_AT = 28
MACHINE_CODE = 2
"""The kind of an entry that is no PTX."""
FATBIN_ALIGNMENT = 8
SECTION = ".nv_fatbin"


class Carved(NamedTuple):
    """Says what became of the fat binaries of a shared object."""

    bytes_before: int
    bytes_after: int
    without: int
    """Fat binaries that have nothing of the architecture."""


def section_of(elf: bytes | bytearray, wanted: str) -> tuple[int, int]:
    """Return offset and size of a section of a 64-bit ELF file; (0, 0) when there is none."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name_at, _, _, _, offset, size_bytes in rows:
        start = rows[names][4] + name_at
        if elf[start : elf.index(b"\0", start)].decode() == wanted:
            return offset, size_bytes
    return 0, 0


def _entries(elf: bytearray, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, architecture and bytes of each entry of a fat binary."""
    while start < stop:
        kind, _, header, payload = ENTRY_HEADER.unpack_from(elf, start)
        (arch,) = struct.unpack_from("<I", elf, start + ENTRY_ARCH_AT)
        yield kind, arch, bytes(elf[start : start + header + payload])
        start += header + payload


def carve(elf: bytearray, arch: int) -> Carved:
    """Leave machine code for sm_`arch` alone in every fat binary of `elf`."""
    at, size_bytes = section_of(elf, SECTION)
    end, before, after, without = at + size_bytes, 0, 0, 0
    while at + FATBIN_HEADER.size <= end:
        magic, _, header, body = FATBIN_HEADER.unpack_from(elf, at)
        if magic != FATBIN_MAGIC:
            at += FATBIN_ALIGNMENT
            continue
        start, stop = at + header, at + header + body
        kept = b"".join(
            raw
            for kind, its_arch, raw in _entries(elf, start, stop)
            if (kind, its_arch) == (MACHINE_CODE, arch)
        )
        elf[start:stop] = kept + bytes(body - len(kept))
        struct.pack_into("<Q", elf, at + 8, len(kept))
        before, after, without = before + body, after + len(kept), without + (not kept)
        at = -(-stop // FATBIN_ALIGNMENT) * FATBIN_ALIGNMENT
    return Carved(before, after, without)


def _stripped(elf: bytes) -> bytes:
    """Return the file without symbols that no loader needs, where binutils are installed."""
    if shutil.which("strip") is None:
        return elf
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(elf)
        file.flush()
        done = subprocess.run(["strip", "-s", file.name], capture_output=True, check=False)
        return elf if done.returncode else Path(file.name).read_bytes()


def pack(
    wheel: Path,
    out: Path,
    arch: int,
    objects: Collection[str],
    *,
    drop: Sequence[str] = (),
    rest: bool = True,
    preset: int = 6,
) -> dict[str, Carved]:
    """Write the wheel's files to `out`, a .tar.xz, and return what was carved by name.

    Of its shared objects only those named `objects` (up to the first dot) are taken; `drop` are
    patterns of other files that are not; without `rest` nothing but the objects is.
    """
    carved: dict[str, Carved] = {}
    with (
        zipfile.ZipFile(wheel) as files,
        lzma.open(out, "wb", preset=preset) as raw,
        tarfile.open(fileobj=raw, mode="w|") as tar,
    ):
        for name in files.namelist():
            is_object = name.endswith(".so")
            wanted = Path(name).name.split(".")[0] in objects if is_object else rest
            if not wanted or any(fnmatch.fnmatch(name, pattern) for pattern in drop):
                continue
            data = files.read(name)
            if is_object:
                elf = bytearray(data)
                carved[name] = carve(elf, arch)
                data = _stripped(bytes(elf))
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if is_object else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return carved


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
