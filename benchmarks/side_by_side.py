"""Puts this store beside others in one table of docs/benchmarks.md (`scripts/bench local --docs`).

It shows what `local` measured in one run, rows in which another is faster among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvstore
from benchmarks.report import Row

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN = "<!-- made by scripts/bench local --docs: not edited down to its end -->"
END = "<!-- end of what scripts/bench local --docs made -->"
OURS = "this store"
NAMES = {
    "mooncake-shm": "Mooncake, shared memory",
    "mooncake-tcp": "Mooncake, TCP",
    "redis": "the payload in plain Redis",
}
"""What `--docs` puts beside this store where no `--peer` is named, and what it is called there."""
MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Packages that it is in."""
MICROSECONDS_BYTES_MAX = 64 << 10
"""A call of at most so many bytes is shown by the time that it takes, a larger one by its speed."""
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def versions() -> dict[str, str]:
    """Return the versions of what was measured, as far as packages say them, and the day."""
    found = {"date": datetime.now(UTC).date().isoformat(), "kvstore": kvstore.__version__}
    for package in MOONCAKE:
        with suppress(PackageNotFoundError):
            found["mooncake"] = version(package)
    return found


def table(about: Mapping[str, object], rows: Sequence[Row], command: str) -> str:
    """Return what stands between the markers: what ran where, a row for each put and get of one
    reader, what others were faster at, and what did not run and why."""
    stores = [OURS, *dict.fromkeys(name for row in rows if (name := _peer(row)) is not None)]
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if (op := _op(row)) in ("get", "put") and row.get("readers") == 1:
            shape = (op, int(row["batch"]), int(row["size_bytes"]))
            found.setdefault(shape, {})[_peer(row) or OURS] = row["latency_us_p50"] / 1e6
    lines = [f"`{command}`: " + ", ".join(f"{name} {value}" for name, value in about.items()) + "."]
    lines += ["", "| | " + " | ".join(NAMES.get(store, store) for store in stores) + " |"]
    lines.append("|---" * (len(stores) + 1) + "|")
    slower = []
    for shape, seconds in sorted(found.items()):
        fastest = min(seconds, key=lambda store: seconds[store])
        cells = [_cell(shape, seconds.get(store), store == fastest) for store in stores]
        lines.append(f"| {_named(shape)} | " + " | ".join(cells) + " |")
        if OURS in seconds and fastest != OURS:
            times = seconds[OURS] / seconds[fastest]
            slower.append(f"{_named(shape)} ({times:.2f} times {NAMES.get(fastest, fastest)})")
    lines += ["", "Medians; the fastest of each row is bold."]
    if slower:
        lines.append(f"Others are faster at: {'; '.join(slower)}.")
    lines += [f"- `{row['op']}` did not run: {row['said']}" for row in rows if row.get("said")]
    return "\n".join(lines)


def into_document(text: str, made: str) -> str:
    """Return the document with `made` in the place of what stood between the markers.

    Raises `ValueError` when it has no such place.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no place for the table: between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _op(row: Row) -> str:
    return str(row["op"]).rpartition(" ")[2]


def _peer(row: Row) -> str | None:
    """Of a row of another store its name; None for one of ours, and for one that did not run."""
    return None if row.get("said") else str(row["op"]).rpartition(" ")[0] or None


def _named(shape: tuple[str, int, int]) -> str:
    op, batch, size_bytes = shape
    size = next((f"{size_bytes // u} {n}" for u, n in UNITS if size_bytes % u == 0), size_bytes)
    return f"{op}, {size}" if batch == 1 else f"{op}, {batch} \N{MULTIPLICATION SIGN} {size}"


def _cell(shape: tuple[str, int, int], seconds: float | None, fastest: bool) -> str:
    if seconds is None:
        return ""
    _, batch, size_bytes = shape
    total = batch * size_bytes
    said = f"{total / seconds / 1e9:.1f} GB/s"
    if total <= MICROSECONDS_BYTES_MAX:
        said = f"{seconds * 1e6:,.0f} µs"
    elif total / seconds < 1e9:
        said = f"{total / seconds / 1e9:.2f} GB/s"
    return f"**{said}**" if fastest else said
