"""Every program of examples/ runs as its first lines say, and prints what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer
from stores import NodeProcess

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"
PATIENT = Path(__file__).parent / "patient"
KEY_PREFIX = "kv:default"
SECRET = "a secret that both hosts know"
TIMEOUT_S = 100.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def store(redis: RedisServer) -> Iterator[NodeProcess]:
    """What a client finds that is given no arguments: the URL and the run directory."""
    redis.admin().flushall()
    with NodeProcess(
        redis,
        key_prefix=KEY_PREFIX,
        options=("--listen", "127.0.0.1:0"),
        environment={"KVSTORE_SECRET": SECRET},
    ) as node:
        yield node


def run(
    name: str,
    *args: str,
    store: NodeProcess,
    run_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    **environment: str,
) -> list[str]:
    """The lines that it prints."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        env={
            **os.environ,
            "KVSTORE_URL": store.redis.url,
            "KVSTORE_RUN_DIR": str(run_dir or store.run_dir),
            "KVSTORE_SECRET": SECRET,
            "PYTHONPATH": str(PATIENT),
            "PYTHONWARNINGS": "default::ResourceWarning",
            **environment,
        },
        cwd=EXAMPLES.anchor,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "ResourceWarning" not in ran.stderr or name == "vllm_offline.py"
    return ran.stdout.splitlines()


def test_each_example_has_its_test_and_is_short() -> None:
    tests = Path(__file__).read_text()
    for path in EXAMPLES.glob("*"):
        if path.is_file():
            assert f'run("{path.name}"' in tests or path.suffix != ".py", path
            assert len(path.read_text().splitlines()) <= 40, path


def test_put_and_get(store: NodeProcess) -> None:
    said = run("put_get.py", store=store)
    assert said == ["stored", "b'hello'", "None", "[b'1', b'2', None]", "False"]


def test_asyncio(store: NodeProcess) -> None:
    assert run("with_asyncio.py", store=store) == [str([str(i).encode() for i in range(8)])]


def test_tensors(store: NodeProcess) -> None:
    pytest.importorskip("torch")
    said = "\n".join(run("tensors.py", store=store))
    assert "dtype=torch.bfloat16" in said
    assert "[0.         0.33333334 0.6666667  1.        ]" in said
    assert said.endswith("15.0")


def test_zero_copy(store: NodeProcess) -> None:
    assert run("zero_copy.py", store=store) == ["4999950000", "False", "99999"]


def test_two_hosts(store: NodeProcess) -> None:
    assert run("two_hosts.py", "put", store=store) == ["stored"]
    with tempfile.TemporaryDirectory(prefix="kvb-", ignore_cleanup_errors=True) as other_host:
        (said,) = run("two_hosts.py", "get", store=store, run_dir=Path(other_host))
    assert said.startswith("1048576 ")
    assert "'stream_bytes': 1048576" in said


def test_own_engine(store: NodeProcess) -> None:
    assert run("own_engine.py", store=store) == ["0", "5"]


@pytest.mark.long
def test_torch_between_processes(store: NodeProcess) -> None:
    pytest.importorskip("torch")
    assert run("torch_between_processes.py", store=store) == ["torch.float32 (256, 256) 65536.0"]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(600)
def test_vllm_offline(store: NodeProcess, tmp_path: Path) -> None:
    sys.path.insert(0, str(PROJECT / "scripts" / "lib"))
    from engines import ModelShape, build_model
    from vllm_server import build_tokenizer

    model = build_model(tmp_path / "llama", ModelShape())
    build_tokenizer(model, 512)
    quick = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    first, second = (
        [
            line
            for line in run("vllm_offline.py", str(model), store=store, timeout_s=280, **quick)
            if line.startswith(("tokens not computed:", "answer:"))
        ]
        for _ in range(2)
    )
    assert first[0] == "tokens not computed: 0"
    assert int(second[0].rpartition(" ")[2]) > 0
    assert second[1] == first[1]
