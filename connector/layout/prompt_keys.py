"""Computes the keys of a prompt's blocks in one engine, for programs that know only its tokens.

A router asks an engine once for its `PromptKeys` and can then look up any prompt
of plain tokens in the index by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from connector.layout.block_hashes import ALGORITHM, extend
from connector.layout.geometry import StoreLayout
from connector.limits import BLOCK_TOKENS_MAX
from kvstore import Namespace, UsageError
from kvstore.spi import Key

KEY_BYTES = 32
"""Size of a `kvstore.spi.Key`."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Computes how one engine names its blocks: those of its first KV cache group and shard, which
    stand for all others."""

    ASKED: ClassVar = "kvstore_keys"
    """In a request's `kv_transfer_params`: true asks the engine for `answer`, which it gives in
    the `kv_transfer_params` of the response, under the same name."""

    block_tokens: int
    namespace: Namespace

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise UsageError(
                "block_tokens", self.block_tokens, f"must be from 1 to {BLOCK_TOKENS_MAX}"
            )

    @classmethod
    def of_layout(cls, layout: StoreLayout) -> Self | None:
        """Return the keys of `layout`'s prompts; None for an engine that hashes by itself, whose
        keys tokens do not tell."""
        namespace = layout.groups[0].namespaces[0]
        if namespace.fields.get("hash_algorithm") != ALGORITHM:
            return None
        return cls(layout.block_tokens, namespace)

    def of(self, tokens: Sequence[int]) -> list[Key]:
        """Return keys of all full blocks of a prompt that tokens alone make up: no LoRA, image or
        salt."""
        return self.of_hashes(extend([], tokens, self.block_tokens, None))

    def of_hashes(self, hashes: Sequence[bytes]) -> list[Key]:
        """Return keys from the hashes that the engine's connector has made, whatever is in them."""
        return self.namespace.engine_keys(hashes)

    def answer(self, hashes: Sequence[bytes]) -> dict[str, object]:
        """Return what an engine answers a request with `ASKED`: plain values, for JSON."""
        keys = self.of_hashes(hashes)
        return {
            "block_tokens": self.block_tokens,
            "namespace": self.namespace.fields,
            "last_key": keys[-1].hex() if keys else None,
        }

    @classmethod
    def from_answer(cls, answer: Mapping[str, object]) -> tuple[Self, Key | None]:
        """Return the same, and the key of the last full block of the request that asked.

        Raises `UsageError` for what no engine answers.
        """
        fields, tokens, last = (
            answer.get(name) for name in ("namespace", "block_tokens", "last_key")
        )
        if not isinstance(fields, dict) or not all(
            value is None or isinstance(value, str | int | float) for value in fields.values()
        ):
            raise UsageError(f"{cls.ASKED}.namespace", fields, "must be plain fields")
        if type(tokens) is not int:
            raise UsageError(f"{cls.ASKED}.block_tokens", tokens, "must be an integer")
        return cls(tokens, Namespace(fields)), None if last is None else _key_of(last)


def _key_of(last: object) -> Key:
    try:
        key = bytes.fromhex(last) if isinstance(last, str) else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        must = f"must be {2 * KEY_BYTES} hexadecimal digits"
        raise UsageError(f"{PromptKeys.ASKED}.last_key", last, must)
    return key
