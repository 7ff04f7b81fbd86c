"""An engine of several processes that torchrun starts (vLLM's `external_launcher`).

Run as a program it is one of them: it takes calls out of files, and answers in files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
LIB = Path(__file__).parents[3] / "scripts" / "lib"


class LaunchedEngine:
    """`calls` go to all processes; each answers."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        settings: list[dict[str, Any]],
        path: str,
    ) -> None:
        """`settings` are `EngineSettings` by process; `path` is their PYTHONPATH."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._processes = len(settings)
        self._calls = 0
        (folder / "start.json").write_text(json.dumps({"model": str(model), "settings": settings}))
        self.log = folder / "log"
        _clear()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(len(settings)), __file__, str(folder)),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._answers("ready", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def call(self, op: str, **args: Any) -> list[Any]:
        """Return what each process answers; an exception comes as its text in {"error": ...}."""
        name = f"call{self._calls}"
        self._calls += 1
        draft = self._folder / "draft"
        draft.write_text(json.dumps({"op": op, **args}))
        draft.rename(self._folder / f"{name}.json")
        return self._answers(name, CALL_TIMEOUT_S)

    def _answers(self, name: str, timeout_s: float) -> list[Any]:
        files = [self._folder / f"{name}.{rank}" for rank in range(self._processes)]
        give_up_at = time.monotonic() + timeout_s
        while not all(file.exists() for file in files):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > give_up_at:
                raise RuntimeError(f"no answer to {name}, see {self.log}:\n{self._tail()}")
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """End all processes; torchrun ends those that it started."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        _clear()


def _clear() -> None:
    """Remove what vLLM leaves, under the name that the next such engine of this host gives its own:
    also what one left that was killed, of whoever ran before."""
    for left in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
        left.unlink()


def main() -> None:
    sys.path.insert(0, str(LIB))
    from engines import Driver, EngineSettings, make_llm

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    start = json.loads((folder / "start.json").read_text())
    driver = Driver(make_llm(start["model"], EngineSettings(**start["settings"][rank])))

    def answer(name: str, value: Any) -> None:
        draft = folder / f"draft.{rank}"
        draft.write_text(json.dumps(value))
        draft.rename(folder / f"{name}.{rank}")

    answer("ready", True)
    number = 0
    while True:
        call = folder / f"call{number}.json"
        while not call.exists():
            time.sleep(0.02)
        args = json.loads(call.read_text())
        op = args.pop("op")
        if "by_rank" in args:
            args.update(args.pop("by_rank")[rank])
        try:
            value = getattr(driver, op)(**args)
        except Exception as e:
            value = {"error": f"{type(e).__name__}: {e}"}
        answer(f"call{number}", value)
        number += 1


if __name__ == "__main__":
    main()
