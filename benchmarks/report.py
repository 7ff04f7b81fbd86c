"""Shows the rows of a suite with their statistics and the machine they were taken on."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation; of few values the 99th is the largest or near
    it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median: half of all repetitions lie within it."""
    return (percentile(values, 75) - percentile(values, 25)) / median(values)


def ratios(yardstick_s: Iterable[float], measured_s: Iterable[float]) -> list[float]:
    """Return yardstick time over measured time, repetition by repetition."""
    return [y / m for y, m in zip(yardstick_s, measured_s, strict=True)]


def micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def machine(url: str) -> dict[str, Any]:
    """Describe the class of machine, never its name, and its Redis."""
    import redis  # the only part that a machine without one cannot do

    server = redis.Redis.from_url(url)
    versions = {"redis": server.info("server")["redis_version"], "redis_py": version("redis")}
    return machine_alone() | versions


def machine_alone() -> dict[str, Any]:
    """Describe the class of machine, never its name."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def show(suite: str, about: dict[str, Any], rows: list[Row], *, as_json: bool) -> None:
    """Print one JSON object as the last line, or an aligned table."""
    if as_json:
        print(json.dumps({"suite": suite, "machine": about, "rows": rows}), flush=True)
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
