"""Computes a fingerprint of a model's weights, whatever they are called and wherever they lie.

A name or a path says nothing: another fine-tune is mounted there, or a new one is
deployed under it. `weights_fingerprint` looks at the files: headers and indexes
whole, of large files the size and bytes at places that follow from size and header
alone. No path, no time and no owner goes in, so every host that has the same files
comes to the same answer. docs/decisions/0028-identity-of-weights.md says what it sees
and what it does not.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import DeadlineError, UsageError
from kvstore.limits import (
    WEIGHT_FILES_MAX,
    WEIGHT_HEADER_BYTES_MAX,
    WEIGHT_SAMPLE_BYTES,
    WEIGHT_SAMPLES_MAX,
    WEIGHT_SAMPLES_MIN,
    WEIGHT_WHOLE_BYTES_MAX,
    WEIGHTS_THREADS,
    WEIGHTS_TIMEOUT_S,
)
from kvstore.system.threads import DaemonThreads

VERSION = "w1"
"""Version of the fingerprint; it grows when the same files get another one."""
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that trainers leave behind and no engine reads."""
BESIDE = (
    ".index.json",
    "adapter_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    ".py",
)
"""Last parts of names of files that say how weights are to be used, the model's code included."""
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")


def weights_fingerprint(
    path: str | os.PathLike[str], *, timeout_s: float = WEIGHTS_TIMEOUT_S
) -> str:
    """Return a name for the weights in `path`, a directory or one file: the same for the same
    files.

    Files of up to `WEIGHT_WHOLE_BYTES_MAX` bytes count whole; of larger ones the header of
    safetensors, the size, and `WEIGHT_SAMPLES_MAX` samples of `WEIGHT_SAMPLE_BYTES` bytes in all
    files together, in every tensor while there are that many. In a snapshot of a Hugging Face cache
    its commit counts as well. Subdirectories do not.

    Raises `UsageError` when there are no weights to be read there, `DeadlineError` after
    `timeout_s` seconds (a read that hangs is not waited for longer), and `PeerError` where the host
    gives no thread to read in.
    """
    root = Path(path).expanduser()
    deadline = time.monotonic() + timeout_s
    try:
        files = _files(root)
        total = blake2b(VERSION.encode(), digest_size=16)
        total.update(_hub_commit(root).encode())
        samples = max(WEIGHT_SAMPLES_MIN, WEIGHT_SAMPLES_MAX // len(files))
        for file, digest in zip(files, _digests(root, files, samples, deadline), strict=True):
            name = file.name if root.is_dir() else file.suffix
            total.update(len(name.encode()).to_bytes(4, "little") + name.encode() + digest)
    except DeadlineError:
        raise
    except OSError as e:
        raise UsageError("weights", str(root), f"cannot be read: {e}") from e
    return f"{VERSION}-{total.hexdigest()}"


def _files(root: Path) -> list[Path]:
    """Return what counts, by name. Raises `UsageError` when none of it is weights."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UsageError("weights", str(root), "must be a directory or a file of this host")
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    names = [n for n in names if n.endswith(SUFFIXES + BESIDE) and n not in TRAINING]
    if not any(name.endswith(SUFFIXES) for name in names):
        kinds = ", ".join(SUFFIXES)
        raise UsageError("weights", str(root), f"must hold files of weights ({kinds})")
    if len(names) > WEIGHT_FILES_MAX:
        raise UsageError("weights", f"{len(names)} files", f"at most {WEIGHT_FILES_MAX}")
    return [root / name for name in names]


def _hub_commit(root: Path) -> str:
    """Return the commit of a snapshot in a Hugging Face cache
    (`models--ORG--NAME/snapshots/COMMIT`)."""
    real = root.absolute()
    for place in (real, real.parent, root.resolve()):
        if (
            _SNAPSHOT.fullmatch(place.name)
            and place.parent.name == "snapshots"
            and place.parent.parent.name.startswith("models--")
        ):
            return place.name
    return ""


def _digests(root: Path, files: Sequence[Path], samples: int, deadline: float) -> Iterator[bytes]:
    """Return a digest for each of `files`, in order; several are read at a time."""
    threads = DaemonThreads(WEIGHTS_THREADS, "kvstore-weights")
    futures = [threads.submit(partial(_digest, file, samples, deadline)) for file in files]
    try:
        for future in futures:
            yield future.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        raise DeadlineError(f"weights in {root} were not read in time") from None
    finally:
        threads.close()
        for future in futures:
            future.cancel()


class _Range(NamedTuple):
    start: int
    size_bytes: int


def _digest(file: Path, samples: int, deadline: float) -> bytes:
    digest = blake2b(digest_size=16)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    with closing(os.fdopen(fd, "rb", buffering=0)):
        size_bytes = os.fstat(fd).st_size
        digest.update(size_bytes.to_bytes(8, "little"))
        for part in _parts(fd, file, size_bytes, samples):
            if time.monotonic() >= deadline:
                raise TimeoutError
            digest.update(_read(fd, part))
    return digest.digest()


def _parts(fd: int, file: Path, size_bytes: int, samples: int) -> Iterator[_Range]:
    """Return what is read of a file; it follows from its size and header alone."""
    if size_bytes <= WEIGHT_WHOLE_BYTES_MAX:
        yield from _pieces(_Range(0, size_bytes))
        return
    head = _Range(0, WEIGHT_SAMPLE_BYTES)
    tensors: list[_Range] = []
    if file.suffix == ".safetensors":
        head, tensors = _safetensors(fd, size_bytes)
    yield from _pieces(head)
    after = head.start + head.size_bytes
    # Evenly over the file, and in the tensors: so many of each.
    rest = _Range(after, size_bytes - after)
    yield from _spread([rest], samples if not tensors else samples // 2)
    yield from _spread(tensors, samples // 2)


def _pieces(part: _Range) -> Iterator[_Range]:
    step = 1 << 20
    for start in range(part.start, part.start + part.size_bytes, step):
        yield _Range(start, min(step, part.start + part.size_bytes - start))


def _spread(ranges: Sequence[_Range], samples: int) -> Iterator[_Range]:
    """Yield `samples` places, evenly over `ranges` and within each; of more ranges than samples
    every n-th."""
    if not ranges:
        return
    step = max(1, -(-len(ranges) // samples))
    chosen = ranges[::step]
    each = max(1, samples // len(chosen))
    for start, size_bytes in chosen:
        for i in range(each):
            # The middle of each of `each` equal parts.
            at = start + size_bytes * (2 * i + 1) // (2 * each)
            yield _Range(at, min(WEIGHT_SAMPLE_BYTES, start + size_bytes - at))


def _safetensors(fd: int, size_bytes: int) -> tuple[_Range, list[_Range]]:
    """Return the header, and where each tensor lies. Of an invalid header: the file's first
    bytes."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size_bytes - 8, WEIGHT_HEADER_BYTES_MAX):
        return _Range(0, WEIGHT_SAMPLE_BYTES), []
    head = _Range(0, 8 + length)
    try:
        fields = json.loads(os.pread(fd, length, 8))
        spans = [fields[name]["data_offsets"] for name in sorted(fields) if name != "__metadata__"]
        tensors = [_Range(head.size_bytes + first, end - first) for first, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return head, []
    inside = all(8 < t.start <= t.start + t.size_bytes <= size_bytes for t in tensors)
    return head, [t for t in tensors if t.size_bytes] if inside else []


def _read(fd: int, part: _Range) -> bytes:
    raw = os.pread(fd, part.size_bytes, part.start)
    if len(raw) != part.size_bytes:
        raise OSError("a file changed while it was read")
    return raw
