"""Real vLLM under `kvstore run`: what one engine computed is loaded by another, and nothing is left
of either."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import ModelShape, build_model, cpu_dtype
from vllm_server import VllmServer, build_tokenizer

from kvstore.node.config import node_id_of
from kvstore.nodedir import node_dirs
from kvstore.segment.header import SHM_DIR

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
BLOCK = 64
T = 8 * BLOCK
WAIT_S = 60.0
ENV = {
    "KVSTORE_URL": "",
    "KVSTORE_RUN_DIR": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SMALL = (
    f"--dtype {cpu_dtype()} --enforce-eager --block-size 32 --seed 0 --max-model-len 1024 "
    f"--max-num-batched-tokens {T} --max-num-seqs 4 --num-gpu-blocks-override 64"
).split()
FORMS = {
    "command": [str(Path(sys.executable).with_name("vllm")), "serve", "MODEL"],
    "module": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(tmp_path_factory.mktemp("run") / "llama", ModelShape(context_tokens=1024))
    build_tokenizer(model, 512)
    return model


@pytest.fixture
def run_dir() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvr-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


class RunServer(VllmServer):
    """A server that `kvstore run` starts."""

    def __init__(self, form: str, model: Path, run_dir: Path, log: Path, beside: str) -> None:
        """`beside` is a connector that the command has already, which is merged."""
        engine = [str(model) if word == "MODEL" else word for word in FORMS[form]]
        engine += [*SMALL, *(("--kv_transfer_config", beside) if beside else ())]
        store = ["--run-dir", str(run_dir), "--size", "64MiB", *(("--merge",) if beside else ())]
        command = [sys.executable, "-m", "kvstore", "run", *store, "--", *engine]
        super().__init__(command, ENV, log)


def wait_until(true: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up_at, f"not within {WAIT_S} s: {what}"
        time.sleep(0.1)


def processes(run_dir: Path) -> list[str]:
    """What of the store or an engine runs here, zombies apart: their environment names it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.fsencode(run_dir)
                in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            ):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def segments(run_dir: Path) -> list[Path]:
    """Of the nodes of this run directory."""
    ids = [node_id_of(run_dir, path.name) for path in (run_dir / "epochs").iterdir()]
    assert ids
    return [path for i in ids for path in SHM_DIR.glob(f"kvstore-*-{i:016x}-*")]


BESIDE = (
    '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"shared_storage_path": "%s"}}'
)


@pytest.mark.parametrize(("form", "merged"), [("command", False), ("module", True)])
def test_a_second_engine_loads_what_the_first_computed_and_nothing_is_left(
    form: str, merged: bool, model: Path, run_dir: Path, tmp_path: Path
) -> None:
    """Also where the second one has another connector, too."""
    beside = BESIDE % (tmp_path / "files") if merged else ""
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 500) for _ in range(T + 2)] for _ in range(2)]
    servers: list[RunServer] = []
    try:
        for name in ("first", "second"):
            log = tmp_path / f"{name}.log"
            servers.append(RunServer(form, model, run_dir, log, beside if name == "second" else ""))
            servers[-1].wait()
        first, second = servers
        assert "found, 64 MiB" in second.log
        answers = [first.complete(prompt) for prompt in prompts]
        saved = "vllm:kvstore_saved_blocks_total"
        wait_until(
            lambda: first.complete([2, 3, 4], 2) and first.metrics()[saved] >= 2 * T // BLOCK,
            "all blocks are saved",
        )
        assert [second.complete(prompt) for prompt in prompts] == answers
        wait_until(
            lambda: (
                second.complete([2, 3, 4], 2)
                and second.metrics()["vllm:kvstore_hit_tokens_total"] == 2 * T
            ),
            "all tokens are loaded",
        )
        assert second.metrics()["vllm:external_prefix_cache_hits_total"] == 2 * T
        # The first one as its user ends it, the second as an OOM killer does.
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(WAIT_S) in (0, 130)
        assert "stays: others use it" in first.log
        assert [d.alive() for d in node_dirs(run_dir)] == [True]
        assert len(segments(run_dir)) == 2
        second.process.kill()
        wait_until(lambda: not processes(run_dir), f"no process is left: {processes(run_dir)}")
        assert segments(run_dir) == []
    finally:
        for server in servers:
            server.close()
