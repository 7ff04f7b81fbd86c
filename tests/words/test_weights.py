"""The fingerprint of a model's weights: the same for the same files, another for others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from own_python import printed

from kvstore import DeadlineError, UsageError, weights, weights_fingerprint

TENSOR_BYTES = 3 << 20
TENSORS = 8


def shard(path: Path, *, fill: int = 7, names: str = "t") -> Path:
    """A safetensors file too large to be read whole."""
    header = json.dumps(
        {
            f"{names}{i}": {
                "dtype": "BF16",
                "shape": [TENSOR_BYTES // 2],
                "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
            }
            for i in range(TENSORS)
        }
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytes((fill + i) % 251 for i in range(4096)) * (TENSORS * TENSOR_BYTES // 4096)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "here" / "model"
    shard(root / "model-00001-of-00002.safetensors")
    shard(root / "model-00002-of-00002.safetensors", fill=9)
    (root / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (root / "config.json").write_text("{}")
    return root


def test_two_paths_with_the_same_files_have_one_fingerprint(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(model, other)
    for file in other.iterdir():
        os.utime(file, (1, 1))
    assert weights_fingerprint(other) == weights_fingerprint(model)
    (tmp_path / "link").symlink_to(model)
    assert weights_fingerprint(tmp_path / "link") == weights_fingerprint(model)


def test_another_process_with_another_hash_seed_comes_to_the_same(model: Path) -> None:
    code = "import sys; from kvstore import weights_fingerprint as f; print(f(sys.argv[1]))"
    for seed in ("1", "2"):
        out = printed(code, str(model), env={**os.environ, "PYTHONHASHSEED": seed})
        assert out.strip() == weights_fingerprint(model)


def change_a_tensor(model: Path) -> None:
    """What a fine-tune of one layer does: most bytes of one tensor, all else as it was."""
    file = model / "model-00002-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little") + 3 * TENSOR_BYTES
    raw[start : start + TENSOR_BYTES] = bytes(b ^ 1 for b in raw[start : start + TENSOR_BYTES])
    file.write_bytes(raw)


def swap_shards(model: Path) -> None:
    one, two = sorted(model.glob("*.safetensors"))
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def rename_tensors(model: Path) -> None:
    shard(model / "model-00001-of-00002.safetensors", names="u")


def lengthen(model: Path) -> None:
    with (model / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"x")


def one_byte_of_the_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map":  {}}')


def code_of_the_model(model: Path) -> None:
    (model / "modeling_mine.py").write_text("SCALE = 2")


def a_shard_more(model: Path) -> None:
    shard(model / "model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        change_a_tensor,
        swap_shards,
        rename_tensors,
        lengthen,
        one_byte_of_the_index,
        code_of_the_model,
        a_shard_more,
    ],
)
def test_other_weights_at_the_same_path_have_another(
    model: Path, change: Callable[[Path], None]
) -> None:
    before = weights_fingerprint(model)
    change(model)
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "q4.gguf", "w.npz"])
def test_other_formats_are_sampled_too(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(bytes(20 << 20))
    before = weights_fingerprint(tmp_path), weights_fingerprint(file)
    raw = bytearray(20 << 20)
    raw[5 << 20 : 10 << 20] = b"\1" * (5 << 20)
    file.write_bytes(raw)
    after = weights_fingerprint(tmp_path), weights_fingerprint(file)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(bytes(100_001))
    before = weights_fingerprint(tmp_path)
    file.write_bytes(bytes(100_000) + b"\1")
    assert weights_fingerprint(tmp_path) != before


def test_commits_of_a_hub_cache_are_told_apart_wherever_the_cache_is(
    model: Path, tmp_path: Path
) -> None:
    def snapshot(cache: str, commit: str) -> str:
        place = tmp_path / cache / "models--org--name" / "snapshots" / commit
        shutil.copytree(model, place)
        return weights_fingerprint(place)

    first = snapshot("a", "0" * 40)
    assert snapshot("a", "1" * 40) != first
    assert snapshot("b", "0" * 40) == first


def test_what_trainers_leave_behind_does_not_count(model: Path) -> None:
    before = weights_fingerprint(model)
    (model / "training_args.bin").write_bytes(b"x")
    (model / "optimizer.pt").write_bytes(b"x")
    (model / "README.md").write_text("x")
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, (4).to_bytes(8, "little") + b"[1]x", (2).to_bytes(8, "little") + b"{}"],
)
def test_files_that_are_not_what_their_name_says_have_one_too(
    tmp_path: Path, header: bytes
) -> None:
    (tmp_path / "x.safetensors").write_bytes(header + bytes(9 << 20))
    assert weights_fingerprint(tmp_path).startswith(weights.VERSION)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="weights"):
        weights_fingerprint(tmp_path / "absent")
    with pytest.raises(UsageError, match="must hold files"):
        weights_fingerprint(tmp_path)


def test_a_fingerprint_ends_with_its_deadline(model: Path) -> None:
    with pytest.raises(DeadlineError):
        weights_fingerprint(model, timeout_s=0.0)


def test_what_is_read_of_a_large_model_is_bounded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = 0
    real = weights._read

    def counted(fd: int, part: weights._Range) -> bytes:
        nonlocal read_bytes
        read_bytes += part.size_bytes
        return real(fd, part)

    monkeypatch.setattr(weights, "_read", counted)
    monkeypatch.setattr(weights, "WEIGHT_SAMPLES_MAX", 64)
    weights_fingerprint(model)
    assert 0 < read_bytes <= 65 * weights.WEIGHT_SAMPLE_BYTES + 8192
