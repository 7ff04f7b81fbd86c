"""Shows the demo's results at its end: a table and a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console


class Row(NamedTuple):
    """Holds one prompt's figures over all engines; times in milliseconds."""

    prompt: int
    computed_ms: float
    loaded_ms: float
    tokens_loaded: int
    identical: bool


COMPUTED, LOADED = "#b0532c", "#2c7fb0"


def show_table(console: Console, rows: list[Row]) -> None:
    table = Table(title="time to first token, per prompt")
    for name in ("prompt", "computed", "from the store", "times faster", "tokens loaded"):
        table.add_column(name, justify="right")
    table.add_column("output identical")
    for row in rows:
        table.add_row(
            str(row.prompt),
            f"{row.computed_ms:.0f} ms",
            f"{row.loaded_ms:.0f} ms",
            f"{row.computed_ms / row.loaded_ms:.1f}",
            str(row.tokens_loaded),
            "[green]yes" if row.identical else "[red]NO",
        )
    console.print(table)


def draw(rows: list[Row], summary: dict[str, Any], path: Path) -> Path:
    """Draw the table as bars, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.4
    for shift, color, label, values in (
        (-width / 2, COMPUTED, "computed", [row.computed_ms for row in rows]),
        (width / 2, LOADED, "loaded from the store", [row.loaded_ms for row in rows]),
    ):
        places = [row.prompt + shift for row in rows]
        bars = axis.bar(places, values, width, color=color, label=label)
        axis.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=8, padding=2)
    axis.set_yscale("log")
    axis.margins(y=0.2)
    axis.set_xticks([row.prompt for row in rows])
    axis.set_xlabel("prompt")
    axis.set_ylabel("time to first token, ms (log)")
    after = summary["after_node_kill"]
    axis.set_title(
        f"{summary['identical']} of {summary['requests']} outputs identical, "
        f"{summary['tokens_loaded']} of {summary['tokens_possible']} tokens loaded; after the "
        f"node was killed {after['identical']} of {after['requests']}",
        fontsize=10,
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper right", ncols=2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
