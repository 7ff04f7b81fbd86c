"""Checks everything that a process of the store reads when it starts: variables, files, limits."""

from __future__ import annotations

import difflib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.cli.checks.base import Context, Finding, Level
from kvstore.cli.node_table import NodeTable, node_table
from kvstore.config_file import SecurityFiles, read_config
from kvstore.cuda.batch import wanted as cuda_copies
from kvstore.errors import UsageError
from kvstore.index.open import URL_VARIABLE
from kvstore.index.redis.url import parse_url
from kvstore.rundir import RUN_DIR_ENV
from kvstore.secret import DISK_KEYS, SALT, SIGNING_KEY, disk_keys, secret
from kvstore.segment.disk.file import check_directory
from kvstore.settings.reader import allowed_in
from kvstore.settings.toml_file import CONFIG
from kvstore.transport.stream.security import SECRET, TLS_CA, TLS_CERT, TLS_KEY, StreamSecurity

PREFIX = "KVSTORE_"
OF_OTHERS = (
    *("KVSTORE_COMPILED", "KVSTORE_CUDA_COPIES", "KVSTORE_TRANSPORTS"),
    *("KVSTORE_ENGINE_ID", "KVSTORE_KV_ROLE", "KVSTORE_KV_TRANSFER_CONFIG"),  # connector/transfer
    "KVSTORE_TENSORRT_LLM",
    *("KVSTORE_VENV", "KVSTORE_VLLM", "KVSTORE_NIXL", "KVSTORE_NVRTC"),  # scripts/setup
)
"""Variables whose owners this check does not ask."""
VARIABLES = frozenset(
    {CONFIG, URL_VARIABLE, RUN_DIR_ENV, TLS_CA, TLS_CERT, TLS_KEY, *OF_OTHERS}
    | {name + file for name in (SECRET, SIGNING_KEY, SALT, DISK_KEYS) for file in ("", "_FILE")}
)
FILES_MIN = 4096
"""Descriptors: a node needs one for each client, connection and lease, an engine some more."""


def look(context: Context) -> list[Finding]:
    """Return what would be refused at a start, and what would be passed over in silence."""
    return [*_unknown(), *_refused()] or [Finding(Level.OK, _in_use())]


def _unknown() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            words = {known.removeprefix(PREFIX): known for known in VARIABLES}
            near = difflib.get_close_matches(name.removeprefix(PREFIX), words, 1)
            do = (
                f"did you mean {words[near[0]]}?"
                if near
                else "unset it: docs/settings.md lists them"
            )
            yield Finding(Level.WARN, f"{name} is set, and nothing reads it", do)


def _refused() -> Iterator[Finding]:
    reads: tuple[Callable[[], object], ...] = (
        lambda: read_config().limits(),
        lambda: _readable(read_config().security()),
        lambda: _usable(node_table(read_config())),
        lambda: parse_url(os.environ[URL_VARIABLE]) if os.environ.get(URL_VARIABLE) else None,
        *((lambda name=name: secret(name)) for name in (SECRET, SIGNING_KEY, SALT)),
        disk_keys,
        cuda_copies,
        lambda: _certificates().client_context(),
        lambda: _certificates().server_context(),
    )
    said: dict[str, None] = {}
    for read in reads:
        try:
            read()
        except UsageError as e:
            said[str(e)] = None
    for text in said:
        yield Finding(Level.FAIL, text, "correct it: whatever reads it does not start")


def _usable(table: NodeTable) -> None:
    for disk in table.disks:
        check_directory(disk.directory, forced=table.disk_force)


def _certificates() -> StreamSecurity:
    """Return those of this environment, whatever its secret is."""
    files = read_config().security()

    def named(variable: str, listed: Path | None) -> Path | None:
        path = os.environ.get(variable)
        return Path(path) if path else listed

    return StreamSecurity(
        tls_ca=named(TLS_CA, files.tls_ca),
        tls_cert=named(TLS_CERT, files.tls_cert),
        tls_key=named(TLS_KEY, files.tls_key),
    )


def _readable(files: SecurityFiles) -> None:
    for name in allowed_in(SecurityFiles):
        path: Path | None = getattr(files, name)
        if path is not None and not os.access(path, os.R_OK):
            raise UsageError(f"security.{name}", str(path), "is not there, or cannot be read")


def _in_use() -> str:
    names = sorted(name for name in os.environ if name in VARIABLES)
    path = read_config().path
    return ", ".join([*names, *([f"file {path}"] if path else [])]) or "the defaults"


def descriptors(context: Context) -> list[Finding]:
    # The command has raised its own limit: an engine has what the shell around it has.
    try:
        soft, hard = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} descriptors (ulimit -n), at most {hard}"
    if soft >= FILES_MIN:
        return [Finding(Level.OK, found)]
    do = f"ulimit -n {min(FILES_MIN, hard)}, LimitNOFILE= of systemd, `docker run --ulimit nofile=`"
    return [Finding(Level.WARN, f"{found}: few for engines and nodes", do)]
