"""Reads completions' bodies, and makes those that prefill and decode engines are given.

Bodies are as OpenAI's API has them, JSON that any client has made: of each field any type may come.
"""

from __future__ import annotations

from collections.abc import Mapping

from connector import PromptKeys

Body = Mapping[str, object]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZED = {
    COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    CHAT: (
        *("model", "messages", "tools", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "chat_template_kwargs"),
    ),
}
"""Fields that decide which tokens a prompt is."""
NOT_TOLD = ("cache_salt", "truncate_prompt_tokens", "documents", "reasoning_effort")
"""Fields that decide what its keys are, but that `/tokenize` ignores."""
TO_BE_DECODED = {"do_remote_decode": True, "do_remote_prefill": False}
"""The field by which vLLM's routers say that another engine continues the prompt."""
ANSWER_FIELDS = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "echo")
"""Fields about an answer that a prefill engine is not asked for."""


def prefill_body(path: str, body: Body) -> dict[str, object]:
    """Return the request for a prefill engine: the same prompt, handed over with all its tokens,
    one token, no stream, and its keys."""
    out = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    out |= {"stream": False, "max_tokens": 1, "n": 1}
    if path == CHAT:
        out["max_completion_tokens"] = 1
    params = out.get("kv_transfer_params")
    out["kv_transfer_params"] = {
        **(params if isinstance(params, dict) else {}),
        **TO_BE_DECODED,
        PromptKeys.ASKED: True,
    }
    return out


def decode_body(body: dict[str, object], answer: Body) -> dict[str, object]:
    """Return the client's request for a decode engine, with the parameters that the prefill engine
    returned."""
    params_of_prefill = answer.get("kv_transfer_params")
    if (
        not isinstance(params_of_prefill, dict)
        or params_of_prefill.get("do_remote_prefill") is not True
    ):
        return body
    params_of_prefill = {
        name: value for name, value in params_of_prefill.items() if name != PromptKeys.ASKED
    }
    params = body.get("kv_transfer_params")
    return {
        **body,
        "kv_transfer_params": {**(params if isinstance(params, dict) else {}), **params_of_prefill},
    }


def token_list(tokens: object) -> list[int] | None:
    """Return the argument when it is a list of tokens, else None."""
    return tokens if isinstance(tokens, list) and all(type(one) is int for one in tokens) else None


def text_only(messages: object) -> bool:
    """Return whether all content is text: images and the like are part of the KV and not of the
    tokens."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return False
    return True
