"""The page in a real, headless Chromium: light and dark, narrow and wide, by keyboard, and live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from page_parts import EVIL, HOST, Fed, page_node, port

from kvstore.node import Node

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
ROWS = "document.querySelectorAll('#rows tr').length"
WIDE, NARROW = 1280, 390


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with page_node(tmp_path) as node:
        yield node


def opened(node: Node, window: Browser, count: int) -> Browser:
    window.open(f"http://{HOST}:{port(node)}/")
    window.until(f"{ROWS} === {count}")
    return window


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_hundred_nodes_are_seen_at_a_glance(node: Node, width: int, dark: bool) -> None:
    """The page is as wide as the window, nothing was refused by its policy, and nobody else was
    asked for anything."""
    fed = Fed(node)
    fed.ticks(100, 30)
    with Browser(width=width, height=900, dark=dark) as window:
        opened(node, window, 100)
        assert window.run("document.querySelectorAll('#tiles a').length") == 100
        assert window.run("document.documentElement.scrollWidth") <= width
        below = "document.querySelector('#tiles').getBoundingClientRect().bottom"
        assert window.run(below) < (900 if width == WIDE else 2000)
        back = window.run("getComputedStyle(document.body).backgroundColor")
        light = int(back.split("(")[1].split(",")[0]) > 127
        assert light is not dark
        assert window.logged() == []
        assert {url.split("/")[2] for url in window.asked_for()} == {f"{HOST}:{port(node)}"}


def test_what_it_shows_is_what_the_node_tells(node: Node) -> None:
    Fed(node).ticks(6, 30)
    with Browser() as window:
        opened(node, window, 6)
        cards = window.text("#cards")
        assert "on 3 hosts" in cards
        assert "78%" in cards, "48 in the store and 30 in the engine"
        assert "to 15 min\n57%" in window.text("#ages").replace("\n\n", "\n")
        assert "evicted" in window.text("#missed")
        assert window.run("document.querySelectorAll('#cards svg polyline').length") >= 10
        assert len(window.run("document.querySelector('#rows .edge').getAttribute('points')")) > 5


def test_a_namespaces_name_is_text(node: Node) -> None:
    Fed(node).ticks(2, 3)
    with Browser() as window:
        opened(node, window, 2)
        assert EVIL in window.text("#spaces")
        assert window.run("document.title") == "kvstore"
        assert window.run("document.querySelectorAll('#spaces script').length") == 0


def test_a_node_that_dies_meanwhile_is_told_where_it_was(node: Node) -> None:
    fed = Fed(node)
    fed.ticks(6, 30)
    with Browser() as window:
        opened(node, window, 6)
        window.run("document.querySelectorAll('#tiles a')[3].focus()")
        fed.dies(6, 30, 2)
        window.until("document.querySelectorAll('#tiles a.gone').length === 1")
        assert "node-2 on host-01 died" in window.text("#events")
        title = window.run("document.querySelector('#tiles a.gone').title")
        assert title.startswith("node-2 on host-01: gone")
        focus = window.run("document.activeElement.title")
        assert focus.startswith("node-3"), "what is drawn anew leaves the focus where it was"


def test_everything_is_reached_by_the_keyboard(node: Node) -> None:
    Fed(node).ticks(3, 30)
    with Browser() as window:
        opened(node, window, 3)
        reached = []
        for _ in range(30):
            window.press("tab")
            active = "document.activeElement"
            word = f"{active}.id || {active}.getAttribute('href') || {active}.textContent"
            reached.append(window.run(word))
            if reached[-1] == "Up":
                break
        assert reached[0] == "#table"
        for one in ("#node-0", "#node-2", "events", "filter", "Node", "Used", "Up"):
            assert one in reached
        window.run("document.querySelector('#filter').focus()")
        window.press(*"node-1")
        assert (
            window.run("[...document.querySelectorAll('#rows tr')].filter(r => !r.hidden).length")
            == 1
        )


def test_columns_sort_both_ways(node: Node) -> None:
    Fed(node).ticks(12, 30)
    with Browser() as window:
        opened(node, window, 12)
        first = "document.querySelector('#rows td').textContent"
        assert window.run(first) == "node-0"
        for name in ("node-11", "node-0"):
            window.run("document.querySelector('#heads button').focus()")
            window.press("enter")
            assert window.run(first) == name, "11 is more than 2"


def test_a_node_that_ends_is_told_and_what_it_said_stays(tmp_path: Path) -> None:
    with Browser() as window:
        with page_node(tmp_path) as node:
            Fed(node).ticks(3, 30)
            opened(node, window, 3)
        window.until("document.querySelector('#status').className === 'bad'")
        assert "does not answer" in window.text("#status")
        assert window.run(ROWS) == 3
