"""Runs the `kvstore` command: a subcommand is a file in commands/, imported when asked for."""

from __future__ import annotations

import argparse
import importlib
import io
import keyword
import os
import signal
import sys
from collections.abc import Sequence

from kvstore.errors import KVStoreError, UsageError
from kvstore.system.descriptors import raise_limit

COMMANDS = {
    "run": "an engine that uses the store, with Redis and a node where there are none",
    "up": "Redis and memory nodes together, in the foreground",
    "node": "one memory node, in the foreground",
    "put": "save a file or standard input under a key",
    "get": "write the value of a key to standard output or a file",
    "ls": "the blocks on this host's nodes",
    "stat": "nodes and counters",
    "top": "the cluster live: fill, hits, bytes a second, evictions, who comes and goes",
    "explain": "why a prompt or a key is not found",
    "plan": "how much memory this host's nodes should have, from what they have seen",
    "export": "regions of a node's disks to an object store, for other hosts",
    "import": "regions that other hosts exported, to a disk of a node that does not run",
    "replay": "what a store of another size or policy would have found of a trace",
    "acl": "rights in Redis for clients, nodes and operators of one key prefix",
    "config": "the settings in force here, and where each comes from",
    "completion": "what a shell completes this command with",
    "doctor": "look for what would keep it from working, and say what to do",
}
EXIT_FAILED, EXIT_USAGE, EXIT_MISS, EXIT_INTERRUPTED = 1, 2, 3, 128 + signal.SIGINT
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a key of letters that this locale does not have
            stream.reconfigure(errors="backslashreplace")
    if argv is None:  # this process is the command's own
        raise_limit()
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        code: int = args.run(args)
        if sys.stdout is not None:  # it was closed by who started this
            sys.stdout.flush()
        return code
    except UsageError as e:
        print(f"kvstore: {e}", file=sys.stderr)
        return EXIT_USAGE
    except KVStoreError as e:
        print(f"kvstore: {e}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `kvstore ls | head`
        _write_no_more()
        return EXIT_PIPE_CLOSED
    except OSError as e:  # standard output that is full, say
        print(f"kvstore: {e}", file=sys.stderr)
        _write_no_more()
        return EXIT_FAILED


def _write_no_more() -> None:
    """Python flushes once more at its end: into nothing."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    asked = next((word for word in argv if not word.startswith("-")), None)
    return command_parser(asked).parse_args(argv)


def command_parser(*asked: str | None) -> argparse.ArgumentParser:
    """Return the parser, with the options of the commands in `asked`: others are not imported."""
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description="Keep and share the KV cache of LLM engines.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 3 `get` found nothing, 130 Ctrl-C; of "
        "`run` the engine's. `kvstore COMMAND --help` lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"kvstore {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description)
        if name in asked:
            file = f"{name}_" if keyword.iskeyword(name) else name
            module = importlib.import_module(f"kvstore.cli.commands.{file}")
            module.configure(command)
            command.set_defaults(run=module.run)
    return parser


def _version() -> str:
    from kvstore import __version__

    return __version__
