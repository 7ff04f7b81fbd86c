"""Writes the router's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Sequence

from connector.router.routing import Engine

_METRICS = (
    ("requests_total", "counter", "Requests, or prefills, that it was given."),
    ("failures_total", "counter", "Requests and probes that it failed, and prefills not saved."),
    ("in_flight", "gauge", "Requests that it is at."),
    ("up", "gauge", "0 while it is passed over."),
)


def exposition(engines: Sequence[Engine], now: float) -> str:
    values = [(e.requests, e.failures, e.in_flight, int(e.up(now))) for e in engines]
    lines = []
    for number, (name, kind, meaning) in enumerate(_METRICS):
        lines += [f"# HELP kvstore_router_{name} {meaning}", f"# TYPE kvstore_router_{name} {kind}"]
        lines += [
            f'kvstore_router_{name}{{engine="{_escaped(e.url)}",role="{e.role}"}} {value[number]}'
            for e, value in zip(engines, values, strict=True)
        ]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
