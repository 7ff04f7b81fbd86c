"""`kvstore explain` says how much of a prompt, or which value, is there, and why no more."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from kvstore.cli.options import (
    NAMESPACE_DEFAULT,
    add_store,
    at_least_one,
    run_dir_of,
    standard_input,
)
from kvstore.cli.output import as_json
from kvstore.cli.store import LIMITS, store_url
from kvstore.client.client import Client
from kvstore.client.missing.explanation import missing_as_dict
from kvstore.core.namespaces import namespace_of
from kvstore.errors import UsageError
from kvstore.keys import Namespace

TOKENS_MAX = 1 << 22
TOKEN_FILE_BYTES_MAX = 12 * TOKENS_MAX
"""A token of 32 bits has 10 digits."""
BLOCK_TOKENS_DEFAULT = 256
_NUMBER = re.compile(r"\d+")


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", metavar="FILE", help="token numbers, as JSON or apart by space; -: stdin"
    )
    what.add_argument("--key", help="of a plain value")
    parser.add_argument(
        "--block-tokens",
        type=at_least_one,
        default=BLOCK_TOKENS_DEFAULT,
        metavar="N",
        help="tokens of one block, as the client that saved them has it (default: %(default)s)",
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--namespace",
        default=NAMESPACE_DEFAULT,
        metavar="NAME",
        help="keys in different ones are apart (default: %(default)s)",
    )
    whose.add_argument(
        "--namespace-fields", metavar="JSON", help="the same for one made of fields: an object"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code is 0 when there was an answer, whatever it is. A miss that is explained
    is no failure."""
    tokens = _tokens(args.tokens) if args.tokens is not None else []
    client = Client(
        store_url(args, run_dir_of(args)),
        namespace=_namespace(args),
        key_prefix=args.key_prefix,
        block_tokens=args.block_tokens,
        run_dir=run_dir_of(args),
        limits=LIMITS,
    )
    with client:
        if args.key is None:
            explanation = client.explain(tokens)
            print(as_json(explanation.as_dict()) if args.json else explanation)
            return 0
        explanation = client.explain_key(args.key)
    missing = explanation.first_missing
    if args.json:
        found = None if missing is None else missing_as_dict(missing)
        print(as_json({"key": args.key, "hit": missing is None, "missing": found}))
    else:
        print(explanation)
    return 0


def _namespace(args: argparse.Namespace) -> str | Namespace:
    if args.namespace_fields is None:
        return str(args.namespace)
    try:
        return namespace_of(args.namespace_fields.encode(errors="surrogateescape"))
    except UsageError as e:
        raise UsageError("namespace-fields", args.namespace_fields, str(e)) from e


def _tokens(name: str) -> list[int]:
    try:
        if name == "-":
            text = standard_input("tokens").read(TOKEN_FILE_BYTES_MAX + 1)
        else:
            with Path(name).open() as file:
                text = file.read(TOKEN_FILE_BYTES_MAX + 1)
    except UsageError:
        raise
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or "not text"
        raise UsageError("tokens", name, f"cannot be read: {why}") from e
    if len(text) > TOKEN_FILE_BYTES_MAX:
        raise UsageError("tokens", name, f"the file may have at most {TOKEN_FILE_BYTES_MAX} bytes")
    tokens = _parsed(text.strip())
    if tokens is None:
        raise UsageError("tokens", name, "must be numbers, as a JSON list or apart by space")
    if len(tokens) > TOKENS_MAX:
        raise UsageError("tokens", len(tokens), f"at most {TOKENS_MAX} tokens can be asked about")
    return tokens


def _parsed(text: str) -> list[int] | None:
    if not text.startswith("["):
        words = text.replace(",", " ").split()
        return [int(word) for word in words] if all(map(_NUMBER.fullmatch, words)) else None
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    right = isinstance(listed, list) and all(type(token) is int for token in listed)
    return listed if right else None
