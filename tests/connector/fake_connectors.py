"""A connector whose two sides record every call and answer what a test has set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from connector.transfer.base import KVConnectorScheduler, KVConnectorWorker, TransferResults
from connector.transfer.config import KVTransferConfig
from connector.transfer.forwarding import calls_of

DEFAULTS: dict[str, Any] = {
    "get_num_new_matched_tokens": (0, False),
    "build_connector_meta": "meta",
    "request_finished": (False, None),
    "take_events": (),
    "has_pending_work": False,
    "get_finished": TransferResults(),
    "get_block_ids_with_load_errors": set(),
}


class Recorder:
    """Answers every call of a protocol; `answers` and `calls` are the test's."""

    def __init__(self, protocol: type, config: KVTransferConfig, engine: Any) -> None:
        self.config, self.engine = config, engine
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = dict(DEFAULTS)
        self._protocol = protocol

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in calls_of(self._protocol):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args, _ in self.calls if called == name]


class Fake:
    """Registered by module path; `made` holds the sides in the order in which they were made."""

    made: ClassVar[list[Recorder]] = []

    @classmethod
    def make_scheduler(cls, config: KVTransferConfig, engine: Any) -> Recorder:
        return cls._make(KVConnectorScheduler, config, engine)

    @classmethod
    def make_worker(cls, config: KVTransferConfig, engine: Any) -> Recorder:
        return cls._make(KVConnectorWorker, config, engine)

    @classmethod
    def _make(cls, protocol: type, config: KVTransferConfig, engine: Any) -> Recorder:
        if config.get_from_extra_config("fails", False):
            raise RuntimeError("cannot be made")
        Fake.made.append(Recorder(protocol, config, engine))
        return Fake.made[-1]


class OtherFake(Fake):
    """A second connector, with a name of its own."""
