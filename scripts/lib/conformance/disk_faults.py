"""Asks what the disk backends of stores give after faults: `python scripts/lib
conformance.disk_faults --help`.

Each fault has a folder of its own. Blocks with known bytes are put into the backend by its own
lowest interface (`disk_backends.py`, in a process of the environment that has it), the fault
befalls its files, and a new process is asked for them all. While-running faults befall a backend
that goes on to put and get. Every answer is compared with the bytes of its key.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from json import dumps, loads
from pathlib import Path
from typing import Any, NamedTuple

from conformance.bench import ROOT
from conformance.disk_backends import BACKENDS, BLOCK_BYTES, digest, value
from conformance.results import PAGE, between, plain

sys.path.insert(0, str(ROOT))
from benchmarks.serving.peers_venv import libraries

QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu"}
PROGRAM = Path(__file__).with_name("disk_backends.py")
KEYS, MORE = range(16), range(16, 48)
"""What is put before a fault, and after it by what goes on."""
TABLE_TRIES = 4
HEADER_BYTES_MAX = 4096
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 180.0, 120.0
MIB = 1 << 20
SMALL_BYTES, SPARE_BYTES, INODES = 40 * MIB, 1 * MIB, 256

RIGHT, MISS, ERROR, WRONG = "right", "miss", "error", "WRONG BYTES"
HANGS, DIES, REFUSED = "CALL HANGS", "PROCESS DIES", "refused at start"
APPLIES_NOT, NOT_RUN = "does not apply", "not run"
BAD = (WRONG, HANGS, DIES)

RESULTS = PAGE.with_name("conformance_disks.json")
BEGIN = "<!-- made by scripts/conformance --disks --publish: not edited down to its end -->"
END = "<!-- end of what is made of disks -->"
NOTHING, OLDER = "nothing", "disk of the release before"

Results = dict[str, dict[str, Any]]
"""By backend: its version, the day and the command, and what was said of each fault."""
Answer = Any
"""Digest of what was given, None for a miss, or {"error": text}."""


class Verdict(NamedTuple):
    said: str
    many: int = 0
    of: int = 0
    detail: str = ""
    version: str = ""
    """Of the backend."""

    def __str__(self) -> str:
        return f"{self.said} ({self.many} of {self.of})" if self.of else self.said


class StoppedError(Exception):
    """A fault ended with something else than answers: `StoppedError(said, detail)`."""


def judge(asked: Sequence[tuple[int, Answer]], versions: dict[int, int]) -> Verdict:
    """Judge answers by the version of each key that was put last. What is not the bytes of its key
    is wrong, whatever else is among the answers; then what hangs, errors and misses are told."""
    kinds = [_kind(answer, key, versions) for key, answer in asked]
    for kind in (WRONG, HANGS, ERROR, MISS):
        if kind in kinds:
            errors = [one["error"] for _, one in asked if isinstance(one, dict)]
            return Verdict(kind, kinds.count(kind), len(kinds), errors[0] if errors else "")
    return Verdict(RIGHT, len(kinds), len(kinds))


def _kind(answer: Answer, key: int, versions: dict[int, int]) -> str:
    if answer is None:
        return MISS
    if isinstance(answer, dict):
        return HANGS if "TimeoutError" in answer["error"] else ERROR
    right = key in versions and answer == digest(value(key, versions[key]))
    return RIGHT if right else WRONG


class Peer(NamedTuple):
    """A backend, and where it is."""

    backend: str
    python: str
    path: str = ""
    """PYTHONPATH."""
    older: str | None = None
    """The same of its release before."""


@cache
def template(backend: str, python: str, path: str) -> subprocess.Popen[str]:
    """Start what has imported a backend, and forks a process for each line; it ends with this
    one."""
    more = {"PYTHONPATH": path, "LD_LIBRARY_PATH": libraries(Path(python).parents[1])}
    return subprocess.Popen(
        [python, str(PROGRAM), backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **QUIET, **more},
    )


class Running:
    """A process with a backend on a folder."""

    def __init__(self, peer: Peer, folder: Path, work: Path, host: str = "") -> None:
        self._log = work / "log"
        number = sum(1 for _ in work.glob("socket*"))
        at = work / f"socket{number}"
        parent = template(peer.backend, peer.python, peer.path)
        assert parent.stdin is not None
        assert parent.stdout is not None
        with socket.create_server(str(at), family=socket.AF_UNIX) as listener:
            listener.settimeout(START_TIMEOUT_S)
            print(
                dumps([str(folder), str(at), str(self._log), host]), file=parent.stdin, flush=True
            )
            self._pid = int(parent.stdout.readline())
            self._channel = listener.accept()[0]
        self._lines = self._channel.makefile("rw")
        try:
            self.version = self._answer(START_TIMEOUT_S)
            if self.version is None:
                raise StoppedError(REFUSED, self._last_words())
        except BaseException:
            self.kill()
            raise

    def put(self, keys: Sequence[int], version: int = 1) -> list[Any]:
        return self._ask("put", version, keys)

    def get(self, keys: Sequence[int]) -> list[tuple[int, Answer]]:
        return list(zip(keys, self._ask("get", 0, keys), strict=True))

    def _ask(self, what: str, version: int, keys: Sequence[int]) -> list[Any]:
        with contextlib.suppress(BrokenPipeError):
            print(dumps([what, version, [*keys]]), file=self._lines, flush=True)
        said: list[Any] | None = self._answer(ANSWER_TIMEOUT_S)
        if said is None:
            raise StoppedError(DIES, self._last_words())
        return said

    def _answer(self, timeout_s: float) -> Any:
        """Return the next line, None where the process has ended. Raises `StoppedError`."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            raise StoppedError(HANGS, f"no answer in {timeout_s:.0f} s")
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return loads(line) if line else None

    def _last_words(self) -> str:
        self._await(ANSWER_TIMEOUT_S)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def _await(self, timeout_s: float) -> None:
        """Wait for the end of the process, no longer than that. Its parent reaps it."""
        give_up_at = time.monotonic() + timeout_s
        while Path(f"/proc/{self._pid}").exists() and time.monotonic() < give_up_at:
            time.sleep(0.01)

    def close(self) -> None:
        """Have it end by itself: what it writes at its end is written."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        self._await(ANSWER_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._await(ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._channel.close()


class Place(NamedTuple):
    """Where the bytes of a key lie, and where what is before them in the file begins."""

    path: Path
    header: int
    start: int


@dataclass
class Trial:
    """One fault of one backend."""

    peer: Peer
    work: Path
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    asked: list[tuple[int, Answer]] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    refused_puts: int = 0
    version: str = ""

    def __post_init__(self) -> None:
        self.at = self.work / "disk"
        self.at.mkdir()

    @contextlib.contextmanager
    def running(
        self, at: Path | None = None, peer: Peer | None = None, host: str = ""
    ) -> Iterator[Running]:
        one = Running(peer or self.peer, at or self.at, self.work, host)
        self.version = one.version
        try:
            yield one
            one.close()
        finally:
            one.kill()

    def put(self, one: Running, keys: Sequence[int], version: int = 1) -> None:
        self.versions |= dict.fromkeys(keys, version)
        taken = one.put(keys, version)
        if any(isinstance(said, dict) and "TimeoutError" in said["error"] for said in taken):
            raise StoppedError(HANGS, "a put is never answered")
        self.refused_puts += len(keys) - taken.count(True)

    def get(self, one: Running, keys: Sequence[int]) -> None:
        self.asked += one.get(keys)

    def fill(self, at: Path | None = None, keys: Sequence[int] = KEYS) -> None:
        with self.running(at) as one:
            self.put(one, keys)

    def read(self, keys: Sequence[int] = KEYS, at: Path | None = None, **how: Any) -> None:
        with self.running(at, **how) as one:
            self.get(one, keys)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self.at.rglob("*")) if path.is_file()}

    def places(self, version: int = 1, keys: Sequence[int] = KEYS) -> dict[int, Place]:
        """Find the blocks in the files, whatever their format is."""
        files = self.files()
        found: dict[Path, dict[int, int]] = {path: {} for path in files}
        for key in keys:
            for path, raw in files.items():
                if (start := raw.find(value(key, version))) >= 0:
                    found[path][start] = key
        places = {}
        for path, keyed in found.items():
            end = 0
            for start, key in sorted(keyed.items()):
                places[key] = Place(path, max(end, start - HEADER_BYTES_MAX), start)
                end = start + BLOCK_BYTES
        if not places:
            raise StoppedError(NOT_RUN, "no block is found in its files")
        return places

    def verdict(self) -> Verdict:
        said = judge(self.asked, self.versions)
        puts = f"{self.refused_puts} puts refused" if self.refused_puts else ""
        detail = "; ".join(one for one in (puts, said.detail) if one)
        return said._replace(detail=detail, version=self.version)


def write(path: Path, start: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(raw)


def flip(trial: Trial, path: Path, start: int, end: int) -> int:
    """Flip a bit of a byte there that is not 0. Return how many bits: 1 or none."""
    raw = path.read_bytes()
    if not (there := [at for at in range(start, end) if raw[at]]):
        return 0
    at = trial.rng.choice(there)
    write(path, at, bytes([raw[at] ^ 1 << trial.rng.randrange(8)]))
    return 1


def nothing(trial: Trial) -> None:
    trial.fill()
    trial.read()


def flipped_payloads(trial: Trial) -> None:
    trial.fill()
    for place in trial.places().values():
        flip(trial, place.path, place.start, place.start + BLOCK_BYTES)
    trial.read()


def flipped_headers(trial: Trial) -> None:
    trial.fill()
    if not sum(flip(trial, *place) for place in trial.places().values()):
        raise StoppedError(APPLIES_NOT, "its blocks have no header")
    trial.read()


def flipped_tables(trial: Trial) -> None:
    """A bit of each MiB that is neither a block nor its header, several times over."""
    trial.fill()
    whole = trial.files()
    headed = [(one.path, one.header, one.start + BLOCK_BYTES) for one in trial.places().values()]
    for _ in range(TABLE_TRIES):
        flips = 0
        for path, raw in whole.items():
            path.write_bytes(raw)
            of_blocks = sorted((a, b) for where, a, b in headed if where == path)
            for start, (end, _) in zip(
                [0, *(b for _, b in of_blocks)], [*of_blocks, (len(raw), 0)], strict=True
            ):
                flips += sum(
                    flip(trial, path, at, min(at + MIB, end)) for at in range(start, end, MIB)
                )
        if not flips:
            raise StoppedError(APPLIES_NOT, "it keeps nothing but blocks")
        trial.read()


def other_payloads(trial: Trial) -> None:
    """The bytes of two blocks change places, but for what is before them."""
    trial.fill()
    _exchange(list(trial.places().values()), lambda place: place.start)
    trial.read()


def other_records(trial: Trial) -> None:
    """The same with what is before them: a whole record, with the checksum that is right for it."""
    trial.fill()
    _exchange(list(trial.places().values()), lambda place: place.header)
    trial.read()


def _exchange(places: Sequence[Place], start: Callable[[Place], int]) -> None:
    raws = [one.path.read_bytes()[start(one) : one.start + BLOCK_BYTES] for one in places]
    for place, raw in zip(places, [*raws[1:], raws[0]], strict=True):
        write(place.path, place.start + BLOCK_BYTES - len(raw), raw)


def old_versions(trial: Trial) -> None:
    """The records of a key's former bytes are back in the place of the newer ones."""
    trial.fill()
    old = {
        key: one.path.read_bytes()[one.header : one.start + BLOCK_BYTES]
        for key, one in trial.places().items()
    }
    with trial.running() as one:
        trial.put(one, KEYS, 2)
    try:
        places = trial.places(2)
    except StoppedError:
        raise StoppedError(APPLIES_NOT, "it keeps the first bytes of a key") from None
    for key, place in places.items():
        write(place.path, place.start + BLOCK_BYTES - len(old[key]), old[key])
    trial.read()


def lost_writes(trial: Trial) -> None:
    """The second half of each block never arrived."""
    trial.fill()
    for place in trial.places().values():
        write(place.path, place.start + BLOCK_BYTES // 2, bytes(BLOCK_BYTES // 2))
    trial.read()


def while_running(befall: Callable[[Trial], None]) -> Callable[[Trial], None]:
    """What a backend gives that goes on, and a new process afterwards."""

    def run(trial: Trial) -> None:
        with trial.running() as one:
            trial.put(one, KEYS)
            befall(trial)
            trial.get(one, KEYS)
            trial.put(one, MORE)
            trial.get(one, MORE)
        trial.read([*KEYS, *MORE])

    return run


def fill_up(trial: Trial) -> None:
    free = os.statvfs(trial.at).f_bavail * os.statvfs(trial.at).f_frsize
    (trial.at / "of-others").write_bytes(bytes(max(free - SPARE_BYTES, 0)))


def use_inodes(trial: Trial) -> None:
    with contextlib.suppress(OSError):
        for number in range(2 * INODES):
            (trial.at / f"of-others-{number}").touch()


def make_read_only(trial: Trial) -> None:
    """Have the file system find an error, and do what it does then."""
    device = trial.at.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    Path("/sys/fs/ext4", name, "trigger_fs_error").write_text("1")


def of_files(change: Callable[[Path, Place], None]) -> Callable[[Trial], None]:
    """Befall the files that have blocks, each with a place in the middle of it."""

    def befall(trial: Trial) -> None:
        by_path: dict[Path, list[Place]] = {}
        for place in trial.places().values():
            by_path.setdefault(place.path, []).append(place)
        for path, places in by_path.items():
            change(path, sorted(places)[len(places) // 2])

    return befall


def replace(path: Path, place: Place) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(bytes(path.stat().st_size))
    new.replace(path)


def on_small_disk(fault: Callable[[Trial], None]) -> Callable[[Trial], None]:
    """On an ext4 of its own."""

    def run(trial: Trial) -> None:
        image = trial.work / "image"
        image.touch()
        os.truncate(image, SMALL_BYTES)
        for words in (
            ["mkfs.ext4", "-q", "-m", "0", "-N", str(INODES), str(image)],
            ["mount", "-o", "loop,errors=remount-ro", str(image), str(trial.at)],
        ):
            if (done := subprocess.run(words, capture_output=True, text=True)).returncode:
                raise StoppedError(NOT_RUN, f"no file system can be mounted: {done.stderr.strip()}")
        try:
            fault(trial)
        finally:
            subprocess.run(["umount", "-l", str(trial.at)], check=False)

    return run


def quota(trial: Trial) -> None:
    """Not written: where this was made no file system with quotas could be mounted to try it on."""
    raise StoppedError(NOT_RUN, "this command sets no quota yet")


def other_host(trial: Trial) -> None:
    """Copied to another folder of a host with another name."""
    trial.fill()
    copy = trial.work / "copy"
    shutil.copytree(trial.at, copy)
    trial.read(at=copy, host="other")


def older_release(trial: Trial) -> None:
    if trial.peer.older is None:
        raise StoppedError(NOT_RUN, "no older release")
    with trial.running(peer=trial.peer._replace(path=trial.peer.older)) as one:
        trial.put(one, KEYS)
    trial.read()


def two_at_once(trial: Trial) -> None:
    with trial.running() as one, trial.running() as other:
        trial.put(one, KEYS)
        trial.put(other, MORE)
        for each in (one, other):
            trial.get(each, [*KEYS, *MORE])
    trial.read([*KEYS, *MORE])


def swapped(trial: Trial) -> None:
    """A process finds another one's disk in the place of its own."""
    other = trial.work / "other"
    other.mkdir()
    trial.fill()
    trial.fill(other, MORE)
    trial.read([*KEYS, *MORE], at=other)


def swapped_while_running(trial: Trial) -> None:
    """A drive comes back as another one: its files, and what is in those of the same name."""
    other = trial.work / "other"
    other.mkdir()
    trial.fill(other, MORE[: len(KEYS)])
    with trial.running() as one:
        trial.put(one, KEYS)
        theirs = {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
        for path in trial.files():
            if path.relative_to(trial.at) not in theirs:
                path.unlink()
        for name in theirs:
            (trial.at / name).parent.mkdir(parents=True, exist_ok=True)
            (trial.at / name).touch()
            write(trial.at / name, 0, (other / name).read_bytes())
        trial.get(one, KEYS)
    trial.read()


FAULTS: dict[str, Callable[[Trial], None]] = {
    NOTHING: nothing,
    "bits: payload": flipped_payloads,
    "bits: header of a block": flipped_headers,
    "bits: tables and logs": flipped_tables,
    "another key's bytes": other_payloads,
    "another key's record": other_records,
    "an old version": old_versions,
    "half a block never written": lost_writes,
    "disk full": on_small_disk(while_running(fill_up)),
    "no quota left": quota,
    "no inodes left": on_small_disk(while_running(use_inodes)),
    "read-only": on_small_disk(while_running(make_read_only)),
    "files cut": while_running(of_files(lambda path, at: os.truncate(path, at.start + 5000))),
    "files removed": while_running(of_files(lambda path, at: path.unlink())),
    "files replaced by zeros": while_running(of_files(replace)),
    "disk of another host": other_host,
    OLDER: older_release,
    "two processes, one disk": two_at_once,
    "disks swapped": swapped,
    "disks swapped while running": swapped_while_running,
}


def verdict_of(peer: Peer, name: str) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="kvc-disk-") as work:
        trial = Trial(peer, Path(work))
        try:
            FAULTS[name](trial)
        except StoppedError as stopped:
            wrong = judge(trial.asked, trial.versions)
            said, detail = stopped.args
            ended = wrong if wrong.said == WRONG else Verdict(said, detail=detail)
            return ended._replace(version=trial.version)
        return trial.verdict()


def enter(results: Results, backend: str, run: tuple[str, str], name: str, said: Verdict) -> None:
    column = results.setdefault(backend, {"faults": {}})
    if name != OLDER and said.version:
        column["version"] = said.version
    column |= {"day": run[0], "command": run[1]}
    faults = column["faults"] | {name: [str(said), plain(said.detail)]}
    column["faults"] = {one: faults[one] for one in FAULTS if one in faults}


def table(results: Results) -> str:
    lines = ["| fault | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for name in FAULTS:
        said = [one["faults"].get(name, [""])[0] for one in results.values()]
        cells = [f"**{one.lower()}**" if one.startswith(BAD) else one for one in said]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for backend, column in results.items():
        run = f", {column['day']}: `{column['command']}`" if "command" in column else ""
        lines.append(f"- **{backend}**, {column['version']}{run}")
        lines += [f"  - {name}: {why}" for name, (_, why) in column["faults"].items() if why]
    return "\n".join(lines) + "\n"


def on_page(page: str, results: Results) -> str:
    return between(page, BEGIN, END, table(results))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/conformance --disks")
    parser.add_argument("backend", choices=list(BACKENDS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--path", default="", help="PYTHONPATH of the backend")
    parser.add_argument("--older", help="PYTHONPATH of its release before")
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args(argv)
    peer = Peer(args.backend, args.python, args.path, args.older)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    bad = False
    for name in args.only or FAULTS:
        said = verdict_of(peer, name)
        bad |= said.said in BAD or (name == NOTHING and said.said != RIGHT)
        print(f"{name:30}{said!s:28}{said.detail}", flush=True)
        if args.publish:
            results = loads(RESULTS.read_text()) if RESULTS.exists() else {}
            command = f"scripts/conformance --disks {args.backend}"
            enter(results, args.backend, (day, command), name, said)
            RESULTS.write_text(dumps(results, indent=1) + "\n")
            PAGE.write_text(on_page(PAGE.read_text(), results))
        if name == NOTHING and said.said != RIGHT:
            break  # no other fault would say anything
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
