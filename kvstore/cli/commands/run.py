"""`kvstore run` starts an engine that uses the store, with Redis and a node where there are none,
and ends with it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvstore.cli import engine_guard
from kvstore.cli.commands.node import add_disks, add_memory, add_stream, disk_options, node_bytes
from kvstore.cli.commands.up import check_memory, wait_for_redis_end
from kvstore.cli.engine_command import config_file, planned
from kvstore.cli.host_node import HostNode
from kvstore.cli.node_table import NodeTable
from kvstore.cli.options import (
    add_store,
    add_verbose,
    log_options,
    no_password,
    run_dir_of,
    start_logging,
)
from kvstore.errors import UsageError
from kvstore.index.embedded_redis.server import resolve_url
from kvstore.index.open import URL_VARIABLE
from kvstore.index.redis.url import parse_url
from kvstore.rundir import RUN_DIR_ENV
from kvstore.system import numa, service_manager
from kvstore.system.last_resort import as_logged
from kvstore.system.small_files import read_small

PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
OF_STREAM = ("listen", "advertise", "open", "nixl", "tls_cert", "tls_key", "tls_ca")
CONFIG_BYTES_MAX = 1 << 20
POLL_S = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvstore run [options] -- vllm serve MODEL ..."
    parser.add_argument(
        "--merge",
        action="store_true",
        help="where the engine has a KV connector already, use both (vLLM's MultiConnector)",
    )
    add_memory(parser)
    add_disks(parser)
    parser.set_defaults(policy=NodeTable().policy, numa=numa.NONE)
    add_store(parser)
    add_stream(parser)
    add_verbose(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="of vLLM (`vllm serve`, `python -m vllm.entrypoints.openai.api_server`) or SGLang "
        "(`sglang serve`, `python -m sglang.launch_server`)",
    )


class RunningEngine:
    """Runs the engine in a process group of its own, which ends with this process."""

    def __init__(self) -> None:
        self.asked = 0
        """The first signal that came before the engine was started."""
        self._process: subprocess.Popen[bytes] | None = None
        for number in PASSED_ON:
            # What `nohup` keeps from us is not for the engine either.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self.asked = self.asked or number
        else:
            self._process.send_signal(number)

    def run(self, command: Sequence[str], env: Mapping[str, str], node: HostNode) -> int:
        """Return the engine's exit code, as a shell shows it, once all its processes are gone."""
        program = [sys.executable, "-I", "-S", engine_guard.__file__]
        guard = subprocess.Popen(program, stdin=subprocess.PIPE, process_group=0)
        assert guard.stdin is not None
        told = guard.stdin.fileno()
        try:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    process_group=0,
                    # Before it is the engine: this process may be killed as soon as it is there.
                    # Of a process with threads, a child does no more than this.
                    preexec_fn=lambda: os.write(told, b"%d\n" % os.getpid()),
                )
            except OSError as e:
                raise UsageError("command", command[0], f"cannot be started: {e.strerror}") from e
            if self.asked:
                self._process.send_signal(self.asked)
            service_manager.say_ready()
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(POLL_S)
                    return code if code >= 0 else 128 - code
                node.tend()
        finally:
            guard.stdin.close()
            guard.wait(2 * engine_guard.GRACE_S)


def run(args: argparse.Namespace) -> int:
    start_logging(args)
    given = args.command[args.command[:1] == ["--"] :]
    if not given:
        raise UsageError("command", "", "is missing: kvstore run -- vllm serve MODEL")
    config = _read_config(config_file(given))
    command = planned(given, config, os.environ, key_prefix=args.key_prefix, merge=args.merge)
    if shutil.which(command[0]) is None:
        raise UsageError("command", command[0], "is not found: is the engine's environment active?")
    numa.chosen(args.numa)
    if args.url:
        parse_url(args.url)
    run_dir = run_dir_of(args)
    engine = RunningEngine()
    with resolve_url(args.url, run_dir=run_dir) as redis:
        _say(f"Redis {no_password(redis.url)} ({redis.source})")
        # A node that finds the embedded Redis by itself holds it, too.
        env = {} if redis.embedded else {URL_VARIABLE: redis.url}
        node = HostNode(redis.url, args.key_prefix, run_dir, _node_options(args), env, _say)
        try:
            node.open(lambda: engine.asked != 0, lambda: check_memory(args, run_dir, [node.name]))
            if engine.asked:
                return 128 + engine.asked
            # What was added, alone: the rest may hold the engine's API key.
            added = shlex.join(word for word in command if word not in given)
            _say(f"starting {given[0]} with {added}")
            env = {**os.environ, URL_VARIABLE: redis.url, RUN_DIR_ENV: str(run_dir)}
            env.pop(service_manager.OURS, None)
            code = engine.run(command, env, node)
        finally:
            node.close()
    if redis.embedded is not None:
        wait_for_redis_end(run_dir, _say)
    return code


def _node_options(args: argparse.Namespace) -> list[str]:
    """Return the options of a node that is started, which is `kvstore node`."""
    options = ["--size", str(node_bytes(args.size)), "--policy", args.policy, "--numa", args.numa]
    options += ["--key-prefix", args.key_prefix, *log_options(args)]
    options += disk_options(args)
    for name in OF_STREAM:
        if (value := getattr(args, name)) is not None:
            options.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return options


def _read_config(path: str | None) -> object:
    """Return what the engine's own file of options says, which is YAML."""
    if path is None:
        return None
    try:
        import yaml

        return yaml.safe_load(read_small(Path(path), CONFIG_BYTES_MAX))
    except ImportError:
        must = "needs PyYAML, to look for a KV connector in it: pip install pyyaml"
        raise UsageError("--config", path, must) from None
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise UsageError("--config", path, f"cannot be read: {e}") from e


def _say(line: str) -> None:
    line = f"kvstore run: {line.removeprefix('kvstore ')}"
    print(as_logged("kvstore.cli.run", line), file=sys.stderr, flush=True)
