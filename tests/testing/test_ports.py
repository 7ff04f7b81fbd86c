"""A port that is held is nobody else's, and still its server's to listen at."""

from __future__ import annotations

import socket

import pytest

from kvstore.testing.ports import held_ports


def test_a_port_is_held_for_an_engine_until_it_listens_there() -> None:
    with held_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
        # As vLLM and aiohttp bind.
        with (
            socket.create_server(("127.0.0.1", ports[0])) as engine,
            socket.create_connection(("127.0.0.1", ports[0]), timeout=10),
        ):
            engine.accept()[0].close()
