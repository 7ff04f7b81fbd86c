"""The matrix of docs/engines.md, made from the tests. Run as a program, it writes it there.

A test says what it shows: `@pytest.mark.covers("full attention", "engine")`, with a row of `ROWS`
and one of `HOW`. Which engine that is follows from the folder of the test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "engines.md"
BEGIN = "<!-- made from the tests by tests/engine_matrix.py: not edited down to its end -->"
END = "<!-- end of what is made from the tests -->"
HOW = {
    "engine": "runs in a real engine, with and without the store the same tokens",
    "memory": "byte for byte in the engine's own memory (its allocation, its pools)",
    "model": "the engine's own scheduler and configuration, around a model of the forward",
    "interface": "a model of the engine, made after its source: its calls, in its order",
    "left out": "not stored; the rest of the model is",
    "refused": "refused at start, by name",
}
"""Strongest first: a cell shows the first that some test has shown."""
ROWS = {
    "KV cache": (
        "full attention",
        "sliding + full attention",
        "attention in chunks (Llama 4)",
        "heads that differ by group (MiMo-V2, Gemma 4)",
        "heads that differ within a group",
        "draft models with heads of their own",
        "hidden states (extract_hidden_states)",
        "MLA (DeepSeek-V2, V3)",
        "MLA + indexer (DeepSeek-V3.2, GLM-5)",
        "several tokens a state (DeepSeek-V4)",
        "state-space layers, mode align",
        "state-space layers, any other mode",
        "reference windows (R-SWA)",
        "ring buffers (GLM-5.3, DeepSeek-V4.1)",
        "windows that are replayed (DeepSeek-V4.1)",
        "copies of another group (enable_kv_transfer off)",
        "cross attention (encoder-decoder)",
        "non-causal attention (prefix LM)",
        "pooling over all tokens (MEAN, CLS)",
        "logprobs of the prompt",
        "routed experts (enable_return_routed_experts)",
        "fp8 KV, scales per tensor",
        "fp8 KV, scales per token and head",
        "NVFP4 KV",
    ),
    "Modes": (
        "tensor parallel 1 and 2, mixed",
        "tensor parallel 1, 2, 4, 8, mixed",
        "two pipeline stages",
        "external_launcher (torchrun)",
        "data parallel",
        "decode context parallel",
        "prefill context parallel",
        "engines of other block sizes",
        "chunked prefill",
        "preemption",
        "LoRA",
        "multimodal input",
        "n-gram drafts",
        "suffix drafts",
        "draft models (EAGLE, MTP)",
        "model runner V2",
        "asynchronous scheduling, two steps in flight",
        "layer by layer",
        "blocks in VRAM",
        "sleep, reset, new weights",
    ),
    "Neighbours": (
        "MultiConnector",
        "tier of vLLM's own offloading",
        "prefill and decode apart, by the router",
        "KV events",
        "LMCache's server, chunks of other hosts",
        "LMCache inside the engine's process",
        "LMCache's quotas by cache salt",
        "SGLang's pools of hybrid and draft models",
    ),
}
ENGINES = {
    "vllm": "vLLM 0.32",
    "vllm, newest": "vLLM 0.33",
    "sglang": "SGLang 0.5.23",
    "lmcache": "LMCache 0.5.6, 0.5.7rc2",
    "tensorrt_llm": "TensorRT-LLM",
}
"""By the folder of their tests, which is the name of their marker too. What is said of the newest
vLLM is what `scripts/test-engines vllm` runs."""


class Cover(NamedTuple):
    """One test's word for one row."""

    row: str
    how: str
    engine: str
    path: Path


def covers() -> Iterator[Cover]:
    """What all tests say, read without running them."""
    elsewhere = _not_with_the_newest()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "mark.covers(" not in source:
            continue
        marker = next((one for one in ENGINES if one in path.relative_to(ROOT).parts), "vllm")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.covers":
                row, how = (ast.literal_eval(one) for one in node.args)
                assert any(row in rows for rows in ROWS.values()), f"{path}: no row {row!r}"
                assert how in HOW, f"{path}: no kind of proof {how!r}"
                yield Cover(row, how, marker, path)
                if "mark.vllm" in source and not elsewhere.search(source):
                    yield Cover(row, how, "vllm, newest", path)


def _not_with_the_newest() -> re.Pattern[str]:
    """In files with tests that `scripts/test-engines vllm` leaves out."""
    found = re.search(r"grep -LE '([^']+)'", (ROOT / "scripts" / "test-engines").read_text())
    assert found is not None
    return re.compile(found[1])


def lines() -> Iterator[str]:
    found = list(covers())
    yield BEGIN
    yield ""
    yield from (f"- **{how}**: {meaning}" for how, meaning in HOW.items())
    for part, rows in ROWS.items():
        yield ""
        yield "| " + " | ".join((part, *ENGINES.values())) + " |"
        yield "|---" * (1 + len(ENGINES)) + "|"
        for row in rows:
            cells = [_cell([c for c in found if (c.row, c.engine) == (row, e)]) for e in ENGINES]
            yield "| " + " | ".join((row, *cells)) + " |"
    yield END


def _cell(found: list[Cover]) -> str:
    for how in HOW:
        for cover in found:
            if cover.how == how:
                return f"[{how}](../{cover.path.relative_to(ROOT)})"
    return ""


def text() -> str:
    return "\n".join(lines())


def in_document() -> str:
    """What stands there now."""
    _, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    below, end, _ = rest.partition(END)
    return begin + below + end


if __name__ == "__main__":
    whole = DOCUMENT.read_text()
    DOCUMENT.write_text(whole.replace(in_document(), text()))
    sys.exit(0)
