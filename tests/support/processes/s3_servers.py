"""A real S3 server (moto's) in this process, with a bucket a test."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import pytest

obstore = pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")
from werkzeug.serving import WSGIRequestHandler  # noqa: E402

SECRET = "a secret of a few words"


class Bucket:
    """One bucket, as a client of its own sees it."""

    def __init__(self, server: S3Server, name: str) -> None:
        import boto3

        self.server, self.name, self.url = server, name, f"s3://{name}/some/where"
        self._s3 = boto3.client("s3", endpoint_url=server.url)
        self._s3.create_bucket(Bucket=name)

    def keys(self) -> list[str]:
        found = self._s3.list_objects_v2(Bucket=self.name).get("Contents", [])
        return sorted(one["Key"] for one in found)

    def get(self, key: str) -> bytes:
        return bytes(self._s3.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, raw: bytes) -> None:
        self._s3.put_object(Bucket=self.name, Key=key, Body=raw)

    def delete(self, key: str) -> None:
        self._s3.delete_object(Bucket=self.name, Key=key)


class S3Server:
    """The server, and the environment that clients of it need."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "KVSTORE_SECRET": SECRET,
        }

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Answer no request for objects of that name meanwhile."""
        let_go = threading.Event()
        real = WSGIRequestHandler.run_wsgi

        def run_wsgi(handler: WSGIRequestHandler) -> None:
            if name in handler.path:
                let_go.wait(60)
            with contextlib.suppress(OSError):  # who asked is gone
                real(handler)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WSGIRequestHandler, "run_wsgi", run_wsgi)
            yield
            let_go.set()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(s3_server, f"kvstore-{os.urandom(8).hex()}")
