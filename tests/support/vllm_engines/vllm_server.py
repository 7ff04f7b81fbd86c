"""`vllm serve` processes for tests: the commands of the documentation, on a CPU."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from services import Service, answers

from kvstore.testing.ports import held_ports

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
KEPT_LABELS = frozenset({"reason", "source", "transport", "le"})
PROJECT = Path(__file__).parents[3]


def commands(page: Path) -> list[list[str]]:
    """Return every `vllm serve` command of a Markdown page, as arguments."""
    text = page.read_text()
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [shlex.split(b.replace("\\\n", " ")) for b in blocks if b.startswith("    vllm serve")]


def changed(command: list[str], option: str, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """Return `command` with the JSON object after `option` changed."""
    at = command.index(option) + 1
    value = json.loads(command[at])
    change(value)
    return [*command[:at], json.dumps(value), *command[at + 1 :]]


def kvstore_settings(transfer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the settings of every KVStoreConnector in a kv_transfer_config."""
    extra = transfer["kv_connector_extra_config"]
    if transfer["kv_connector"] == "KVStoreConnector":
        yield extra
    for child in extra.get("connectors", ()):
        yield from kvstore_settings(child)


def build_tokenizer(model: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are words t0, t1, …: a server wants one, even for prompts of
    token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(
        model
    )


class VllmServer:
    """One API server with its engine. `start` returns at once, `wait` when it answers."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        if command[:2] == ["vllm", "serve"]:
            command = [str(Path(sys.executable).with_name("vllm")), *command[1:]]
        self._held = contextlib.ExitStack()
        (self.port,) = self._held.enter_context(held_ports(1))
        at = "--host", "127.0.0.1", "--port", str(self.port)
        self._service = Service([*command, *at], log, env=env)

    @property
    def process(self) -> subprocess.Popen[Any]:
        return self._service.process

    @property
    def log(self) -> str:
        return self._service.said()

    def wait(self) -> VllmServer:
        """Wait until the server is up. Raises `RuntimeError` with the end of the log when it does
        not come up."""
        self._service.wait(answers(f"http://127.0.0.1:{self.port}/health"), START_TIMEOUT_S)
        return self

    def complete(self, prompt: list[int], max_tokens: int = 16) -> list[int]:
        """Return the tokens generated for a prompt of tokens, greedily."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def metrics(self) -> dict[str, float]:
        """Return /metrics as {"name{reason}" or "name": value}: of labels only `KEPT_LABELS` are
        kept."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._get("/metrics", CALL_TIMEOUT_S)):
            for sample in family.samples:
                kept = [v for k, v in sample.labels.items() if k in KEPT_LABELS]
                name = sample.name + (f"{{{','.join(kept)}}}" if kept else "")
                found[name] = sample.value
        return found

    def _get(self, path: str, timeout_s: float) -> str:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        """End the server and its engine: ask, then kill. Safe to call twice."""
        self._held.close()
        self._service.close()


class Subscriber:
    """vLLM's KV cache events, as a router receives them."""

    def __init__(self, port: int) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.events: list[Any] = []

    def poll(self, timeout_s: float) -> list[Any]:
        """Return all events so far; waits for more up to the timeout."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        while self._socket.poll(int(timeout_s * 1000)):
            _, _, payload = self._socket.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            self.events += batch.events
            timeout_s = 0.0
        return self.events

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
