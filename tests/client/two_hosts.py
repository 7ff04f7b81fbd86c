"""Nodes that listen, and clients on their host or on another one: hosts share an index, and
no memory since their run directories differ."""

from pathlib import Path
from typing import Any

from redis_servers import RedisServer
from stores import NodeProcess

from kvstore import Client, Limits
from kvstore.transport.stream.security import StreamSecurity

SECRET = "a secret that both sides know"
SECURITY = StreamSecurity(secret=SECRET.encode())
LISTEN = ("--listen", "127.0.0.1:0")
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)


def listening_node(redis_server: RedisServer, *options: str, **more: Any) -> NodeProcess:
    environment = {"KVSTORE_SECRET": SECRET}
    return NodeProcess(redis_server, options=(*LISTEN, *options), environment=environment, **more)


def client_of(node: NodeProcess, run_dir: Path | None = None, **options: Any) -> Client:
    """On the node's host; with a `run_dir` of its own, on another."""
    options = {**node.client_options, "limits": PATIENT, "security": SECURITY, **options}
    if run_dir is not None:
        options["run_dir"] = run_dir
    return Client(**options)
