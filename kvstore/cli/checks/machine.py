"""Checks the interpreter, directories, shared memory and limits of this host."""

from __future__ import annotations

import os
import platform
import re
import resource
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvstore.cli.checks.base import Context, Finding, Level, read_text
from kvstore.cli.output import human_bytes
from kvstore.cli.store import local_nodes, on_disks
from kvstore.compiled.fence import CHOSEN
from kvstore.errors import PeerError, UsageError
from kvstore.limits import SHM_RESERVE_BYTES
from kvstore.node.config import SIZE_BYTES_DEFAULT
from kvstore.nodedir import NAME_CHARS_MAX, Announcement, NodeDir, node_dirs, strangers
from kvstore.rundir import RUN_DIR_ENV, run_dir, socket_path
from kvstore.segment.abandoned import HEAD, Segment, foreign_files, segments
from kvstore.segment.cgroup import fitting_size, memory_limit
from kvstore.segment.header import SHM_DIR, header_file_bytes
from kvstore.transport.cuda_memory import NAME as CUDA_IPC
from kvstore.transport.cuda_memory import DeviceAddress

PYTHON_MIN, PYTHON_BELOW = (3, 11), (3, 15)
SHM_BYTES_MIN = 32 << 20
"""Below this no node is of any use."""
SWEEPERS = "nodes, `kvstore up` and clients free it within a minute, or `kvstore node --clean` now"
STARVED_S = 10.0
"""Less is what a busy start takes."""
STARVED_RATIO = 3.0
"""Beside engines that keep every core busy a node gets half of one when it wants it."""
STARVED_REMEDY = (
    "leave it a core, or start it in the session or the control group of what keeps the machine "
    "busy: the kernel gives each session its share, and one process in its own got 3%"
)
MOUNTS = "/proc/self/mountinfo"
HUGE_IN_USE = ("within_size", "always")
"""With `advise` a mapping would have to ask, and pages are had before they are mapped."""
THP_FILE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def python(context: Context) -> list[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return [Finding(Level.FAIL, found, "use Linux: shared memory and locks are Linux's")]
    if not PYTHON_MIN <= sys.version_info[:2] < PYTHON_BELOW:
        do = f"use Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} to 3.{PYTHON_BELOW[1] - 1}"
        return [Finding(Level.FAIL, found, do)]
    return [Finding(Level.OK, f"{found}; memory is kept in order by {CHOSEN.name}")]


def run_directory(context: Context) -> list[Finding]:
    try:
        path = run_dir(context.run_dir)
    except UsageError as e:
        return [Finding(Level.FAIL, str(e), f"name another with --run-dir or {RUN_DIR_ENV}")]
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    found = f"{path}, owner {status.st_uid}, mode {mode:04o}"
    try:
        socket_path(NodeDir(path, "node").socket)
    except UsageError as e:
        return [Finding(Level.FAIL, str(e), f"name a shorter one with --run-dir or {RUN_DIR_ENV}")]
    try:
        socket_path(NodeDir(path, "n" * NAME_CHARS_MAX).socket)
    except UsageError:
        do = "use short node names, or a shorter directory"
        return [Finding(Level.WARN, f"{found}: too long for a socket of every node name", do)]
    return [Finding(Level.OK, found)]


def shared_memory(context: Context) -> list[Finding]:
    try:
        fs = os.statvfs(SHM_DIR)
    except OSError as e:
        return [Finding(Level.FAIL, f"{SHM_DIR}: {e.strerror}", "mount a tmpfs there")]
    try:
        with tempfile.NamedTemporaryFile(dir=SHM_DIR, prefix="kvstore-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, resource.getpagesize())
    except OSError as e:
        do = "give this user the right to write there (mode 1777), or remount it writable"
        return [Finding(Level.FAIL, f"{SHM_DIR} cannot be written to: {e.strerror}", do)]
    size_bytes, free_bytes = fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize
    found = f"{SHM_DIR}: {human_bytes(free_bytes)} free of {human_bytes(size_bytes)}"
    room_bytes = max(free_bytes - SHM_RESERVE_BYTES, 0)
    heads = header_file_bytes(SIZE_BYTES_DEFAULT)
    do = (
        f"a node takes {human_bytes(SIZE_BYTES_DEFAULT)} unless --size says less; enlarge it "
        f"(`mount -o remount,size=...`, `docker run --shm-size`, an emptyDir of medium Memory)"
    )
    if room_bytes < SHM_BYTES_MIN:
        return [Finding(Level.FAIL, found, do)]
    if room_bytes < SIZE_BYTES_DEFAULT + heads:
        return [Finding(Level.WARN, found, do)]
    limit = memory_limit()
    if limit is not None and limit.segment_bytes < SIZE_BYTES_DEFAULT + heads:
        allowed = f"{human_bytes(limit.limit_bytes)} of memory in all ({limit.file})"
        found = f"{found}, but this container may use only {allowed}"
        do = f"shared memory counts: raise its memory limit, or {human_bytes(fitting_size(limit))}"
        return [Finding(Level.WARN, found, f"{do} is what a node takes")]
    return [Finding(Level.OK, found)]


def leftovers(context: Context) -> list[Finding]:
    findings = []
    living: set[str] = set()
    dead: set[str] = set()
    for directory in node_dirs(run_dir(context.run_dir)):
        announcement = directory.announcement()
        files = (
            {announcement.data_path, announcement.head_path} if announcement is not None else set()
        )
        if directory.alive():
            living |= files
            # It notices by itself: one that is ready has them, in a /dev/shm that is not this one.
            if directory.why_not_ready():
                findings += _nameless(directory.name, files)
            continue
        dead |= files
        held = sum(_size_of(name) for name in files)
        waits_s = directory.kept_for_s()
        if waits_s:
            found = (
                f"node {directory.name} is dead; its {human_bytes(held)} wait another "
                f"{waits_s / 60:.0f} min for its next start"
            )
            do = "start it again, or free them: kvstore node --clean"
            findings.append(Finding(Level.WARN, found, do))
            continue
        found = f"node {directory.name} is dead and still holds {human_bytes(held)}"
        findings.append(Finding(Level.WARN, found, SWEEPERS))
    findings += _elsewhere([s for s in segments() if f"{s.base}{HEAD}" not in living | dead])
    for path in foreign_files():
        found = f"{path} belongs to another user, and is called like a segment of this one"
        findings.append(Finding(Level.INFO, f"{found}; it is passed over"))
    return findings or [Finding(Level.OK, f"no segment of a dead node in {SHM_DIR}")]


def _nameless(node: str, files: Iterable[str]) -> list[Finding]:
    """Return what of a living node's memory was removed: who starts later cannot map it."""
    removed = [name for name in sorted(files) if name and not os.path.lexists(name)]
    do = f"restart node {node}; and keep whatever removes files there from {SHM_DIR}/kvstore-*"
    return [
        Finding(Level.FAIL, f"{name} of node {node} was removed: new clients cannot use it", do)
        for name in removed
    ]


def _size_of(name: str) -> int:
    try:
        return Path(name).stat().st_size
    except OSError:
        return 0


def _elsewhere(others: list[Segment]) -> list[Finding]:
    """Return the segments of this user's nodes in other run directories."""
    findings = []
    for segment in others:
        held = f"{segment.base}: {human_bytes(segment.size_bytes)}"
        if segment.owned:
            continue
        if segment.homeless:
            found = f"{held} of a dead node whose directory is gone ({segment.home_named})"
            findings.append(Finding(Level.WARN, found, "free them: kvstore node --clean"))
        elif segment.waits_s:
            found = (
                f"{held} wait another {segment.waits_s / 60:.0f} min for the next start of "
                f"{segment.home_named}"
            )
            findings.append(Finding(Level.INFO, found))
        else:
            found = f"{held} are still held; dead is {segment.home_named}"
            findings.append(Finding(Level.WARN, found, SWEEPERS))
    if living := sum(segment.owned for segment in others):
        found = f"{living} segments in use by nodes of other run directories"
        findings.append(Finding(Level.INFO, found))
    return findings


def memlock(context: Context) -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding(Level.OK, "unlimited")]
    found = f"{human_bytes(soft)} may be locked (ulimit -l)"
    if Path("/dev/infiniband").exists():
        do = "RDMA registers memory by locking it: `ulimit -l unlimited`, `--ulimit memlock=-1`"
        return [Finding(Level.WARN, found, do)]
    return [Finding(Level.INFO, f"{found}; matters for RDMA only, and there is none")]


def huge_pages(context: Context) -> list[Finding]:
    """Return what is in force for files in /dev/shm: the mount's option, unless the kernel's
    setting overrides it, which else is for other shared memory."""
    setting = re.search(r"\[(\w+)\]", read_text(THP_FILE))
    if setting is None:
        return [Finding(Level.INFO, "this kernel has no huge pages for shared memory")]
    if setting[1] in ("force", "deny"):
        return [Finding(Level.INFO, f"{setting[1]} for all shared memory ({THP_FILE})")]
    options = _mount_options(read_text(MOUNTS), str(SHM_DIR))
    huge = next((word[5:] for word in options if word.startswith("huge=")), "never")
    found = f"{SHM_DIR} is mounted with huge={huge}"
    if huge in HUGE_IN_USE:
        return [Finding(Level.OK, found)]
    do = (
        f"before nodes start: mount -o remount,huge={HUGE_IN_USE[0]} {SHM_DIR}; copies of 1 MiB "
        "took a quarter less time with it (docs/decisions/0049)"
    )
    return [Finding(Level.INFO, found, do)]


def _mount_options(mounts: str, where: str) -> list[str]:
    """Options of the file system that is mounted there last (/proc/self/mountinfo)."""
    options: list[str] = []
    for line in mounts.splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[4:5] == [where]:
            options = system.split()[-1].split(",")
    return options


def _ways(announcement: Announcement) -> list[str]:
    """Return how a node's blocks are read."""
    vram = DeviceAddress.parse(announcement.transports.get(CUDA_IPC, ""))
    if vram is not None:
        others = [f"{w} {at}" for w, at in announcement.transports.items() if w != CUDA_IPC]
        return [f"{CUDA_IPC} from the VRAM of {vram.uuid}", *others]
    return ["shm", *(f"{way} {at}" for way, at in announcement.transports.items())]


def starved(pid: int) -> str:
    """Return how a process stood in line for a processor, where that was most of its time; else
    empty, as on a kernel that does not tell."""
    figures = read_text(f"/proc/{pid}/schedstat").split()
    if len(figures) < 2:
        return ""
    ran_s, waited_s = (int(figure) / 1e9 for figure in figures[:2])
    if waited_s < STARVED_S or waited_s < STARVED_RATIO * ran_s:
        return ""
    return f"it ran for {ran_s:.1f} s and stood in line for a processor for {waited_s:.1f} s"


def nodes(context: Context) -> list[Finding]:
    findings = []
    for other in strangers(run_dir(context.run_dir), None):
        do = "start it again with the version that its clients have, or the other way round"
        findings.append(Finding(Level.FAIL, str(other), do))
    for node in local_nodes(run_dir(context.run_dir), None):
        announcement = node.announcement
        said = node.announcement
        name = f"node {said.name} (pid {said.pid}, key prefix {said.key_prefix})"
        try:
            stats = node.stats()
        except PeerError as e:
            do = f"look at its log; it is stopped or hangs: kill {said.pid} and start it again"
            findings.append(Finding(Level.FAIL, f"{name}: {e}", do))
            continue
        used, size = human_bytes(stats["block_bytes"]), human_bytes(stats["capacity_bytes"])
        ways = ", ".join(_ways(announcement))
        found = f"{name}: {stats['blocks']} blocks, {used} of {size}, read by {ways}"
        if stats["recovered"] or stats["recovery_dropped"]:
            found += (
                f"; warm start: {stats['recovered']} recovered, "
                f"{stats['recovery_dropped']} dropped, {stats['quarantined']} quarantined"
            )
        if text := on_disks(stats):
            found += f"; {text}"
        if stats["unpublished"]:
            do = "they cannot be found until Redis takes them: see the check of Redis"
            findings.append(
                Finding(Level.WARN, f"{found}, {stats['unpublished']} not in the index", do)
            )
            continue
        why = starved(said.pid)
        if why:
            findings.append(Finding(Level.WARN, f"{found}; {why}", STARVED_REMEDY))
            continue
        if stats.get("disk_closed"):
            do = "its blocks are misses until it is mended: docs/disk.md, A disk that fails"
            findings.append(Finding(Level.WARN, found, do))
            continue
        findings.append(Finding(Level.OK, found))
    none = "none on this host; `kvstore up` or `kvstore node` starts one"
    return findings or [Finding(Level.INFO, none)]
