"""`scripts/cluster` runs a Redis, and a memory node on each of k hosts: network namespaces."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services import Service, node_command, redis_command

from kvstore.errors import KVStoreError
from kvstore.rundir import private_dir
from kvstore.testing.hosts import SWITCH, Hosts, why_not

REDIS_PORT = 6379
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
DESCRIPTION = """\
Several hosts on one machine, for tests and trials. Needs root.

  scripts/cluster up --hosts 3              Redis on the switch, a memory node on each host;
                                            stays until Ctrl-C and then leaves nothing behind
  scripts/cluster run a -- kvstore put greeting README.md
  scripts/cluster run b -- kvstore get greeting
  scripts/cluster cut a b [--one-way]       lose a's packets to b (and b's to a), silently
  scripts/cluster join a b                  the end of it
  scripts/cluster isolate a | rejoin a      pull a's cable, put it back
  scripts/cluster pause a | resume a        SIGSTOP, SIGCONT for every process on a
  scripts/cluster down                      remove what a killed `up` left behind
"""


class Places:
    """Says where the processes of a cluster leave their files: one directory for each host."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        # Where others may write, one of them may have been there first.
        ours = Path(tempfile.gettempdir()) / f"kvstore-cluster-{os.geteuid()}"
        self.root = (root or private_dir(ours)) / name

    def host(self, host: str) -> Path:
        path = self.root / host
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def secret(self) -> Path:
        return self.host(SWITCH) / "secret"

    def environment(self, hosts: Hosts, host: str) -> dict[str, str]:
        """Return the variables by which a program on `host` finds the cluster."""
        return {
            **os.environ,
            "KVSTORE_URL": f"redis://{hosts.address(SWITCH)}:{REDIS_PORT}/0",
            "KVSTORE_RUN_DIR": str(self.host(host)),
            "KVSTORE_SECRET": self.secret.read_text(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }


def start(hosts: Hosts, places: Places, size: str, options: Sequence[str] = ()) -> list[Service]:
    """Start Redis on the switch, then a node on every host; all answer on return."""
    server = start_redis(hosts, places)
    nodes = [start_node(hosts, places, host, size, options) for host in hosts.names]
    for node in nodes:
        wait_ready(node)
    return [server, *nodes]


def start_redis(hosts: Hosts, places: Places) -> Service:
    """Start Redis on the switch, and make the secret that nodes and clients share."""
    places.secret.write_text(secrets.token_hex(32))
    places.secret.chmod(0o600)
    bind = hosts.address(SWITCH)
    directory = places.host(SWITCH)
    options = "--bind", bind, "--port", str(REDIS_PORT), "--protected-mode", "no"
    redis = redis_command(directory, *options)
    return Service(redis, directory / "log", more_log=True, popen=partial(hosts.popen, SWITCH))


def start_node(
    hosts: Hosts, places: Places, host: str, size: str, options: Sequence[str] = ()
) -> Service:
    """Start the memory node of one host; its output is `log` in the host's directory."""
    directory = places.host(host)
    more = "--name", f"node-{host}", "--listen", str(hosts.address(host))
    node = node_command(directory, size, *more, *options)
    env = places.environment(hosts, host)
    return Service(node, directory / "log", env=env, popen=partial(hosts.popen, host))


def wait_ready(node: Service) -> None:
    """Return when the node says in its log that it is ready. Raises `SystemExit` with what it said
    instead."""
    try:
        node.wait(lambda service: "ready" in service.said(), START_TIMEOUT_S)
    except RuntimeError as e:
        raise SystemExit(f"a node did not start: {e}") from e


def stop(services: Sequence[Service]) -> None:
    """End them, nodes first, so that they can say goodbye to Redis."""
    for service in reversed(services):
        service.end(timeout_s=STOP_TIMEOUT_S)


def up(args: argparse.Namespace) -> int:
    hosts, places = Hosts(args.hosts, name=args.name), Places(args.name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with hosts:
        services: list[Service] = []
        try:
            services = start(hosts, places, args.size, args.node_option)
            print(f"Redis on {hosts.address(SWITCH)}:{REDIS_PORT}")
            for host in hosts.names:
                print(f"host {host}: {hosts.address(host)}, files in {places.host(host)}")
            print("try: scripts/cluster run a -- kvstore put greeting README.md", flush=True)
            while all(service.runs for service in services):
                time.sleep(0.5)
            print("a process of the cluster ended; see the logs", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has been heard
            stop(services)


def run(args: argparse.Namespace) -> int:
    hosts, places = Hosts.existing(args.name), Places(args.name)
    command = hosts.command(args.host, args.command)
    os.execvpe(command[0], command, places.environment(hosts, args.host))


def down(args: argparse.Namespace) -> int:
    Hosts.existing(args.name).close()
    return 0


def act(args: argparse.Namespace) -> int:
    """Carry out a verb that is a method of `Hosts`."""
    method = getattr(Hosts.existing(args.name), args.verb)
    options = {"one_way": True} if getattr(args, "one_way", False) else {}
    method(*args.on, **options)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--name", default="kvstore", help="of the cluster (default: %(default)s)")
    verbs = top.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("up")
    verb.add_argument("--hosts", type=int, default=2, metavar="K")
    verb.add_argument("--size", default="256MiB", help="of each node (default: %(default)s)")
    verb.add_argument(
        "--node-option", action="append", default=[], metavar="X", help="for every `kvstore node`"
    )
    verb.set_defaults(do=up)
    verb = verbs.add_parser("run")
    verb.add_argument("host")
    verb.add_argument("command", nargs="+")
    verb.set_defaults(do=run)
    for name in ("cut", "join"):
        verb = verbs.add_parser(name)
        verb.add_argument("on", nargs=2, metavar="HOST")
        if name == "cut":
            verb.add_argument("--one-way", action="store_true")
        verb.set_defaults(do=act)
    for name in ("isolate", "rejoin", "pause", "resume"):
        verb = verbs.add_parser(name)
        verb.add_argument("on", nargs=1, metavar="HOST")
        verb.set_defaults(do=act)
    verbs.add_parser("down").set_defaults(do=down)
    return top


def main() -> int:
    args = parser().parse_args()
    missing = why_not()
    if missing is not None:
        print(f"scripts/cluster: {missing}", file=sys.stderr)
        return 1
    try:
        status: int = args.do(args)
    except (KVStoreError, OSError) as e:
        print(f"scripts/cluster: {e}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    raise SystemExit(main())
