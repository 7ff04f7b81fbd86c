"""Clients that ask why a block is missing: what they save, and what they are told."""

import os

from stores import NodeProcess

from kvstore import Client, Explanation, Namespace
from kvstore.spi import Missing

TOKENS = range(64)
BLOCK_TOKENS = 16
FIELDS = {"model": "m", "dtype": "bfloat16", "layers": 4}


def fresh(node: NodeProcess, **options: object) -> Client:
    merged = {"namespace": Namespace(FIELDS), "block_tokens": BLOCK_TOKENS, **node.client_options}
    return Client(**{**merged, **options})


def save(client: Client, blocks: int = 4, tokens: range = TOKENS, size: int = 1000) -> None:
    assert all(client.put_blocks(tokens, [os.urandom(size) for _ in range(blocks)]))


def why(explanation: Explanation) -> Missing:
    assert explanation.first_missing is not None
    return explanation.first_missing
