"""`kvstore completion` prints what a shell completes the command with."""

from __future__ import annotations

import argparse

from kvstore.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
INSTALL = "pip install 'kvstore-llm[completion]'"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = 'bash: eval "$(kvstore completion bash)" in ~/.bashrc'


def run(args: argparse.Namespace) -> int:
    from kvstore.cli import COMMANDS, command_parser

    try:
        import shtab
    except ImportError:
        raise UsageError("completion", args.shell, f"needs shtab: {INSTALL}") from None
    print(shtab.complete(command_parser(*COMMANDS), args.shell))
    return 0
