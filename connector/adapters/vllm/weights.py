"""Adds to a vLLM request's hashes what its namespace does not say: adapters, changed weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from connector.layout.identity import files_of, weights_or_unknown
from connector.limits import FINGERPRINTS_KEPT_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class Weights:
    """Tells adapters apart by their files, which vLLM knows by name and path, and weights that
    were changed in place from those that were loaded at the start."""

    def __init__(self, vllm_config: VllmConfig, process: str, *, named: bool = False) -> None:
        """`process` is no other process's, unless both are of one engine. `named`: the user has
        given a `weights_id`. Then `set_weight_version` tells engines of that id apart; alone it
        does not, since any two users may count from 1."""
        self._named = named
        self._version = ""
        load = vllm_config.load_config
        self._cache_dir = load.download_dir
        self._process = process
        self._changes = self._loads = 0
        self._adapters: OrderedDict[tuple[int, str, str], str] = OrderedDict()

    def of(self, request: Request) -> tuple[str, ...]:
        """Return what goes into the hashes of all of the request's blocks.

        Reads an adapter's files when its first request comes, and again when vLLM is to load it
        again.
        """
        adapter = request.lora_request
        version = ("weights", self._version) if self._version else ()
        return version if adapter is None else (*version, "lora", self._adapter(adapter))

    def seen_by(self, request: Request) -> tuple[str, ...] | None:
        """Return what `of` would, from any thread, for a request that knows its adapter's name and
        path but not its number; None for one whose files cannot be read."""
        adapter = request.lora_request
        if adapter is None:
            return self.of(request)
        version = ("weights", self._version) if self._version else ()
        for (_, *names), known in list(self._adapters.copy().items()):
            if names == [adapter.lora_name, adapter.lora_path]:
                return (*version, "lora", known)
        path, why_not = files_of(adapter.lora_path, None, self._cache_dir)
        known = weights_or_unknown(path, why_not, "")
        return (*version, "lora", known) if known else None

    def may_have_changed(self) -> None:
        """Take the weights as like no others from here on, until somebody names them."""
        self._changes += 1
        self._version = f"private {self._process} {self._changes}"

    def name(self, version: str) -> None:
        if self._named:
            self._version = f"version {version}"
        else:
            self.may_have_changed()

    def adapter_changes(self, lora_id: int) -> None:
        """Have the adapter's files read again when its next request comes."""
        for name in [name for name in self._adapters if name[0] == lora_id]:
            del self._adapters[name]

    def _adapter(self, adapter: LoRARequest) -> str:
        name = (int(adapter.lora_int_id), str(adapter.lora_name), str(adapter.lora_path))
        known = self._adapters.get(name)
        if known is None or adapter.load_inplace:
            path, why_not = files_of(name[2], None, self._cache_dir)
            self._loads += 1
            unknown = f"of process {self._process} {self._loads}"
            known = weights_or_unknown(path, why_not, unknown)
        self._adapters[name] = known
        self._adapters.move_to_end(name)
        if len(self._adapters) > FINGERPRINTS_KEPT_MAX:
            self._adapters.popitem(last=False)
        return known
