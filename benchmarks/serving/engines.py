"""Starts the serving engines of a turn, each bound to a core, and sends them requests."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.engine_program import LINE_BYTES_MAX
from benchmarks.serving.sessions import PROMPT_TOKENS_MAX, Request

PROGRAM = Path(__file__).with_name("engine_program.py")
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
LOG_LINES = 400
"""From the end of a log, where the reason of an end is looked for."""
REASON_CHARS_MAX = 300
BLOCK_TOKENS = 32
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds what an engine said to one request; `error` when it failed."""

    tokens: list[int] = field(default_factory=list)
    best: list[list[tuple[float, int]]] = field(default_factory=list)
    """Log-probability and token of the two best, at each position."""
    ttft_s: float = -1.0
    cached_tokens: int = 0
    error: str | None = None


def arguments(model: Path, *, dtype: str, kv_blocks: int) -> dict[str, Any]:
    """Return the engine's arguments: a cache smaller than the working set, prefix caching on."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": kv_blocks,
        "max_model_len": PROMPT_TOKENS_MAX + BLOCK_TOKENS,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }


class ServingEngine:
    """Runs one engine in a process of its own."""

    def __init__(
        self,
        python: Path,
        arguments: Mapping[str, Any],
        connector: Mapping[str, Any] | None,
        *,
        core: int,
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the process; `ready` waits until it can generate."""
        self._socket, theirs = socket.socketpair()
        request = json.dumps({"arguments": arguments, "connector": connector})
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **env,
        }
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(python), str(PROGRAM), str(theirs.fileno()), request],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.versions: dict[str, str] = {}

    async def ready(self) -> None:
        """Return when it can generate. Raises `RuntimeError` with the reason when it cannot."""
        reader, self._writer = await asyncio.open_connection(
            sock=self._socket, limit=LINE_BYTES_MAX
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await reader.readline()
        except TimeoutError:
            raise RuntimeError(
                f"the engine was not ready in {START_TIMEOUT_S:.0f} s: {last_error(self.log)}"
            ) from None
        if not line:
            raise RuntimeError(f"the engine did not start: {last_error(self.log)}")
        self.versions = {k: v for k, v in json.loads(line).items() if k != "name"}
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer.pop("name"), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": f"the engine ended: {last_error(self.log)}"})
        self._waiting.clear()

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Send one request and return its answer; what fails or takes longer is an error in it."""
        name = request.name
        assert self._writer is not None
        assert self._reading is not None
        if self._reading.done():
            return Answer(error="the engine has ended")
        self._waiting[name] = asyncio.get_running_loop().create_future()
        call = {
            "name": name,
            "prompt": request.prompt,
            "max_tokens": MAX_TOKENS,
            "sent_s": time.monotonic(),
        }
        self._writer.write(json.dumps(call).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._waiting[name]
        except TimeoutError:
            self._waiting.pop(name, None)
            return Answer(error=f"not answered in {timeout_s:.0f} s")
        return Answer(**answer)

    async def close(self) -> None:
        """End the process: ask, then kill. What it leaves behind is the caller's to end."""
        if self._writer is not None and self.process.poll() is None:
            self._writer.write(b'{"name": "close"}\n')
            give_up_at = time.monotonic() + STOP_TIMEOUT_S
            while self.process.poll() is None and time.monotonic() < give_up_at:
                await asyncio.sleep(0.1)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()


def last_error(log: Path) -> str:
    """Return the line of a log that says best why a program ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]]
    telling = [line for line in lines if "rror" in line and "Traceback" not in line]
    chosen = next(
        (line for line in telling if "error while loading" in line or "cannot open shared" in line),
        telling[-1] if telling else (lines or ["it said nothing"])[-1],
    )
    return f"{chosen[-REASON_CHARS_MAX:]} (see {log})"
