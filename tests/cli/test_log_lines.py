"""Log lines of commands: whose they are, and one JSON object a line with `--log-json`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import COMMAND, Place, clean_env


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


LOGS = """
import logging
from kvstore.system.last_resort import start_log
start_log(logging.INFO, as_json={as_json})
logging.getLogger("kvstore.node").warning("two\\nlines of %s", "text")
try:
    raise ValueError("why")
except ValueError:
    logging.getLogger("asyncio").exception("failed")
"""


def logged(*, as_json: bool) -> str:
    program = LOGS.format(as_json=as_json)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    return ran.stderr


def test_each_line_is_one_object_and_says_kvstore() -> None:
    first, second = lines_of(logged(as_json=True))
    assert (first["level"], first["logger"]) == ("WARNING", "kvstore.node")
    assert first["message"] == "two\nlines of text"
    assert first["time"].endswith("+00:00")
    assert second["logger"] == "kvstore.asyncio"
    assert second["exception"].endswith("ValueError: why")


def test_text_lines_say_kvstore_too() -> None:
    said = logged(as_json=False)
    assert " WARNING kvstore.node: two\nlines of text\n" in said
    assert " ERROR kvstore.asyncio: failed\n" in said


def test_what_run_says_itself_is_json_too(place: Place, tmp_path: Path) -> None:
    engine = tmp_path / "vllm"
    engine.write_text("#!/bin/sh\nexit 0\n")
    engine.chmod(0o700)
    running = place.engine(str(engine), "serve", "m", options=("--log-json",))
    running.wait_for("starting ")
    found = lines_of(running.output[: running.output.rindex("\n") + 1])
    assert {one["logger"] for one in found} >= {"kvstore.cli.run"}


@pytest.mark.parametrize("command", ["node", "up"])
def test_a_command_logs_json_and_so_do_the_nodes_that_it_starts(place: Place, command: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, command, "-v", "--log-json", "--size", "1MiB", "--run-dir", str(place.run_dir)],
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "ready" not in said and (line := process.stdout.readline()):
        said += line
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    found = lines_of(err)
    assert found
    assert all(one["logger"].startswith("kvstore") for one in found)


def test_the_router_logs_json() -> None:
    pytest.importorskip("aiohttp")
    options = ["--decode", "dns+http://localhost:1", "--port", "0", "--log-json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "connector.router", *options, "--url", "redis://127.0.0.1:1"],
        env=clean_env(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        first = json.loads(process.stderr.readline())
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert first["logger"].startswith("kvstore")
