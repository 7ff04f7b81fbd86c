"""Another host whose link is throttled, cut and mended, over real sessions and a real stream."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_parts import FakeRequest
from stores import MIB, NodeProcess
from timed_engine import BLOCK, ENGINE_BLOCK, TimedEngine

from connector.layout.geometry import KVGeometry
from kvstore import Limits
from kvstore.spi import BlockSession, Tier
from kvstore.testing.ports import held_ports
from kvstore.testing.proxy import CHUNK_BYTES, FaultyProxy
from kvstore.transport.stream.security import StreamSecurity

pytest.importorskip("torch")
SECRET = "a secret that both sides know"
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)
GEOMETRY = KVGeometry(layers=1, heads=1, channel_bytes=8192, engine_block_tokens=ENGINE_BLOCK)
TOKENS, TOKENS_PER_S = 1024, 1000.0
COMPUTE_S = TOKENS / TOKENS_PER_S
"""As long as 8 MB/s take for the 8 MiB of a prompt."""
NOISE_S = 0.1
"""What a busy machine adds to a request of two steps."""


def session(node: NodeProcess, run_dir: Path | None = None) -> BlockSession:
    options = {**node.client_options, "limits": PATIENT}
    if run_dir is not None:
        options["run_dir"] = run_dir
    return BlockSession(security=StreamSecurity(secret=SECRET.encode()), **options)  # type: ignore[arg-type]


@pytest.fixture
def link(redis_server) -> Iterator[tuple[NodeProcess, FaultyProxy]]:
    with (
        held_ports(1) as (port,),
        FaultyProxy(lambda: socket.create_connection(("127.0.0.1", port))) as proxy,
    ):
        announced = "{}:{}".format(*proxy.address)
        options = ("--listen", f"127.0.0.1:{port}", "--advertise", announced)
        with NodeProcess(
            redis_server,
            size=256 * MIB,
            options=options,
            environment={"KVSTORE_SECRET": SECRET},
        ) as node:
            yield node, proxy


@pytest.mark.long
def test_a_link_that_is_throttled_and_cut_costs_no_more_than_computing(
    link: tuple[NodeProcess, FaultyProxy],
) -> None:
    node, proxy = link
    with tempfile.TemporaryDirectory(prefix="kve-") as directory:
        near, far = session(node), session(node, Path(directory))
        engine = TimedEngine(TOKENS_PER_S, far, GEOMETRY)
        count = 0

        def first_token_s() -> float:
            nonlocal count
            count += 1
            prompt = [count * 10_000 + i for i in range(TOKENS + 1)]
            request = FakeRequest(f"r{count}", prompt)
            engine.put(request, [Tier.OTHER_HOST] * (TOKENS // BLOCK), near)
            return engine.first_token_s(request)

        def phase(name: str, requests: int) -> list[float]:
            took = sorted(first_token_s() / COMPUTE_S for _ in range(requests))
            print(f"{name}: to computing " + " ".join(f"{one:.3f}" for one in took))
            return took

        nothing = FakeRequest("warm", [-i for i in range(TOKENS)])
        engine.first_token_s(nothing)
        assert phase("unhindered", 4)[0] < 0.5
        proxy.delay_s = CHUNK_BYTES / 2e6
        throttled = phase("2 MB/s", 5)
        assert throttled[2] <= 1.05 + NOISE_S / COMPUTE_S
        assert throttled[-1] <= 1.5 + NOISE_S / COMPUTE_S
        proxy.silent = True
        cut = phase("cut", 5)
        assert cut[2] <= 1.05 + NOISE_S / COMPUTE_S
        proxy.silent, proxy.delay_s = False, 0.0
        assert min(phase("mended", 8)) < 0.5
        engine.close()
        near.close()
