"""Runs containers of a Kubernetes manifest as a kubelet does, but for the image and the network.

A container's process is the first of a process namespace, in mount, host name and IPC namespaces of
its own, with its pod's volumes at their places, the environment and arguments that the manifest
says, its user and no privileges. Its root is this machine's, read-only, and its network the host's.
Needs root and util-linux.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from other_users import command_as

TIMEOUT_S = 60.0
UMASK = "os.umask(0o022)\n"
"""That of a container."""

# The mounts of a namespace end with it, and nothing here reaches the machine's own.
_ENTER = """
set -e
hostname "$POD_NAME"
eval "$POD_MOUNTS"
unset POD_NAME POD_MOUNTS
mount -o remount,bind,ro /
exec "$@"
"""
_UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")


def mount_shm(path: Path, size: str, *, group: int | None = None) -> None:
    """Mount memory at `path`: a host's /dev/shm, or, where its pod has a `group` (`fsGroup`), an
    `emptyDir`."""
    path.mkdir(parents=True)
    rights = "mode=1777" if group is None else f"mode=2777,gid={group}"
    options = f"{rights},size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "shm", str(path)], check=True)


@dataclass
class Pod:
    """One life of a pod of a manifest's template."""

    spec: Mapping[str, Any]
    name: str
    volumes: Mapping[str, Path]
    """Of its volumes, those that are mounted here, and what of the host they are."""
    values: Mapping[str, str]
    """What the manifest takes from fields and secrets, by the variable's name; other values of
    variables, which stand for what is in the cluster, by the value."""
    network: Sequence[str] = ()
    """What is put before a command to run it in the host's network."""

    def container(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = next(
            container
            for kind in ("initContainers", "containers")
            for container in self.spec.get(kind, ())
            if container["name"] == name
        )
        return found

    def command(self, container: str, code: str) -> tuple[list[str], dict[str, str]]:
        """The command and the environment that run the Python `code` in the container; it finds
        the container's arguments as `args`."""
        of = self.container(container)
        env = {entry["name"]: self._value(entry) for entry in of["env"]}
        argv = [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in of["args"]]
        mounts = [
            shlex.join(["mount", "--bind", str(self.volumes[m["name"]]), m["mountPath"]])
            for m in of["volumeMounts"]
            if m["name"] in self.volumes
        ]
        program = command_as(self.spec["securityContext"]["runAsUser"], UMASK + code, argv)
        words = [*self.network, *_UNSHARE, "--kill-child", "--", "sh", "-c", _ENTER, "sh", *program]
        ours = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        return words, {**ours, **env, "POD_NAME": self.name, "POD_MOUNTS": "\n".join(mounts)}

    def _value(self, entry: Mapping[str, Any]) -> str:
        if "valueFrom" in entry:
            return self.values[entry["name"]]
        return self.values.get(entry["value"], entry["value"])

    @contextmanager
    def running(self, container: str, code: str, **options: Any) -> Iterator[Started]:
        """The container with `code` as its program, killed at the end if it is still there."""
        words, env = self.command(container, code)
        process = subprocess.Popen(words, env=env, text=True, **options)
        with process:
            try:
                yield Started(process)
            finally:
                process.kill()


@dataclass
class Started:
    """A container that runs."""

    process: subprocess.Popen[str]

    def signal(self, number: signal.Signals) -> None:
        """Send the container's first process a signal."""
        os.kill(self._first(), number)

    def _first(self) -> int:
        """That process, which `unshare` started; `nsenter` became `unshare`."""
        pid = self.process.pid
        give_up_at = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up_at:
            with suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if children:
                    return int(children[0])
            time.sleep(0.01)
        raise AssertionError("the container has no process")
