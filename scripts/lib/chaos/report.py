"""Shows a chaos run at its end: a table, and TTFT over time with the faults marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.plan import BRANCH, NEW, REPEAT, Answer, Window

COLORS = {NEW: "#b0532c", BRANCH: "#8a8a8a", REPEAT: "#2c7fb0"}


def show(summary: dict[str, Any]) -> str:
    lines = [
        f"seed {summary['seed']}: {summary['answered']} of {summary['requests']} answered, "
        f"{summary['identical']} identical, {summary['given_up']} given up before they were asked "
        f"again, {summary['faults']} faults",
        "neighbours: " + ", ".join(f"{what} {n}" for what, n in summary["neighbours"].items()),
        "time to first token of repeated prompts, ms",
        f"{'':16}{'prompts':>9}{'loaded':>9}{'median':>9}{'slowest':>9}",
    ]
    lines += [
        f"{name:16}{row['repeats']:9}{row['loaded_whole']:9}{row['ttft_ms']:9}{row['ttft_max_ms']:9}"
        for name, row in summary["under"].items()
    ]
    lines.append(f"{'without a store':34}{summary['recompute_ttft_ms']:9}")
    return "\n".join(lines) + "\n"


def draw(
    answers: Sequence[Answer], windows: Sequence[Window], summary: dict[str, Any], path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(12, 5), layout="constrained")
    for kind, color in COLORS.items():
        found = [a for a in answers if a.kind == kind and a.tokens is not None]
        axis.plot(
            [a.at_s for a in found], [a.ttft_s * 1e3 for a in found], ".", color=color, label=kind
        )
    for window in windows:
        axis.axvspan(window.began_s, window.ended_s, color="#d62728", alpha=0.15, lw=0)
        axis.text(
            window.began_s,
            1.0,
            f"{window.fault.kind} {window.fault.victim}",
            rotation=60,
            fontsize=8,
            transform=axis.get_xaxis_transform(),
        )
    if summary["recompute_ttft_ms"] is not None:
        axis.axhline(summary["recompute_ttft_ms"], color="black", lw=0.8, label="without a store")
    axis.set_yscale("log")
    axis.set_xlabel("seconds")
    axis.set_ylabel("time to first token, ms (log)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=4, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
