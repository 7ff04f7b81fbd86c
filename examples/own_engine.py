"""Prefill in an engine of your own: load the blocks that anybody has computed, save the rest.

A whole connector, with paged memory and transfers beside the forward: docs/connector.md.
"""

from kvstore import Client

BLOCK_TOKENS = 16


def compute(tokens: list[int]) -> bytes:
    """In place of your model: the KV of these tokens."""
    return bytes(token % 256 for token in tokens) * 64


def prefill(store: Client, prompt: list[int]) -> int:
    """How many blocks of the prompt did not have to be computed."""
    kv = [bytearray(BLOCK_TOKENS * 64) for _ in range(len(prompt) // BLOCK_TOKENS)]
    found = store.get_blocks(prompt, kv)  # the longest leading run
    for i in range(found, len(kv)):
        kv[i][:] = compute(prompt[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
    store.put_blocks(prompt, kv)  # what is there already is not written again
    return found


# The namespace names all that the bytes depend on: weights, dtype, layout.
with Client(namespace="my-model r1 bf16 layout-2", block_tokens=BLOCK_TOKENS) as store:
    print(prefill(store, list(range(100))))  # 0: nobody has seen it
    print(prefill(store, [*range(80), 7, 7, 7, 7]))  # 5: the same first 80 tokens
