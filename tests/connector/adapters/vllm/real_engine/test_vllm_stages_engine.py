"""Real vLLM engines of two pipeline stages: each stage saves and loads the KV of its own layers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import EngineProcess, EngineSettings, build_model, kv_transfer
from redis_servers import wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages need two cores"),
]
BLOCK = 64
T = 4 * BLOCK
TESTS = Path(__file__).parents[4]
PATH = os.pathsep.join(
    [str(TESTS.parent), str(TESTS / "support" / "vllm_engines"), os.environ.get("PYTHONPATH", "")]
)
PROMPTS = [random.Random(i).choices(range(2, 500), k=T + 2) for i in range(3)]
SHM = Path("/dev/shm")


def stages_memory() -> set[Path]:
    """What stages of vLLM's engines pass tensors through; vLLM never removes it (16 MiB a pair)."""
    return set(SHM.glob("vllm_dist_*-pp:*"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Removes what the engines of a test leave in `SHM`."""
    before = stages_memory()
    yield
    for left in stages_memory() - before:
        left.unlink(missing_ok=True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.covers("two pipeline stages", "engine")
def test_two_stages_load_what_two_others_saved_and_answer_as_one_stage_does(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    model = build_model(tmp_path / "model")

    def start(name: str, stages: int, connector: dict[str, object] | None) -> EngineProcess:
        settings = EngineSettings(
            connector=connector,
            in_process=stages == 1,
            max_batched_tokens=T,
            max_model_len=1024,
            cpus="|".join(map(str, range(stages))),
            env={"PYTHONPATH": PATH},
            extra={
                "dtype": "float32",
                "pipeline_parallel_size": stages,
                "worker_cls": "stage_worker.StageWorker",
            },
        )
        return EngineProcess(model, settings, log=tmp_path / f"{name}.log")

    with NodeProcess(redis_server, size=128 * MIB) as node, Client(**node.client_options) as client:
        transfer = kv_transfer(load_timeout_s=60.0, block_tokens=BLOCK, **node.engine_settings)

        def saved() -> int:
            return int(node_stats(client)["blocks"])

        with start("writer", 2, transfer) as writer:
            computed = [writer.generate([prompt])[0] for prompt in PROMPTS]
            assert [result.cached_tokens for result in computed] == [0] * len(PROMPTS)
            wait_until(
                lambda: saved() == 2 * len(PROMPTS) * T // BLOCK, "both stages' blocks", 120.0
            )
        with start("reader", 2, transfer) as reader:
            loaded = [reader.generate([prompt])[0] for prompt in PROMPTS]
            assert [result.cached_tokens for result in loaded] == [T] * len(PROMPTS)
    with start("alone", 1, None) as alone:
        wanted = [result.tokens for result in alone.generate(PROMPTS)]
    assert [result.tokens for result in computed] == wanted
    assert [result.tokens for result in loaded] == wanted
