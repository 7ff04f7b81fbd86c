"""scripts/site: links stay within the site, and a browser that reads it asks no other host."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import site_pages  # noqa: E402

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
BROWSER = shutil.which("chromium")


def test_a_link_within_the_site_is_kept_and_one_that_leads_out_is_text() -> None:
    text = "See [run](../docs/run.md#ports), [`keys.py`](../kvstore/keys.py), [x](https://a.b/c)."
    assert site_pages.linked(text, "docs/where.md") == (
        "See [run](run.md#ports), `keys.py`, [x](https://a.b/c)."
    )
    assert site_pages.linked("[d](decisions/README.md)", "docs/run.md") == "[d](decisions/index.md)"
    assert site_pages.linked("![p](docs/diagrams/load.svg)", "README.md") == (
        "![p](diagrams/load.svg)"
    )
    assert site_pages.linked("[up](../../README.md)", "docs/decisions/0001.md") == (
        "[up](../index.md)"
    )


def test_what_is_code_is_left_alone() -> None:
    code = "```\n[a](../kvstore/keys.py)\n```\nand `[b](c.md)`"
    assert site_pages.linked(code, "docs/run.md") == code


def test_every_page_has_its_place_in_the_navigation(tmp_path: Path) -> None:
    site_pages.stage(tmp_path)
    pages = {str(path.relative_to(tmp_path / "docs")) for path in tmp_path.rglob("*.md")}
    assert {"index.md", "run.md", "decisions/index.md", "api/kvstore.md", "api/spi.md"} <= pages
    listed = re.findall(r"\]\((.+)\)$", site_pages.llms(tmp_path / "docs"), re.MULTILINE)
    assert set(listed) == {page for page in pages if not re.match(r"decisions/\d", page)}
    assert "::: kvstore.Client\n" in (tmp_path / "docs/api/kvstore.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site") / "made"
    ran = subprocess.run(
        [str(ROOT / "scripts" / "site"), str(directory)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return directory


class Loads(HTMLParser):
    """Collects what a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        if (of := LOADS.get(tag)) and (url := given.get(of)):
            self.found.append(url)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning_and_names_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.found
        assert not [url for url in loads.found if re.match(r"(https?:)?//", url)], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet
    assert (site / "llms.txt").read_text().startswith("# kvstore\n")
    assert (site / "run.md").is_file()
    for name in ("Client", "put_blocks"):
        assert name in (site / "api" / "kvstore" / "index.html").read_text()


@contextmanager
def served(directory: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def asked_by_page(origin: str, page: str, scratch: Path) -> set[str]:
    """What the page has the browser ask for: what that asks for its maker has another initiator."""
    log = scratch / "net.json"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={scratch / 'user'}", "--virtual-time-budget=5000"]
    command += [f"--log-net-log={log}", f"{origin}{page}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "kvstore" in ran.stdout, ran.stderr[-2000:]
    params = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    return {one["url"] for one in params if "url" in one and one.get("initiator") == origin}


BROWSED = pytest.mark.skipif(BROWSER is None, reason="no chromium here")


@BROWSED
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_browser_that_reads_the_site_asks_no_other_host(site: Path, tmp_path: Path) -> None:
    with served(site) as origin:
        for i, page in enumerate(("/", "/run/", "/engines/", "/api/kvstore/")):
            (tmp_path / str(i)).mkdir()
            asked = asked_by_page(origin, page, tmp_path / str(i))
            assert any(url.endswith(".css") for url in asked), page
            assert not [url for url in asked if not url.startswith(origin)], page


@BROWSED
@pytest.mark.long
def test_a_page_that_asks_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('kvstore<img src="http://127.0.0.2:1/picture.png">')
    with served(tmp_path) as origin:
        asked = asked_by_page(origin, "/", tmp_path)
        others = {url for url in asked if not url.startswith(origin)}
        assert others == {"http://127.0.0.2:1/picture.png"}
