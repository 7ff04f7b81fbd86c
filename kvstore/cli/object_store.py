"""Speaks to an object store: the one place that knows obstore.

Each request has a deadline and is tried again a few times. An object is there whole or not at all;
what was sent of an unfinished one the store keeps apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

from kvstore.errors import PeerError, UsageError
from kvstore.segment.disk.exported import PIECE_BYTES, SUFFIX, Read
from kvstore.transport.stream.security import SECRET, StreamSecurity

URL_HELP = "s3://BUCKET/PREFIX, or a directory as file:///DIR"
CONNECT_TIMEOUT_S = 5
REQUEST_TIMEOUT_S = 60
"""For `PIECE_BYTES`; after `RETRY_TIMEOUT_S` it is not tried again."""
RETRIES_MAX = 5
RETRY_TIMEOUT_S = 120
PIECES_AT_ONCE = 2
EPILOG = """\
AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS's other variables say
how to reach s3://; AWS_ALLOW_HTTP=true does without TLS. Objects are signed with KVSTORE_SECRET.
What was interrupted goes on when it is repeated. docs/disk.md has more.
"""


def signing_secrets() -> tuple[bytes, ...]:
    """Return what objects are signed with, then what is accepted too. Raises `UsageError`."""
    secrets = StreamSecurity.from_environment().secrets()
    if not secrets:
        raise UsageError(SECRET, "", "must be set: objects are signed with it")
    return secrets


class ObjectStore:
    """The objects directly below one URL. All of it raises `PeerError`."""

    def __init__(self, url: str, *, make: bool = False) -> None:
        """Open it; with `make` a directory may be new. Raises `UsageError` too."""
        if not url.startswith(("s3://", "file:///")):
            raise UsageError("url", url, f"must be {URL_HELP}")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            must = "needs obstore: pip install 'kvstore-llm[s3]'"
            raise UsageError("url", url, must) from None
        how: dict[str, object] = {"mkdir": make}
        if url.startswith("s3:"):
            client = {
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
            }
            within = timedelta(seconds=RETRY_TIMEOUT_S)
            retry = {"max_retries": RETRIES_MAX, "retry_timeout": within}
            how = {"client_options": client, "retry_config": retry}
        self._obstore, self._url = obstore, url.rstrip("/")
        with self._errors():
            self._store = from_url(url, **how)

    def names(self) -> list[str]:
        """Return the names of regions, those begun first before others."""
        with self._errors():
            found = self._obstore.list_with_delimiter(self._store)["objects"]
        names = [str(one["path"]) for one in found if one["path"].endswith(SUFFIX)]
        return sorted(names, key=lambda name: (name.rpartition("-")[2], name))

    def put(self, name: str, pieces: Iterator[bytes]) -> None:
        """Send an object; where `pieces` raises, there is none."""
        how = {"chunk_size": PIECE_BYTES, "max_concurrency": PIECES_AT_ONCE}
        with self._errors(f"/{name}"):
            self._obstore.put(self._store, name, pieces, **how)

    def reader(self, name: str) -> Read:
        """Return what reads an object from its start."""
        with self._errors(f"/{name}"):
            opened = self._obstore.open_reader(self._store, name, buffer_size=PIECE_BYTES)

        def read(size_bytes: int) -> bytes:
            with self._errors(f"/{name}"):
                return bytes(opened.read(size_bytes))

        return read

    @contextlib.contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise PeerError(f"{self._url}{name}: {str(error).partition(chr(10))[0]}") from error
