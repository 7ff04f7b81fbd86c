"""Connectors of somebody else, written against vLLM's base class: one that is right, and
another that is wrong.

Engines take long to start: a file `KIND` in the connector's folder names the class that it is from
the next request on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

DIGEST_BYTES = 32
KIND = "kind"


@dataclass
class Moves(KVConnectorMetadata):
    """What one step loads and saves: names and block ids."""

    loads: list[tuple[str, int]] = field(default_factory=list)
    saves: list[tuple[str, int]] = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1):
    """Keeps every block in a file with a checksum, named by vLLM's hash of all tokens up to its end
    (salt and pictures included), the model's files, dtype and block size; nothing of adapters."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("folder", None))
        self.tokens = vllm_config.cache_config.block_size
        model = vllm_config.model_config
        said = hashlib.sha256(f"{model.dtype} {self.tokens} {model.revision}".encode())
        for path in sorted(Path(model.model).glob("*")):
            said.update(path.read_bytes())
        self.model = said.hexdigest()
        self.moves = Moves()
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.local: dict[str, int] = {}
        self.failed: set[int] = set()

    def become(self) -> None:
        said = self.folder / KIND
        self.__class__ = globals()[said.read_text()] if said.exists() else FolderConnector

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        self.become()

    def names(self, request: Any) -> list[str]:
        if request.lora_request is not None:
            return []
        return [f"{self.model}-{one.hex()}" for one in request.block_hashes]

    def matched_blocks(self, request: Any) -> int:
        blocks = 0
        for name in self.names(request)[: (request.num_tokens - 1) // self.tokens]:
            if not (self.folder / name).exists():
                break
            blocks += 1
        return blocks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.local[request.request_id] = num_computed_tokens
        return max(0, self.matched_blocks(request) * self.tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        start = self.local[request.request_id] // self.tokens
        end = start + num_external_tokens // self.tokens
        found = list(zip(self.names(request), blocks.get_block_ids()[0], strict=False))
        self.moves.loads += found[start:end]

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.save(new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        going_on = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(going_on.req_ids):
            blocks = list(going_on.new_block_ids[i][0]) if going_on.new_block_ids[i] else []
            before = [] if name in going_on.resumed_req_ids else self.tables[name]
            self.tables[name] = before + blocks
            self.save(name, going_on.num_computed_tokens[i], scheduled[name])
        moves, self.moves = self.moves, Moves()
        return moves

    def save(self, name: str, computed: int, scheduled: int) -> None:
        """Note the blocks that are full once this step has computed."""
        blocks = zip(self.names(self.requests[name]), self.tables[name], strict=False)
        full = slice(computed // self.tokens, (computed + scheduled) // self.tokens)
        self.moves.saves += list(blocks)[full]

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = [kv_caches[name] for name in sorted(kv_caches)]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.become()
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.load(self._get_connector_metadata().loads)

    def load(self, loads: Iterable[tuple[str, int]]) -> None:
        for name, block in loads:
            try:
                said = (self.folder / name).read_bytes()
            except OSError:
                said = b""
            digest, payload = said[:DIGEST_BYTES], said[DIGEST_BYTES:]
            if hashlib.sha256(payload).digest() != digest:
                self.failed.add(block)
                continue
            values = torch.frombuffer(bytearray(payload), dtype=self.layers[0].dtype)
            for layer, part in zip(self.layers, values.chunk(len(self.layers)), strict=True):
                layer[block] = part.view(layer[block].shape)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.write(self._get_connector_metadata().saves)

    def write(self, saves: Iterable[tuple[str, int]]) -> None:
        for name, block in saves:
            values = torch.stack([layer[block] for layer in self.layers]).contiguous()
            payload = values.view(torch.uint8).numpy().tobytes()
            part = self.folder / f"part of {name}"
            part.write_bytes(hashlib.sha256(payload).digest() + payload)
            part.rename(self.folder / name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


class NoSalt(FolderConnector):
    """Names blocks by their tokens and those before, and by nothing else of the request."""

    def names(self, request: Any) -> list[str]:
        told = list(request.all_token_ids)
        ends = range(self.tokens, len(told) + 1, self.tokens)
        return [hashlib.sha256(repr(told[:end]).encode()).hexdigest() for end in ends]
