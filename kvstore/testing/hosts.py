"""Makes several hosts of one machine: network namespaces with an address each, joined by a switch.

Everything lies inside the namespaces, the switch too, so nothing of this machine's own
network changes and any number of such clusters may exist at once. Needs root and the
`ip` and `nsenter` commands (iproute2, util-linux).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from kvstore.errors import UsageError
from kvstore.system.on_failure import on_failure
from kvstore.testing.stopping import stop

HOSTS_MAX = 26
"""One letter each."""
COMMAND_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0
SWITCH = "switch"
_NETWORK = "10.213.0"
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:ff"
"""A hardware address that no interface has: frames to it arrive nowhere."""


def why_not() -> str | None:
    """Return what this machine lacks for `Hosts`, None when nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "nsenter"):
        if shutil.which(command) is None:
            return f"there is no `{command}` command"
    probe = f"kvprobe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise OSError(f"ip {' '.join(arguments)}: no end within {COMMAND_TIMEOUT_S:.0f} s") from e
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _setns(fd: int) -> None:
    """Do what `os.setns` does, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


class Hosts:
    """Owns hosts "a", "b", … and the namespace "switch" where what all of them share may run.

    `name` tells clusters apart. Frames between two hosts pass the switch's bridge, so
    every pair can be cut in one direction or both without the other pairs noticing.
    """

    def __init__(self, count: int, *, name: str | None = None) -> None:
        if not 1 <= count <= HOSTS_MAX:
            raise UsageError("count", count, f"must be 1 to {HOSTS_MAX}")
        self.name = name or f"kv{os.getpid()}"
        self.names = [chr(ord("a") + i) for i in range(count)]

    @classmethod
    def existing(cls, name: str) -> Self:
        """Return the cluster `name` that another process has made."""
        spaces = set(_ip("netns", "list").split())
        count = sum(f"{name}-{chr(ord('a') + i)}" in spaces for i in range(HOSTS_MAX))
        if not count:
            raise UsageError("name", name, "there is no such cluster on this machine")
        return cls(count, name=name)

    def space(self, host: str) -> str:
        """Return the namespace of a host, as `ip netns` knows it."""
        if host != SWITCH and host not in self.names:
            raise UsageError("host", host, f"must be one of {', '.join([*self.names, SWITCH])}")
        return f"{self.name}-{host}"

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host; that of "switch" is reached from all of them."""
        self.space(host)
        return f"{_NETWORK}.{1 if host == SWITCH else 10 + self.names.index(host)}"

    # --- making and removing ------------------------------------------------

    def start(self) -> None:
        """Make the hosts and their links. Raises `OSError` with what `ip` said; then nothing is
        left behind. Raises `UsageError` when there is such a cluster, which stays as it is."""
        if self.space(SWITCH) in _ip("netns", "list").split():
            raise UsageError("name", self.name, "there is such a cluster already")
        with on_failure(self.close):
            self._start()

    def _start(self) -> None:
        switch = self.space(SWITCH)
        self._space(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "addr", "add", f"{self.address(SWITCH)}/24", "dev", "br0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in self.names:
            space = self.space(host)
            self._space(space)
            port = f"to-{host}"
            wire = ("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", space, *wire)
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")

    @staticmethod
    def _space(space: str) -> None:
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")

    def close(self) -> None:
        """Kill every process on the hosts and remove them. Safe to call twice."""
        there = set(_ip("netns", "list").split())
        for host in (*self.names, SWITCH):
            space = self.space(host)
            if space not in there:
                continue
            with suppress(OSError):
                self._kill_all(host)
            with suppress(OSError):
                _ip("netns", "del", space)

    def _kill_all(self, host: str) -> None:
        give_up_at = time.monotonic() + END_TIMEOUT_S
        while (pids := self.pids(host)) and time.monotonic() < give_up_at:
            self._signal(pids, signal.SIGKILL)
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- processes ----------------------------------------------------------

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return `argv` as it must be started to run on `host`; the process keeps its pid."""
        return ["nsenter", f"--net=/run/netns/{self.space(host)}", "--", *argv]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on `host`; `options` are those of `subprocess.Popen`.

        It has arrived there on return: `close` and `pause` will find it.
        """
        process = subprocess.Popen(self.command(host, argv), **options)
        network = Path(f"/run/netns/{self.space(host)}").stat().st_ino
        give_up_at = time.monotonic() + COMMAND_TIMEOUT_S
        while process.poll() is None and time.monotonic() < give_up_at:
            with suppress(FileNotFoundError):
                if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == network:
                    break
            time.sleep(0.001)
        return process

    def enter(self, host: str) -> None:
        """Put the calling thread, and what it starts from here on, on `host`. Raises `OSError`."""
        with Path(f"/run/netns/{self.space(host)}").open("rb") as there:
            _setns(there.fileno())

    @contextmanager
    def visit(self, host: str) -> Iterator[None]:
        """Keep the calling thread, and what it starts meanwhile, on `host`.

        Leave before `close`, which would kill the visitor. Raises `OSError`.
        """
        with Path("/proc/thread-self/ns/net").open("rb") as home:
            self.enter(host)
            try:
                yield
            finally:
                _setns(home.fileno())

    def pids(self, host: str) -> list[int]:
        """Return the processes that run on `host`; a dead one that nobody waited for is not among
        them."""
        pids = map(int, _ip("netns", "pids", self.space(host)).split())
        return [pid for pid in pids if not _is_zombie(pid)]

    def pause(self, host: str) -> None:
        """Stop every process on `host` (SIGSTOP): its kernel still acknowledges, nobody answers."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                stop(pid)

    def resume(self, host: str) -> None:
        """Let every process on `host` go on after `pause`."""
        self._signal(self.pids(host), signal.SIGCONT)

    @staticmethod
    def _signal(pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # --- the network ----------------------------------------------------------

    def cut(self, source: str, target: str, *, one_way: bool = False) -> None:
        """Lose silently what `source` sends to `target`; without `one_way` the answers too."""
        self._next_hop(source, target, "replace", "lladdr", _NOBODY, "nud", "permanent")
        if not one_way:
            self.cut(target, source, one_way=True)

    def join(self, source: str, target: str) -> None:
        """Undo `cut`, in both directions."""
        for one, other in ((source, target), (target, source)):
            with suppress(OSError):  # it was not cut in this direction
                self._next_hop(one, other, "del")

    def _next_hop(self, source: str, target: str, verb: str, *rest: str) -> None:
        device = "br0" if source == SWITCH else "eth0"
        space, to = self.space(source), self.address(target)
        _ip("-n", space, "neigh", verb, to, "dev", device, *rest)

    def isolate(self, host: str) -> None:
        """Pull the host's cable at the switch."""
        _ip("-n", self.space(SWITCH), "link", "set", f"to-{host}", "down")

    def rejoin(self, host: str) -> None:
        """Undo `isolate`. Nobody remembers whom it could not find meanwhile: a kernel
        answers "no route to host" for seconds out of that memory."""
        _ip("-n", self.space(SWITCH), "link", "set", f"to-{host}", "up")
        for other in (*self.names, SWITCH):
            device = "br0" if other == SWITCH else "eth0"
            _ip("-n", self.space(other), "neigh", "flush", "dev", device)

    @contextmanager
    def isolated(self, host: str) -> Iterator[None]:
        self.isolate(host)
        try:
            yield
        finally:
            self.rejoin(host)


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
