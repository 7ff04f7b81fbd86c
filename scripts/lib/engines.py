"""Runs real vLLM engines for tests, the demo and benchmarks, with a model made on the spot.

    with EngineProcess(model_dir, EngineSettings(connector={...})) as engine:
        result = engine.generate([[1, 2, 3]], max_tokens=8)[0]

The engine is a process of its own that speaks JSON lines over a socket which it inherits.
In one file, because this is also the program that runs in that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llvmlite_names
from engine_template import can_be_forked, fork_engine, start_engine
from tiny_models import ModelShape as ModelShape
from tiny_models import build_model as build_model
from tiny_models import cpu_dtype as cpu_dtype
from tiny_models import picture

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Says how one engine is started."""

    connector: dict[str, Any] | None = None
    """kv_transfer_config, or None for an engine without a store."""
    dtype: str = field(default_factory=cpu_dtype)
    """Of weights and KV."""
    in_process: bool = True
    """Scheduler and model in the engine process itself, else in one more, as `vllm serve` does."""
    kv_blocks: int = 256
    block_size: int = 32
    max_model_len: int = 4096
    max_batched_tokens: int = 2048
    prefix_caching: bool = True
    cpus: str | None = None
    """Cores for the model's threads, as in VLLM_CPU_OMP_THREADS_BIND; None: vLLM chooses."""
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


def kv_transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Return a kv_transfer_config for the connector of this project."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def environment_of(settings: EngineSettings) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if settings.in_process else "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"VLLM_CPU_OMP_THREADS_BIND": settings.cpus} if settings.cpus else {}),
        **settings.env,
    }


@dataclass(frozen=True, slots=True)
class Generated:
    """Holds one finished request."""

    tokens: list[int]
    ttft_s: float
    """From handing the request in to its first token."""
    cached_tokens: int
    """Prompt tokens that were not computed: found locally or loaded."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the connector answered to a request that asked for something."""


class EngineProcess:
    """Runs one engine in a process of its own. Starting waits until it can generate."""

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        log: Path | None = None,
        program: Path = Path(__file__),
        on: Sequence[str] = (),
        python: Path | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        cwd: Path | None = None,
        fresh: bool = False,
    ) -> None:
        """`program` is what runs in the process: this file, or another that calls `serve`. `python`
        runs it, where it is not the caller's. `on` is a command that starts what follows it
        somewhere else (`Hosts.command`). Calls that take longer raise `TimeoutError`. A `fresh` one
        imports vLLM itself, as a user's engine does, or none; others are forked where they can."""
        ours, theirs = socket.socketpair()
        request = json.dumps({"model": str(model), "settings": asdict(settings)})
        self.log = log
        self._call_timeout_s = call_timeout_s
        self._log = log.open("wb") if log is not None else None
        arguments = [str(program), str(theirs.fileno()), request]
        forked = not (fresh or on) and can_be_forked(settings.env)
        start = fork_engine if forked else start_engine
        self._process = start(
            [*on, str(python or sys.executable)],
            arguments,
            environment_of(settings),
            pass_fd=theirs.fileno(),
            cwd=cwd,
            log=self._log,
        )
        theirs.close()
        self._socket = ours
        self._lines = ours.makefile("rwb")
        try:
            self._read(START_TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as e:
            self.close()
            raise RuntimeError(f"an engine did not start, see {log}: {e}") from e

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Send one request to the process, and return its answer. Raises `RuntimeError` with what
        went wrong there."""
        self._lines.write(json.dumps({"op": op, **args}).encode() + b"\n")
        self._lines.flush()
        return self._read(self._call_timeout_s if timeout_s is None else timeout_s)

    def _read(self, timeout_s: float) -> Any:
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"the engine ended with code {self._process.wait(STOP_TIMEOUT_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        abort_after_s: dict[int, float] | None = None,
        kv_transfer_params: dict[str, Any] | list[Any] | None = None,
        **more: Any,
    ) -> list[Generated]:
        """Run prompts together, greedily; `abort_after_s` ends some of them early, and
        `kv_transfer_params` are of all or a list of each. `more` is for `Driver.generate`."""
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = kv_transfer_params
        return [
            Generated(**result)
            for result in self.call(
                "generate",
                prompts=prompts,
                max_tokens=max_tokens,
                abort_after_s=abort_after_s or {},
                **more,
            )
        ]

    def drain(self) -> None:
        """Return when the connector has nothing in flight (engines in this process only)."""
        self.call("drain")

    def kill(self) -> None:
        """End the process as an OOM killer does."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End the process: ask, then kill. Safe to call twice."""
        if self._process.poll() is None:
            try:
                self.call("close", timeout_s=STOP_TIMEOUT_S)
                self._process.wait(STOP_TIMEOUT_S)
            except (OSError, RuntimeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_llm(model: str, settings: EngineSettings) -> Any:
    """Make a `vllm.LLM` in this very process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if settings.connector is not None:
        llvmlite_names.say_what_is_lacking()
    transfer = KVTransferConfig(**settings.connector) if settings.connector else None
    return LLM(
        **{
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": settings.dtype,
            "enforce_eager": True,
            "block_size": settings.block_size,
            "num_gpu_blocks_override": settings.kv_blocks,
            "max_model_len": settings.max_model_len,
            "max_num_batched_tokens": settings.max_batched_tokens,
            "max_num_seqs": 16,
            "enable_prefix_caching": settings.prefix_caching,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": transfer,
            "disable_log_stats": True,
            "seed": 0,
            **settings.extra,
        }
    )


def sampling(max_tokens: int, kv_transfer_params: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=kv_transfer_params and {"kv_transfer_params": kv_transfer_params},
    )


def _adapter(engine: Any, lora: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    named = lora["name"], lora["id"], lora["path"]
    if lora.get("reload"):
        engine.add_lora(LoRARequest(*named, load_inplace=True))
    return LoRARequest(*named)


class Driver:
    """Drives an engine step by step, to see first tokens when they come."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self._next = 0

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        abort_after_s: dict[str, float],
        kv_transfer_params: dict[str, Any] | list[Any] | None = None,
        cache_salt: str | None = None,
        lora: dict[str, Any] | None = None,
        images: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Run prompts; `lora` names an adapter (name, id, path, and `reload` to load it again),
        `images` a seed for the picture of each prompt."""
        adapter = _adapter(self.engine, lora) if lora else None
        given = kv_transfer_params
        params = given if isinstance(given, list) else [given] * len(prompts)
        started: dict[str, float] = {}
        results: dict[str, dict[str, Any]] = {}
        aborts: dict[str, float] = {}
        for i, prompt in enumerate(prompts):
            name = f"r{self._next}"
            self._next += 1
            started[name] = time.perf_counter()
            results[name] = {"tokens": [], "ttft_s": -1.0, "cached_tokens": -1}
            tokens: dict[str, Any] = {"prompt_token_ids": prompt}
            if cache_salt is not None:
                tokens["cache_salt"] = cache_salt
            if images is not None:
                tokens["multi_modal_data"] = {"image": picture(images[i])}
            parameters = sampling(max_tokens, params[i])
            self.engine.add_request(name, tokens, parameters, lora_request=adapter)
            if str(i) in abort_after_s:
                aborts[name] = started[name] + abort_after_s[str(i)]
        apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
        while self.engine.has_unfinished_requests():
            if apart and aborts:  # a step waits for an answer, meanwhile nobody could hang up
                time.sleep(max(0.0, min(aborts.values()) - time.perf_counter()))
            now = time.perf_counter()
            due = [name for name, at in aborts.items() if now >= at]
            if due:
                self.engine.abort_request(due)
                for name in due:
                    del aborts[name]
                if apart:  # nothing may be left that a step could wait for
                    continue
            for output in self.engine.step():
                result = results[output.request_id]
                result["tokens"] = list(output.outputs[0].token_ids)
                if result["tokens"] and result["ttft_s"] < 0:
                    result["ttft_s"] = time.perf_counter() - started[output.request_id]
                if output.num_cached_tokens is not None:
                    result["cached_tokens"] = output.num_cached_tokens
                if output.kv_transfer_params is not None:
                    result["kv_transfer_params"] = output.kv_transfer_params
        return list(results.values())

    def drain(self) -> None:
        core = self.engine.engine_core.engine_core
        give_up_at = time.monotonic() + 30
        while core.scheduler.has_requests() and time.monotonic() < give_up_at:
            core.step_fn()

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake_up(self) -> None:
        self.llm.wake_up()

    def reload(self, path: str) -> None:
        """Load other weights in place."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def set_weight_version(self, version: str) -> None:
        self.engine.set_weight_version(version)

    def counter(self, name: str) -> float:
        """Return one of vLLM's own counters; it needs `disable_log_stats` off."""
        return sum(float(one.value) for one in self.llm.get_metrics() if one.name == name)

    def running(self) -> dict[str, bool]:
        """Tell how the engine runs, as vLLM has settled it."""
        config = self.engine.vllm_config
        graphs = config.compilation_config.cudagraph_mode
        return {
            "model runner V2": bool(config.use_v2_model_runner),
            "asynchronous scheduling": bool(config.scheduler_config.async_scheduling),
            "CUDA graphs": not config.model_config.enforce_eager and bool(graphs and graphs.value),
        }

    def reset(self, connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))


def serve(make_driver: Callable[[str, EngineSettings], Any]) -> None:
    """Be the engine process: argv is the socket's descriptor and the start request."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines = connection.makefile("rwb")

    def answer(value: Any, error: str | None = None) -> None:
        body = {"error": error} if error is not None else {"value": value}
        lines.write(json.dumps(body).encode() + b"\n")
        lines.flush()

    request = json.loads(sys.argv[2])
    try:
        driver = make_driver(request["model"], EngineSettings(**request["settings"]))
    except Exception as e:
        answer(None, f"{type(e).__name__}: {e}")
        raise
    answer("ready")
    while line := lines.readline():
        call = json.loads(line)
        op = call.pop("op")
        try:
            if op == "close":
                driver.close()
                answer(True)
                os._exit(0)  # an engine's threads may outlive an ordinary exit by seconds
            answer(getattr(driver, op)(**call))
        except Exception as e:
            answer(None, f"{type(e).__name__}: {e}")
    os._exit(0)  # the caller is gone; some engines never come to the end of an ordinary exit


if __name__ == "__main__":
    serve(lambda model, settings: Driver(make_llm(model, settings)))
