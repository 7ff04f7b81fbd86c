"""A connector that records every call and answers what a test has set."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any, ClassVar

from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorTransferResults

CALLS = {n for n, call in vars(KVConnectorBase_V1).items() if n[0] != "_" and isfunction(call)}
"""Names of all calls that an engine makes of a connector it has."""
DEFAULTS: dict[str, Any] = {
    "get_num_new_matched_tokens": (0, False),
    "build_connector_meta": "meta",
    "request_finished": (False, None),
    "take_events": (),
    "has_pending_push_work": False,
    "get_transfer_results": KVConnectorTransferResults(),
    "get_block_ids_with_load_errors": set(),
}


def recorded(name: str) -> Callable[..., Any]:
    def call(self: Fake, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((name, args, kwargs))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


class Fake(type("Recorded", (), {name: recorded(name) for name in CALLS}), KVConnectorBase_V1):  # type: ignore[misc]
    """Registered by module path; `made` holds them in the order in which they were made."""

    made: ClassVar[list[Fake]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config, self.engine = vllm_config.kv_transfer_config, vllm_config.engine_info
        if self.config.get_from_extra_config("fails", False):
            raise RuntimeError("cannot be made")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = dict(DEFAULTS)
        Fake.made.append(self)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return vllm_config.kv_transfer_config.get_from_extra_config("layout", None)  # type: ignore[no-any-return]

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args, _ in self.calls if called == name]


class OtherFake(Fake):
    """A second connector, with a name of its own."""
