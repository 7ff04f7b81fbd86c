"""A wheel of CUDA extensions keeps the code of one architecture, at its place in the file."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from gpu import packing
from gpu.packing import FATBIN_MAGIC, MACHINE_CODE, SECTION, carve, pack, section_of

PTX = 1


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQIIII", kind, 0x101, 64, len(payload), 0, 0, 0, arch)
    return header.ljust(64, b"\0") + payload


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", FATBIN_MAGIC, 1, 16, len(body)) + body


def elf(*fatbins: bytes) -> bytes:
    """A file with two sections, of which the second has their names."""
    code = b"".join(one.ljust(-(-len(one) // 8) * 8, b"\0") for one in fatbins)
    names = b"\0" + SECTION.encode() + b"\0.shstrtab\0"
    start = 64
    table = start + len(code) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    rows = [
        struct.pack("<IIQQQQ", 1, 1, 0, 0, start, len(code)),
        struct.pack("<IIQQQQ", 2 + len(SECTION), 3, 0, 0, start + len(code), len(names)),
    ]
    return bytes(header) + code + names + b"".join(row.ljust(64, b"\0") for row in rows)


OLD, NEW = entry(MACHINE_CODE, 80, b"o" * 40), entry(MACHINE_CODE, 90, b"n" * 56)


def test_code_of_one_architecture_moves_to_the_front_and_the_file_keeps_its_size() -> None:
    first = fatbin(OLD, NEW, entry(PTX, 90, b"t" * 24))
    before = elf(first, fatbin(OLD))
    data = bytearray(before)
    carved = carve(data, 90)
    assert len(data) == len(before)
    assert carved == (len(first) - 16 + len(OLD), len(NEW), 1)
    at, size_bytes = section_of(data, SECTION)
    body = struct.unpack_from("<Q", data, at + 8)[0]
    assert data[at + 16 : at + 16 + body] == NEW, "machine code alone, and no PTX"
    rest = data[at + 16 + body : at + len(first)]
    assert not any(rest)
    second = at + -(-len(first) // 8) * 8
    assert struct.unpack_from("<IHHQ", data, second) == (FATBIN_MAGIC, 1, 16, 0)
    assert data[at + size_bytes :] == before[at + size_bytes :], "nothing else has changed"


def test_a_file_without_device_code_stays_as_it_is() -> None:
    data = bytearray(elf())
    before = bytes(data)
    assert carve(data, 90) == (0, 0, 0)
    assert data == before


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("vllm/__init__.py", "version = 1")
        files.writestr("vllm/benchmarks/large.py", "x")
        files.writestr("vllm/_C_stable_libtorch.abi3.so", elf(fatbin(OLD, NEW)))
        files.writestr("vllm/other.abi3.so", elf(fatbin(OLD)))
        files.writestr("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", elf(fatbin(NEW)))
    return path


def names(archive: Path) -> set[str]:
    with lzma.open(archive) as raw, tarfile.open(fileobj=raw) as tar:
        return set(tar.getnames())


def test_a_wheel_becomes_its_python_and_the_kernels_that_are_wanted(
    wheel: Path, tmp_path: Path
) -> None:
    carved = packing.pack_vllm(wheel, tmp_path, 90)
    assert {Path(name).name.split(".")[0] for name in carved} == {
        "_C_stable_libtorch",
        "_vllm_fa3_C",
    }
    assert names(tmp_path / packing.VLLM_FILES) == {
        "vllm/__init__.py",
        "vllm/_C_stable_libtorch.abi3.so",
    }
    attention = {"vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"}
    assert names(tmp_path / packing.ATTENTION_FILES) == attention


def test_an_architecture_without_flash_attention_3_has_none_of_it(
    wheel: Path, tmp_path: Path
) -> None:
    packing.pack_vllm(wheel, tmp_path, 80)
    assert not (tmp_path / packing.ATTENTION_FILES).exists()
    pack(wheel, tmp_path / "x.tar.xz", 80, ("other",), rest=False)
    assert names(tmp_path / "x.tar.xz") == {"vllm/other.abi3.so"}


def test_packages_for_the_engine_are_pinned_and_are_none_of_the_machines() -> None:
    wanted = packing.needed_by_vllm()
    assert all("==" in one for one in wanted)
    here = {one.partition("==")[0] for one in wanted}
    assert here.isdisjoint({"torch", "numpy", "transformers", "triton", "vllm"})
