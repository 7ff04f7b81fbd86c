"""Runs one suite: `python -m benchmarks SUITE [--json]`; `scripts/bench` is the way to call it."""

from __future__ import annotations

from argparse import ArgumentParser

from benchmarks.report import show
from benchmarks.suites import (
    adoption,
    blocks,
    crowd,
    deadlines,
    disk,
    events,
    gpu,
    hybrids,
    index,
    integrity,
    layerwise,
    local,
    nixl,
    node,
    replicas,
    restart,
    serve,
    stream,
    vllm,
)

SUITES = {
    "adoption": adoption,
    "blocks": blocks,
    "crowd": crowd,
    "deadlines": deadlines,
    "disk": disk,
    "events": events,
    "gpu": gpu,
    "hybrids": hybrids,
    "index": index,
    "integrity": integrity,
    "layerwise": layerwise,
    "local": local,
    "nixl": nixl,
    "node": node,
    "replicas": replicas,
    "restart": restart,
    "serve": serve,
    "stream": stream,
    "vllm": vllm,
}


def main() -> None:
    parser = ArgumentParser(prog="scripts/bench", description="Measure; see benchmarks/README.md.")
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, module in SUITES.items():
        suite = suites.add_parser(name, help=module.__doc__)
        suite.add_argument("--json", action="store_true", help="one object as the last line")
        module.arguments(suite)
    options = parser.parse_args()
    about, rows = SUITES[options.suite].run(options)
    show(options.suite, about, rows, as_json=options.json)


if __name__ == "__main__":
    main()
