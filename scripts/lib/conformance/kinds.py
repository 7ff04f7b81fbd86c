"""The cases of `scripts/conformance` with more than one kind of model, request or store: adapters,
pictures, hybrids, revisions, eviction at the wrong moment, an older version's store."""

from __future__ import annotations

import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import (
    IMAGE_TOKENS,
    build_adapter,
    build_seeing,
    build_sliding,
    build_states,
    hub_cache,
)

from conformance.bench import (
    BAD,
    CALL_TIMEOUT_S,
    NOT_RUN,
    ROOT,
    TOKENS,
    Bench,
    Verdict,
    absolute,
    forget,
    judge,
    tokens_of,
    worst,
)

if TYPE_CHECKING:
    from engines import EngineProcess, Generated

ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
REVISIONS = ("a" * 40, "b" * 40)
OLDER = "8222e52"
"""This project before its segments had their present layout (version 6)."""
FLOOD_BATCH = 8
PAUSED_TIMEOUT_S = 140.0
"""Of the engine that waits while another one floods the store."""
KV_BYTES_PER_TOKEN = 2048
"""Of the small Llama in the narrower of both dtypes."""


def adapters(bench: Bench) -> Verdict:
    """Two LoRA adapters and the model alone see nothing of each other, though their tokens and
    numbers are the same; what one adapter computed it finds again."""
    a = {"name": "a", "id": 1, "path": str(build_adapter(bench.work / "adapter a", 1))}
    b = {"name": "b", "id": 1, "path": str(build_adapter(bench.work / "adapter b", 2))}
    alone, first, second = _adapted(bench)
    wanted = bench.prompts()
    asked = sum(map(len, wanted))
    right = {
        name: tokens_of(alone.generate(wanted, lora=lora))
        for name, lora in (("a", a), ("b", {**b, "id": 2}), ("none", None))
    }
    if right["a"] == right["b"] or right["a"] == right["none"]:
        return Verdict("adapters", NOT_RUN, detail="adapters change no answer")
    found = bench.share(first, second, wanted, lora=a)
    same = judge("adapters", right["a"], found, asked, apart=False)
    third = first
    if bench.within:
        b["id"] = 2  # an engine has one adapter of a number
    else:
        third = bench.sharing("third with adapters", extra=ADAPTERS)
    other = judge("adapters", right["b"], third.generate(wanted, lora=b), asked, apart=True)
    none = judge("adapters", right["none"], third.generate(wanted), asked, apart=True)
    return worst(same, other, none)


def reloaded_adapter(bench: Bench) -> Verdict:
    """An adapter gets other weights under its name and path: neither an engine that is told to load
    it again nor one that loads it for the first time gets the former one's KV."""
    path = bench.work / "moving adapter"
    lora = {"name": "moving", "id": 3, "path": str(build_adapter(path, 3))}
    alone, first, second = _adapted(bench)
    wanted = bench.prompts()
    asked = sum(map(len, wanted))
    first.generate(wanted, lora=lora)
    first.drain()
    build_adapter(path, 4)
    right = tokens_of(alone.generate(wanted, lora=lora))
    forget(first)  # vLLM keys its own cache by the name alone
    if bench.within:
        again = first.generate(wanted, lora={**lora, "reload": True})
        return judge("reloaded-adapter", right, again, asked, apart=True)
    fresh = judge("reloaded-adapter", right, second.generate(wanted, lora=lora), asked, apart=True)
    again = first.generate(wanted, lora={**lora, "reload": True})
    # By now the other engine has saved the new adapter's: that may be loaded.
    return worst(fresh, judge("reloaded-adapter", right, again, asked, apart=False))


def _adapted(bench: Bench) -> tuple[EngineProcess, EngineProcess, EngineProcess]:
    alone = bench.alone("alone with adapters", extra=ADAPTERS)
    return alone, *bench.pair(" with adapters", extra=ADAPTERS)


def pictures(bench: Bench) -> Verdict:
    """Prompts of the same tokens behind other pictures see nothing of each other; behind the same
    picture they do."""
    model = build_seeing(bench.work / "seeing")
    extra = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    alone = bench.alone("alone, seeing", model, extra=extra)
    first, second = bench.pair(", seeing", model, extra=extra)
    wanted = bench.prompts(TOKENS + 2 - IMAGE_TOKENS)
    asked = (TOKENS + 2) * len(wanted)
    ones, others = [1, 2, 3], [4, 5, 6]
    right = tokens_of(alone.generate(wanted, images=others))
    same = tokens_of(alone.generate(wanted, images=ones))
    if right == same:
        return Verdict("pictures", NOT_RUN, detail="pictures change no answer")
    found = bench.share(first, second, wanted, images=ones)
    loaded = judge("pictures", same, found, asked, apart=False)
    if bench.hands_over:
        return loaded
    found = second.generate(wanted, images=others)
    return worst(loaded, judge("pictures", right, found, asked, apart=True))


def revision(bench: Bench) -> Verdict:
    """Two revisions of one model on Hugging Face's hub share nothing."""
    files = {REVISIONS[0]: bench.model(7), REVISIONS[1]: bench.model(8)}
    cache = hub_cache(bench.work / "hub", "kvstore/small", files)
    env = {"HF_HUB_CACHE": str(cache), "HF_HOME": str(cache.parent), "TRANSFORMERS_CACHE": ""}
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone with others", bench.model(8)).generate(wanted))
    engines = [
        bench.sharing(name, Path("kvstore/small"), env=env, extra={"revision": which})
        for name, which in zip(("revision a", "revision b"), REVISIONS, strict=True)
    ]
    found = bench.share(engines[0], engines[1], wanted)
    return judge("revision", reference, found, sum(map(len, wanted)), apart=True)


def sliding_windows(bench: Bench) -> Verdict:
    """A hybrid of sliding windows and full attention: two KV cache groups."""
    model = build_sliding(bench.work / "sliding")
    return _of_kind(bench, "sliding-windows", model)


def states(bench: Bench) -> Verdict:
    """A hybrid of linear attention, which has states, and full attention."""
    model = build_states(bench.work / "states")
    # vLLM computes linear attention on CPUs in bfloat16 alone, in blocks of its own size.
    return _of_kind(bench, "states", model, dtype="bfloat16", extra={"block_size": None})


def _of_kind(bench: Bench, case: str, model: Path, **settings: Any) -> Verdict:
    """Share a prompt, and then one that goes on from within it."""
    alone = bench.alone(f"alone: {case}", model, **settings)
    first, second = bench.pair(f": {case}", model, **settings)
    wanted = bench.prompts()
    asked = sum(map(len, wanted))
    reference = tokens_of(alone.generate(wanted))
    whole = judge(case, reference, bench.share(first, second, wanted), asked, apart=False)
    if bench.hands_over:
        return whole
    part = [[*one[:300], *other] for one, other in zip(wanted, bench.prompts(214), strict=True)]
    reference = tokens_of(alone.generate(part))
    return worst(whole, judge(case, reference, second.generate(part), asked, apart=False))


def evicted_before_load(bench: Bench) -> Verdict:
    """A lookup has promised tokens, and before the load the store evicts them for others' KV."""
    case = "evicted-before-load"
    wanted, witness = bench.prompts(count=1), bench.prompts(count=1)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    first.generate(witness)
    first.generate(wanted)
    first.drain()
    asked, go = bench.work / "asked", bench.work / "go"
    for file in (asked, go):
        file.unlink(missing_ok=True)
    second.call("pause_before_loads", asked=str(asked), go=str(go))
    found: list[Generated] = []
    failed: list[BaseException] = []
    thread = threading.Thread(target=_generate, args=(second, wanted, found, failed), daemon=True)
    thread.start()
    give_up_at = time.monotonic() + PAUSED_TIMEOUT_S
    while not asked.exists() and thread.is_alive() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    if asked.exists():
        _flood(bench, first)
    go.touch()
    thread.join(CALL_TIMEOUT_S)
    if thread.is_alive() or any(isinstance(e, TimeoutError) for e in failed):
        raise TimeoutError
    if failed or not found:
        raise RuntimeError(f"the engine that was to load failed: {failed}")
    verdict = judge(case, reference, found, sum(map(len, wanted)), apart=False)
    if verdict.verdict in BAD:
        return verdict
    if second.generate(witness)[0].cached_tokens > 0:
        return Verdict(case, NOT_RUN, detail="the store evicted nothing")
    return verdict


def _generate(
    engine: EngineProcess,
    prompts: list[list[int]],
    found: list[Generated],
    failed: list[BaseException],
) -> None:
    try:
        found += engine.generate(prompts, timeout_s=CALL_TIMEOUT_S + PAUSED_TIMEOUT_S)
    except (OSError, RuntimeError) as e:
        failed.append(e)


def _flood(bench: Bench, engine: EngineProcess) -> None:
    """Save more than the store holds."""
    tokens = 2 * (bench.store_mib << 20) // KV_BYTES_PER_TOKEN
    for _ in range(max(1, tokens // (TOKENS * FLOOD_BATCH))):
        engine.generate(bench.prompts(TOKENS, FLOOD_BATCH), max_tokens=1)
        engine.drain()


def older_store(bench: Bench) -> Verdict:
    """An engine with an older version of the connector has written the store; what it left is
    loaded rightly, or not at all."""
    case = "older-version"
    mine = bench.given.get("kv_connector_module_path", "").startswith("connector.")
    older = bench.older or (_older(bench.work / "older") if mine else "")
    if not older:
        return Verdict(case, NOT_RUN, detail="no older version: see --older")
    wanted = bench.prompts()
    reference = tokens_of(bench.alone().generate(wanted))
    asked = sum(map(len, wanted))
    path = absolute(os.pathsep.join([older, os.environ.get("PYTHONPATH", "")]))
    before = bench.connector
    bench.in_folder("o")
    try:
        writer = bench.sharing("older", env={"PYTHONPATH": path})
        told = bench.keep(writer, wanted)
        detail = ""
        if told is None:
            forget(writer)
            own = judge(case, reference, writer.generate(wanted), asked, apart=False)
            if own.verdict in BAD:
                return own
            detail = (
                "" if own.cached_tokens else "the older version loads nothing of its own either"
            )
        found = bench.sharing("newer").generate(wanted, kv_transfer_params=told)
    finally:
        bench.connector = before
    verdict = judge(case, reference, found, asked, apart=False)
    return replace(verdict, detail=verdict.detail or detail)


def _older(folder: Path) -> str:
    """Return this project as it was once, unpacked; nothing where its history is not here."""
    command = ["git", "-C", str(ROOT), "archive", OLDER, "connector", "kvstore"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        return ""
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return str(folder)


KINDS: dict[str, Callable[[Bench], Verdict]] = {
    "adapters": adapters,
    "reloaded-adapter": reloaded_adapter,
    "pictures": pictures,
    "revision": revision,
    "sliding-windows": sliding_windows,
    "states": states,
    "evicted-before-load": evicted_before_load,
    "older-version": older_store,
}
