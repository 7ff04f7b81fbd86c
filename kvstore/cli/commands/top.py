"""`kvstore top` shows the cluster live in a terminal of 80 columns, over SSH too.

render()   what one screen says, of a `Watch` and a time: pure
Screen     the terminal: its other screen, its keys
run()      asks the index every second, and draws
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from kvstore.cli.options import add_store, no_password, run_dir_of
from kvstore.cli.output import human_age, human_bytes, human_count, printable, table
from kvstore.cli.store import LIMITS, store_url
from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.core.report import TOLD_OF_DISKS
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.redis.index import open_index
from kvstore.node.page.watch import Watch, WatchedNode, by_age, by_reason, hit_shares

COLUMNS, ROWS_MIN = 80, 10
ASKED_EVERY_S = 1.0
TICK_S = 5.0
EVENTS_SHOWN = 4
REASONS_SHOWN = 4
AGES_SHOWN = 4
BAR = 24
HEAD = ("NODE", "HOST", "STATE", "TIER", "USED", "OF", "IN/s", "OUT/s", "HITS", "EVICT/s", "UP")
PLAIN, BOLD, DIM, RED = "", "\x1b[1m", "\x1b[2m", "\x1b[31m"
RESET = "\x1b[0m"


class Line(NamedTuple):
    text: str
    style: str = PLAIN


def configure(parser: argparse.ArgumentParser) -> None:
    add_store(parser)


def render(
    watch: Watch, now: float, wall: float, *, store: str, error: str = "", rows: int = 24
) -> list[Line]:
    """Return one screen of at most `rows` lines of `COLUMNS` columns. `now` is the time that the
    watch was told, `wall` the same on a clock on the wall."""
    living, minute = watch.living(), watch.minute()
    clock = time.strftime("%H:%M:%S", time.localtime(wall))
    title = f"kvstore top  {len(living)} node{'s' * (len(living) != 1)}"
    room = COLUMNS - len(title) - len(clock) - 4
    lines = [Line(f"{title}  {printable(store)[:room]:<{room}}  {clock}", BOLD)]
    if error:
        lines.append(Line(printable(error), RED))
    lines += [*map(Line, _summary(watch, living, minute)), Line("")]
    events = [
        Line(
            f"{time.strftime('%H:%M:%S', time.localtime(wall - (now - one.at)))}  "
            f"{printable(one.name)} on {printable(one.host)} {one.what}",
            RED if one.what == "died" else PLAIN,
        )
        for one in [*watch.events][-EVENTS_SHOWN:]
    ]
    shown = max(rows - len(lines) - 1 - bool(events) - len(events), 1)
    lines += _nodes(watch, now, shown)
    if events:
        lines += [Line(""), *events]
    return [Line(one.text[:COLUMNS], one.style) for one in lines[:rows]]


def _summary(watch: Watch, living: Sequence[WatchedNode], minute: dict[str, int]) -> list[str]:
    lines = []
    rooms = {tier: [0, 0] for tier in ("DRAM", "VRAM", "disk")}
    for one in living:
        on_disk = [one.counts.get(name, 0) for name in TOLD_OF_DISKS]
        in_memory = [one.used_bytes, one.announcement.size_bytes]
        for tier, room in ((one.tier, in_memory), ("disk", on_disk)):
            rooms[tier] = [a + b for a, b in zip(rooms[tier], room, strict=True)]
    for tier, (used, size) in rooms.items():
        if size:
            filled = round(BAR * used / size)
            bar = "#" * filled + "." * (BAR - filled)
            text = f"{used / size:>4.0%} of {human_bytes(size)} in use"
            lines.append(f"{tier:<9} [{bar}] {text}")
    shares = hit_shares(minute)
    found = "nobody has asked for a prompt in the last minute"
    if shares is not None:
        engine, store, missed = shares
        asked = human_count(minute["asked_tokens"])
        found = f"engine {engine:.0%}, store {store:.0%}, missed {missed:.0%} of {asked} tokens"
    got = minute.get("client_hits", 0)
    if values := got + minute.get("client_misses", 0):
        found += f"\nvalues    clients got {got / values:.0%} of {human_count(values)}"
    reasons = [f"{why} {share:.0%}" for why, share in by_reason(minute)[:REASONS_SHOWN]]
    ages = [f"{human_age(bound)} {share:.0%}" for bound, share in by_age(minute, AGE_BOUNDS_S)]
    last = watch.last
    moved = [
        f"{human_bytes(last.get(name, 0) / watch.tick_s)}/s {where}"
        for name, where in (("stored_bytes", "stored"), ("served_bytes", "to other hosts"))
    ]
    evicted = f"{human_count(minute.get('evicted', 0))} in the last minute"
    return [
        *lines,
        *f"hits      {found}".split("\n"),
        f"misses    {', '.join(reasons) or 'none'}",
        f"bytes     {', '.join(moved)}",
        f"evicted   {evicted}{', of an age up to ' if ages else ''}{', '.join(ages[:AGES_SHOWN])}",
    ]


def _nodes(watch: Watch, now: float, most: int) -> list[Line]:
    """A table of `most` lines and its head: of too many nodes those that need somebody first."""
    nodes = watch.all()
    if len(nodes) > most:
        order = {"gone": 0, "silent": 1}
        nodes = sorted(nodes, key=lambda one: (order.get(one.state(now), 2), -_busy(one)))
        nodes = nodes[: max(most - 1, 1)]
    cells = [_row(one, now, watch.tick_s) for one in nodes]
    text = table(HEAD, cells, left=4, elastic=(0, 1), columns=COLUMNS).split("\n")
    lines = [Line(text[0], DIM)]
    for line, one in zip(text[1:], nodes, strict=True):
        lines.append(Line(line, PLAIN if one.state(now) == "alive" else RED))
    if more := len(watch.nodes) - len(nodes):
        lines.append(Line(f"and {more} more nodes", DIM))
    return lines


def _busy(one: WatchedNode) -> int:
    return one.delta.get("stored_bytes", 0) + one.delta.get("served_bytes", 0)


def _row(one: WatchedNode, now: float, tick_s: float) -> tuple[str, ...]:
    word, state = one.announcement, one.state(now)
    if state == "gone":
        return word.name, word.host, state, one.tier, *["-"] * 6, ""
    shares = hit_shares(one.delta)
    return (
        *(word.name, word.host, state, one.tier),
        f"{one.used_bytes / word.size_bytes:.0%}",
        human_bytes(word.size_bytes).replace("iB", ""),
        human_bytes(one.delta.get("stored_bytes", 0) / tick_s).replace("iB", ""),
        human_bytes(one.delta.get("served_bytes", 0) / tick_s).replace("iB", ""),
        "-" if shares is None else f"{1 - shares[2]:.0%}",
        human_count(round(one.delta.get("evicted", 0) / tick_s)),
        human_age(word.up_s),
    )


class Screen:
    """The terminal while `top` has it; what was there before is there again at the end."""

    def __enter__(self) -> Screen:
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        if self._keys >= 0:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._on_term = signal.signal(signal.SIGTERM, _interrupt)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        if self._keys >= 0:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
        with suppress(OSError):
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()

    def draw(self, lines: Sequence[Line]) -> None:
        body = "\r\n".join(f"{style}{text}{RESET}\x1b[K" for text, style in lines)
        sys.stdout.write(f"\x1b[H{body}\x1b[J")
        sys.stdout.flush()

    def quit_within(self, timeout_s: float) -> bool:
        """Wait; whether somebody typed q meanwhile."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            keys = [self._keys] if self._keys >= 0 else []
            if not select.select(keys, [], [], left)[0]:
                continue
            typed = os.read(self._keys, 64)
            if not typed or b"q" in typed.lower():
                return True
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(args: argparse.Namespace) -> int:
    url = store_url(args, run_dir_of(args))
    watch, store, error = Watch(TICK_S), no_password(url), ""
    index = open_index(url, key_prefix=args.key_prefix, timeout_s=LIMITS.redis_timeout_s)
    try:
        watch.hear(announced_nodes(index).values(), time.monotonic())  # raises where none answers
        if not sys.stdout.isatty():  # in a pipe: what happens within one tick, once
            time.sleep(TICK_S)
            watch.hear(announced_nodes(index).values(), time.monotonic())
            shown = render(watch, time.monotonic(), time.time(), store=store, rows=10_000)
            print("\n".join(line.text.rstrip() for line in shown))
            return 0
        with Screen() as screen:
            while True:
                rows = max(shutil.get_terminal_size().lines, ROWS_MIN)
                now, wall = time.monotonic(), time.time()
                screen.draw(render(watch, now, wall, store=store, error=error, rows=rows))
                if screen.quit_within(ASKED_EVERY_S):
                    return 0
                try:
                    watch.hear(announced_nodes(index).values(), time.monotonic())
                    error = ""
                except IndexUnavailableError as e:
                    error = f"{e}: trying again"
    finally:
        index.close()
