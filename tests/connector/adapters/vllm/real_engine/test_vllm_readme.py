"""README's section on vLLM, followed to the letter but for sizes: a second engine loads."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ModelShape, build_model, cpu_dtype
from redis_servers import wait_until
from vllm_server import PROJECT, VllmServer, build_tokenizer, commands

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]
README = PROJECT / "README.md"
TOKENS = 512
START_S = 60.0
SMALL = (
    f"--dtype {cpu_dtype()} --enforce-eager --seed 0 --max-model-len 1024 "
    "--max-num-seqs 4 --num-gpu-blocks-override 64"
)


def counted(server: VllmServer, name: str) -> float:
    server.complete([2, 3, 4], max_tokens=2)  # metrics come with steps
    return server.metrics()[f"vllm:kvstore_{name}_total"]


def test_two_engines_of_the_readmes_section_on_vllm_share_a_prompt(tmp_path: Path) -> None:
    section = README.read_text().partition("## Use it with vLLM")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^    (kvstore up .*?)(?: +#.*)?$", section, re.MULTILINE)
    words = shlex.split(line.replace("64GiB", "256MiB"))
    model = build_model(tmp_path / "llama", ModelShape(context_tokens=1024))
    build_tokenizer(model, 512)
    env = {**os.environ, "KVSTORE_RUN_DIR": str(tmp_path / "run"), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said = tmp_path / "up.txt"
    with said.open("wb") as out:
        up = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", *words[1:]], stdout=out, env=env
        )
    servers: list[VllmServer] = []
    try:
        wait_until(lambda: "Ctrl-C ends it." in said.read_text(), "the store runs", START_S)
        (url,) = re.findall(r"export KVSTORE_URL=(\S+)", said.read_text())
        env["KVSTORE_URL"] = url
        (command,) = commands(README)
        command[command.index("MODEL")] = str(model)
        for name in ("first", "second"):
            server = VllmServer([*command, *SMALL.split()], env, tmp_path / f"{name}.log")
            servers.append(server)
        first, second = (server.wait() for server in servers)
        prompt = [7 + i % 400 for i in range(TOKENS + 2)]
        answer = first.complete(prompt)
        wait_until(lambda: counted(first, "saved_blocks") > 0, "the first has saved", START_S)
        assert second.complete(prompt) == answer
        wait_until(lambda: counted(second, "hit_tokens") == TOKENS, "the second loads", START_S)
    finally:
        for server in servers:
            server.close()
        up.send_signal(signal.SIGINT)
        up.wait(START_S)
