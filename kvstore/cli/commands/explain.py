"""`kvstore explain` says how much of a prompt, or which value, is there, and why no more."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvstore.cli.asked_engine import EngineServer, Prompt, Unknown, chat, server_of, sockets_of
from kvstore.cli.options import (
    NAMESPACE_DEFAULT,
    add_store,
    at_least_one,
    run_dir_of,
    standard_input,
)
from kvstore.cli.output import as_json
from kvstore.cli.store import LIMITS, local_nodes, store_url
from kvstore.client.client import Client
from kvstore.client.engine_socket import ask_engine
from kvstore.client.explanation import MissReason, ago, missing_as_dict
from kvstore.core.namespaces import namespace_of
from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.errors import PeerError, UsageError
from kvstore.keys import Namespace
from kvstore.system.small_json import JsonObject

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
    what.add_argument("--prompt", metavar="TEXT", help="with --engine: of a completion; -: stdin")
    what.add_argument(
        "--messages",
        metavar="FILE",
        help="with --engine: of a chat, as JSON, or the body of its request; -: stdin",
    )
    what.add_argument(
        "--request-id", metavar="ID", help="with --engine: a request that was answered lately"
    )
    parser.add_argument(
        "--engine", metavar="URL", help="ask a vLLM engine of this host: http://HOST:8000"
    )
    parser.add_argument(
        "--engine-pid", type=at_least_one, metavar="PID", help="its process, with or without a URL"
    )
    parser.add_argument("--model", metavar="NAME", help="with --engine: of a LoRA adapter")
    parser.add_argument("--cache-salt", metavar="TEXT", help="with --engine: of the request")
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
    if args.engine is not None or args.engine_pid is not None:
        return _ask_engine(args)
    only = ("prompt", "messages", "request_id", "model", "cache_salt")
    for name in only:
        if getattr(args, name) is not None:
            raise UsageError(name.replace("_", "-"), getattr(args, name), "needs --engine URL")
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
        on_disk = explanation.disk_blocks > 0
        said = {"key": args.key, "hit": missing is None, "on_disk": on_disk, "missing": found}
        print(as_json(said))
    else:
        print(explanation)
    return 0


def _ask_engine(args: argparse.Namespace) -> int:
    """Return 0 where the engine could tell, 1 where it is not known what would be loaded."""
    if args.key is not None:
        raise UsageError("key", args.key, "is of no engine: leave out --engine")
    sockets = sockets_of(run_dir_of(args), args.engine, args.engine_pid)
    url = args.engine
    find = partial(server_of, args.engine_pid) if url is None else partial(EngineServer, url)
    try:
        question = _question(args, find)
    except Unknown as e:
        answers: list[JsonObject] = [{"unknown": str(e)}]
    else:
        answers = [ask_engine(path, question) for path in sockets]
    explained = [one for answer in answers for one in answer.get("explanations", ())]
    explained = [one for at, one in enumerate(explained) if one not in explained[:at]]
    for one in explained:
        one["lives"] = _lives(args, one["first_missing"])
    why = next((answer["unknown"] for answer in answers if "unknown" in answer), "")
    if not explained and not why:
        why = f"no request {args.request_id} is remembered (any more): an engine keeps 1,024"
    notes = dict.fromkeys(answer["note"] for answer in answers if "note" in answer)
    if args.json:
        found = {"unknown": why or None, "notes": list(notes), "explanations": explained}
        print(as_json(found))
    else:
        for one in explained:
            print("; ".join(filter(None, [one["text"], one["lives"], *notes])))
        if not explained:
            print(f"unknown: {why}")
    return 0 if explained else 1


def _question(args: argparse.Namespace, find: Callable[[], EngineServer]) -> JsonObject:
    if args.request_id is not None:
        return {"request_id": args.request_id}
    if args.prompt == "-":
        args.prompt = _text("prompt", "-")
    prompt = Prompt({"prompt": args.prompt})
    if args.messages is not None:
        prompt = chat(_text("messages", args.messages))
    model, path = args.model or prompt.model, None
    server = find() if args.tokens is None or model is not None else None
    if server is not None and model is not None:
        models = server.models()
        if model not in models:
            raise UsageError("model", model, f"the server has {', '.join(models)}")
        path = models[model]
    if args.tokens is not None:
        tokens = _tokens(args.tokens)
    elif server is not None:
        tokens = server.tokens(prompt._replace(model=model))
    salt = prompt.cache_salt if args.cache_salt is None else args.cache_salt
    adapter = [model, path] if path else None
    return {"tokens": tokens, "cache_salt": salt or None, "adapter": adapter}


def _lives(args: argparse.Namespace, missing: JsonObject | None) -> str:
    """Return how long blocks live on the node of this host that evicted one, and after how long
    evicted ones are asked for again; empty where that is not known."""
    if missing is None or missing["reason"] != MissReason.EVICTED:
        return ""
    for node in local_nodes(run_dir_of(args), args.key_prefix):
        if node.announcement.name == missing["node"]:
            try:
                counts = node.stats()
            except PeerError:
                return ""
            lives, back = (_median(counts, name) for name in ("evicted_age", "returned"))
            said = f"half of the blocks it evicted had lived {lives}" if lives else ""
            return f"{said}, and half of those asked for again came back {back}" if back else said
    return ""


def _median(counts: dict[str, int | float], name: str) -> str:
    """Return the bound that half of these ages are within, as text; empty without any."""
    half = counts.get(name, 0) / 2
    for bound in AGE_BOUNDS_S if half else ():
        if counts.get(f"{name}_le_{bound}", 0) >= half:
            return f"within {ago(bound)}"
    return f"over {ago(AGE_BOUNDS_S[-1])}" if half else ""


def _namespace(args: argparse.Namespace) -> str | Namespace:
    if args.namespace_fields is None:
        return str(args.namespace)
    try:
        return namespace_of(args.namespace_fields.encode(errors="surrogateescape"))
    except UsageError as e:
        raise UsageError("namespace-fields", args.namespace_fields, str(e)) from e


def _text(field: str, name: str) -> str:
    """Return what is in the file `name`, or in standard input."""
    try:
        if name == "-":
            text = standard_input(field).read(TOKEN_FILE_BYTES_MAX + 1)
        else:
            with Path(name).open() as file:
                text = file.read(TOKEN_FILE_BYTES_MAX + 1)
    except UsageError:
        raise
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or "not text"
        raise UsageError(field, name, f"cannot be read: {why}") from e
    if len(text) > TOKEN_FILE_BYTES_MAX:
        raise UsageError(field, name, f"the file may have at most {TOKEN_FILE_BYTES_MAX} bytes")
    return text


def _tokens(name: str) -> list[int]:
    tokens = _parsed(_text("tokens", name).strip())
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
