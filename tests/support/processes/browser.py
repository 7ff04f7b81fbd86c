"""A real, headless Chromium, driven by chromedriver over WebDriver's plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

INSTALL = "apt-get install chromium chromium-driver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
)
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
KEYS = {"tab": "\ue004", "enter": "\ue007"}


class Browser:
    """One window of one browser, with a profile of its own."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        there = shutil.which("chromium") and shutil.which("chromedriver")
        assert there, f"no browser for this test: {INSTALL}"
        self._profile = tempfile.mkdtemp(prefix="kvb-")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0", "--log-level=WARNING"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._driver.stdout is not None
        port = ""
        for line in self._driver.stdout:
            if "on port" in line and "successfully" in line:
                port = line.rpartition(" ")[2].strip().rstrip(".")
                break
        self._at = f"http://127.0.0.1:{port}"
        flags = [*FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        options = {
            "goog:chromeOptions": {"args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        wish = {"capabilities": {"alwaysMatch": {"browserName": "chrome", **options}}}
        self._session = ""
        made = self._post("/session", wish)
        self._session = f"/session/{made['sessionId']}"
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def _post(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + self._session + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{path}: {json.load(e)['value']['message']}") from e

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._post("/execute/sync", {"script": f"return {script}", "args": []})

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, script: str, timeout_s: float = 30.0) -> Any:
        """The value of the expression once it is true."""
        give_up_at = time.monotonic() + timeout_s
        while not (found := self.run(script)):
            assert time.monotonic() < give_up_at, f"not true within {timeout_s} s: {script}"
            time.sleep(0.1)
        return found

    def press(self, *keys: str) -> None:
        """Type, where the focus is."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        self._post("/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def logged(self) -> list[str]:
        """What the browser complained of since the last call, a violated policy say."""
        return [str(one["message"]) for one in self._post("/se/log", {"type": "browser"})]

    def asked_for(self) -> list[str]:
        """The URLs of all requests since the last call."""
        log = [json.loads(one["message"]) for one in self._post("/se/log", {"type": "performance"})]
        return [
            str(one["message"]["params"]["request"]["url"])
            for one in log
            if one["message"]["method"] == "Network.requestWillBeSent"
            and one["message"]["params"]["request"]["url"].startswith("http")
        ]

    def devtools(self, command: str, **parameters: object) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def grow(self) -> None:
        """Make the window as high as the page, for a picture of all of it."""
        size = self.run("[innerWidth, document.documentElement.scrollHeight]")
        shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **shape)

    def screenshot(self, path: Path) -> None:
        """Of the window."""
        path.write_bytes(base64.b64decode(self._post("/screenshot", method="GET")))

    def close(self) -> None:
        try:
            self._post("", method="DELETE")
        finally:
            self._driver.kill()
            self._driver.wait(10)
            shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
