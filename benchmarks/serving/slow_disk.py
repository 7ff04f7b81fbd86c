"""Asks engines with and without a disk the same prompts while the disk is slow, hangs or fails.

The disk is an ext4 on a loop device whose file is in /dev/shm, so nothing of it is slow by itself;
a cgroup (blkio, version 1) limits what all processes read from that device, outside all products.
That needs root. Prompts are asked one at a time, each of all engines, which take turns in being
first.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import EngineProcess, EngineSettings

from benchmarks.report import Row, percentile
from benchmarks.serving.engines import BLOCK_TOKENS, MAX_TOKENS
from benchmarks.serving.report import OURS, REFERENCE
from benchmarks.serving.sessions import RESERVED_TOKENS, VOCABULARY
from benchmarks.serving.stores import MIB, Place, start_kvstore, start_none

NAME = "slow-disk"
WITH_DISK = "kvstore --disk"
VARIANTS = (REFERENCE, OURS, WITH_DISK)
CPU = "0"
"""Of all engines, which work in turn."""
CGROUP = Path("/sys/fs/cgroup/blkio")
DEVICE_BYTES, DISK_BYTES, MEMORY_BYTES = 512 * MIB, 256 * MIB, 16 * MIB
PROMPTS, PROMPT_TOKENS, REQUESTS = 6, 1024, 8
"""A third of the prompts fit into the memory of a store, all of them on the disk."""
KV_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS + 4
"""An engine's own cache has the prompt before, which is never the same."""
STALL_S, STALL_EVERY_S = 5.0, 15.0
UNLIMITED = 0
SAVED = "saved"
RATES = {"1 GB/s": 10**9, "100 MB/s": 10**8, "10 MB/s": 10**7}
STALLED, BROKEN = "hangs 5 s of 15", "each access fails"
STATES = ("as fast as memory", *RATES, STALLED, BROKEN)


class Disk:
    """A file system whose device can be made slow."""

    def __init__(self, folder: Path) -> None:
        """Make and mount it, and put this process, and so all that it starts, in the cgroup."""
        self.at = folder / "disk"
        self.at.mkdir()
        self._file = Path(tempfile.mkdtemp(prefix="kvb-disk-", dir="/dev/shm")) / "device"
        self._file.touch()
        os.truncate(self._file, DEVICE_BYTES)
        self._device = _run("losetup", "--find", "--show", str(self._file))
        _run("mkfs.ext4", "-q", "-m", "0", self._device)
        _run("mount", self._device, str(self.at))
        self._group = CGROUP / self._file.parent.name
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, bytes_per_s: int) -> None:
        """Have nobody read more than that."""
        numbers = _run("lsblk", "--noheadings", "--nodeps", "--output", "MAJ:MIN", self._device)
        line = f"{numbers.strip()} {bytes_per_s}"
        (self._group / "blkio.throttle.read_bps_device").write_text(line)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Meanwhile, let nothing through for `STALL_S`, again and again."""
        over = threading.Event()

        def hang() -> None:
            while not over.is_set():
                self.limit(1)
                over.wait(STALL_S)
                self.limit(UNLIMITED)
                over.wait(STALL_EVERY_S - STALL_S)

        thread = threading.Thread(target=hang)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def fail(self) -> None:
        """Have each access end with EIO from now on: the device lost what lies behind it."""
        os.truncate(self._file, 0)
        _run("losetup", "--set-capacity", self._device)

    def close(self) -> None:
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(pid)
        for command in (("umount", "--lazy", str(self.at)), ("losetup", "--detach", self._device)):
            subprocess.run(command, check=False)
        shutil.rmtree(self._file.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._group.rmdir()


@dataclass(slots=True)
class Asked:
    """One answer, and in which state of the disk it was given."""

    state: str
    variant: str
    prompt: tuple[int, int]
    """Which turn's, and its number there."""
    answer: Any


def measure(model: Path, dtype: str, out: Path, turns: int, seed: int) -> list[Row]:
    """Ask all variants in all states of the disk; `REQUESTS` in each state and turn."""
    asked: list[Asked] = []
    for turn in range(turns):
        folder = out / f"{NAME}-{turn + 1}"
        with tempfile.TemporaryDirectory(prefix="kvb-") as name, contextlib.ExitStack() as parts:
            where = Path(name)
            disk = parts.enter_context(contextlib.closing(Disk(where)))
            engines = _engines(parts, disk, model, dtype, folder, where)
            _ask_all(disk, engines, random.Random(seed + turn), turn, asked)
    return rows(asked)


def _engines(
    parts: contextlib.ExitStack, disk: Disk, model: Path, dtype: str, out: Path, where: Path
) -> dict[str, EngineProcess]:
    """Start a store for each variant, and its engine."""
    words = "--disk", str(disk.at), "--disk-size", str(DISK_BYTES), "--disk-write", "through"
    engines: dict[str, EngineProcess] = {}
    for number, variant in enumerate(VARIANTS):
        folder, run_dir = out / str(number), where / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700)
        place = Place(folder, run_dir, MEMORY_BYTES, 1, Path())
        more = words if variant == WITH_DISK else ()
        store = start_none(place) if variant == REFERENCE else start_kvstore(place, *more)
        parts.callback(store.close)
        how = EngineSettings(
            connector=store.connector,
            dtype=dtype,
            kv_blocks=KV_BLOCKS,
            max_model_len=PROMPT_TOKENS + BLOCK_TOKENS,
            cpus=CPU,
        )
        engines[variant] = parts.enter_context(EngineProcess(model, how, folder / "engine.log"))
    return engines


def _ask_all(
    disk: Disk,
    engines: dict[str, EngineProcess],
    source: random.Random,
    turn: int,
    asked: list[Asked],
) -> None:
    prompts = [
        [source.randrange(RESERVED_TOKENS, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(PROMPTS)
    ]
    for state in (SAVED, *STATES):
        if state == BROKEN:
            disk.fail()
        else:
            disk.limit(RATES.get(state, UNLIMITED))
        order = [*range(PROMPTS)] if state == SAVED else _drawn(source)
        with disk.hanging() if state == STALLED else contextlib.nullcontext():
            for number, prompt in enumerate(order):
                first = number % len(VARIANTS)
                for variant in VARIANTS[first:] + VARIANTS[:first]:
                    (answer,) = engines[variant].generate([prompts[prompt]], MAX_TOKENS)
                    asked.append(Asked(state, variant, (turn, prompt), answer))
                    if variant != REFERENCE:
                        engines[variant].drain()
        for row in rows([one for one in asked if one.state in (SAVED, state)]):
            print(f"bench serve: {row}", file=sys.stderr, flush=True)


def _drawn(source: random.Random) -> list[int]:
    """Return prompts by chance, none after itself."""
    order = [source.randrange(PROMPTS)]
    while len(order) < REQUESTS:
        order.append((order[-1] + source.randrange(1, PROMPTS)) % PROMPTS)
    return order


def rows(asked: Sequence[Asked]) -> list[Row]:
    """Return a row for each state and variant; ratios are to the better one without a disk."""
    right = {one.prompt: one.answer.tokens for one in asked if one.variant == REFERENCE}
    made: list[Row] = []
    for state in STATES:
        of_state = [one for one in asked if one.state == state]
        for variant in VARIANTS if of_state else ():
            own = [one for one in of_state if one.variant == variant]
            row: Row = {"disk": state, "variant": variant, "requests": len(own)}
            for percent in (50, 99):
                took = {
                    name: percentile(
                        [one.answer.ttft_s for one in of_state if one.variant == name], percent
                    )
                    for name in VARIANTS
                }
                row[f"ttft_s_p{percent}"] = round(took[variant], 3)
                row[f"p{percent}_ratio"] = round(
                    took[variant] / min(took[REFERENCE], took[OURS]), 2
                )
            cached = sum(one.answer.cached_tokens for one in own)
            row["hit"] = round(cached / (len(own) * PROMPT_TOKENS), 3)
            row["other"] = sum(one.answer.tokens != right[one.prompt] for one in own)
            made.append(row)
    return made


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
