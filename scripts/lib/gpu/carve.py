"""Packs a wheel of CUDA extensions with the machine code of one architecture alone.

A wheel for every GPU has each kernel a dozen times over; a machine has one kind. In each shared
object that is kept, every fat binary (NVIDIA's container of code by architecture, in the section
`.nv_fatbin`) is rewritten in place: the code of the wanted architecture moves to its front, the
rest is zeros, which pack to nothing. No address in the file changes, so nothing is linked anew.
Needs no CUDA. A kernel that the wheel has no such code for has none afterwards either.
"""

from __future__ import annotations

import fnmatch
import io
import lzma
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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


def section_of(elf: bytes, wanted: str) -> tuple[int, int]:
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
