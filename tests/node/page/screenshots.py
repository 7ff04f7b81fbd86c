"""Takes the pictures of scripts/screenshots."""

from __future__ import annotations

import sys
import tempfile
import time
from html import escape
from pathlib import Path

import page_parts
from browser import Browser
from page_parts import HOST, Fed, cluster, page_node, port

from kvstore.cli.commands.top import BOLD, COLUMNS, DIM, RED, TICK_S, Line, render
from kvstore.keys import Namespace
from kvstore.node.page.watch import Watch

COUNT, TICKS, DEAD = 100, 400, 17
PICTURES = {
    "page-light": {"width": 1280},
    "page-dark": {"width": 1280, "dark": True},
    "page-narrow": {"width": 420},
}
STYLES = {BOLD: "font-weight:bold", DIM: "opacity:.6", RED: "fill:#e5735f"}
CELL, LINE = 8.4, 18


def pages(directory: Path) -> None:
    page_parts.SPACES = page_parts.SPACES[0], Namespace.named("agents")
    with tempfile.TemporaryDirectory() as place, page_node(Path(place)) as node:
        fed = Fed(node)
        fed.ticks(COUNT, TICKS)
        fed.dies(COUNT, TICKS, DEAD)
        for name, window in PICTURES.items():
            with Browser(height=1000, **window) as browser:
                browser.open(f"http://{HOST}:{port(node)}/")
                browser.until(f"document.querySelectorAll('#rows tr').length === {COUNT}")
                browser.grow()
                time.sleep(0.3)  # it paints
                browser.screenshot(directory / f"{name}.png")


def top() -> list[Line]:
    watch, count = Watch(TICK_S), 12
    for tick in (0.0, 1.0):
        watch.hear(cluster(count, tick), TICK_S * tick)
    last = cluster(count, 1.0)[7]
    for i in range(5):
        watch.hear([*cluster(count, 1 + i / 10, (7,)), last], TICK_S + i)
    watch.hear(cluster(count, 2.0, (7,)), 2 * TICK_S)
    wall = 1_700_000_000
    return render(watch, 2 * TICK_S, wall, store="redis://10.0.0.5:6379", rows=24)


def svg(lines: list[Line]) -> str:
    """A terminal's screen as a picture of text."""
    width, height = round(COLUMNS * CELL) + 32, len(lines) * LINE + 30
    rows = [
        f'<text x="16" y="{26 + i * LINE}" style="white-space:pre;{STYLES.get(style, "")}">'
        f"{escape(text)}</text>"
        for i, (text, style) in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="monospace" font-size="14" '
            'fill="#e4e7ea">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#14171a"/>',
            *rows,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    to = Path(sys.argv[1])
    pages(to)
    (to / "top.svg").write_text(svg(top()) + "\n")
